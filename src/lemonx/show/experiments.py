"""Experiments: the list of them, how far one is, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lemonx.experiments.answer import AT_MOST
from lemonx.experiments.pool import Progress as Far
from lemonx.experiments.pool import Tell
from lemonx.experiments.spec import Experiment
from lemonx.show.console import console


def print_list(found: list[Experiment]) -> None:
    out = console()
    for experiment in found:
        out.print(f"[bold]{experiment.name}[/bold]: {experiment.title}")
        out.print(f"  {experiment.claim} Cost: {experiment.cost}", markup=False)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Tell]:
    """A bar over the pieces of an experiment, with the time left as far as it can be told."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("looking at the cache", total=None)

        def tell(far: Far) -> None:
            left = "" if far.left is None else f", about {far.left / 60:.0f} min left"
            bar.update(task, completed=far.done, total=far.total, description=f"{far.label}{left}")

        yield tell


def print_result(content: dict[str, Any], page: Path) -> None:
    out, experiment = console(), content["experiment"]
    mark, steps = content["mark"], content["steps"]
    out.print(f"[bold]{experiment['title']}[/bold]")
    out.print(
        f"mark: {experiment['metric']} {mark['mean']:.4f}{plus_minus(mark['spread'], 4)}, "
        f"what {experiment['baseline']} reaches in {steps} steps; {len(experiment['seeds'])} seed(s)"
    )
    lengths = sorted({at["steps"] for arm in content["arms"] for at in arm["at"]})
    table = Table("method", *(f"{n} steps" for n in lengths), "steps to the mark", "saved", box=None, pad_edge=False)
    for arm in content["arms"]:
        at = {entry["steps"]: entry for entry in arm["at"]}
        values = [f"{at[n]['mean']:.4f}{plus_minus(at[n]['spread'], 4)}" if n in at else "" for n in lengths]
        table.add_row(arm["label"], *values, reach_text(arm), saved_text(arm, "steps"))
    out.print(table)
    out.print(f"report: {page}")


def plus_minus(spread: float | None, digits: int) -> str:
    return "" if spread is None else f" ± {spread:.{digits}f}"


def reach_text(arm: dict[str, Any]) -> str:
    """Steps to the mark, or how far the best run stays from it."""
    reach = arm["reach"]
    if reach["steps"] is None:
        return f"not reached ({reach['short_of']:.3f} short)"
    word = "at most " if reach["bound"] == AT_MOST else ""
    return f"{word}{reach['steps']['mean']:.0f}{plus_minus(reach['steps']['spread'], 0)}"


def saved_text(arm: dict[str, Any], what: str) -> str:
    """The part of the cost that is saved, in percent."""
    if arm["saved"] is None:
        return ""
    value = arm["saved"][what]
    spread = None if value["spread"] is None else 100 * value["spread"]
    return f"{100 * value['mean']:.1f} %{plus_minus(spread, 1)}"
