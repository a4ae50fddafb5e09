"""Experiments: the list of them, how far one is, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lemonx.experiments import wording
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
    out.print(f"[bold]{escape(experiment['title'])}[/bold]")
    out.print(f"mark: {wording.mark_text(content)}; {wording.seeds_text(content)}", markup=False)
    names, *rows = wording.table(content, {"steps": "saved"})
    table = Table(*(escape(name) for name in names), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    out.print(table)
    out.print(f"report: {page}")
