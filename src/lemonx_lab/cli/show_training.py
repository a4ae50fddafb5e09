"""Prints recipes, the progress and the result of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, bar, table
from lemonx.planning.summary import human
from lemonx.training.curve import COLUMNS, columns
from lemonx_lab.training.run import FinishedRun

# Rows of the printed curve; the whole of it is in curve.csv.
_ROWS = 12


def print_recipes(found: Mapping[str, str]) -> None:
    listed = table("recipe", "what it trains")
    for name, text in found.items():
        listed.add_row(name, text)
    Out().table(listed)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[int, int, Mapping[str, float]], None]]:
    """A bar over the steps with the last validation loss; without a terminal, one line per evaluation."""
    err = Out(stderr=True)
    hidden = quiet or not err.is_terminal
    with bar(MofNCompleteColumn(), TimeRemainingColumn(), out=err, hidden=hidden) as steps:
        task = steps.add_task("preparing", total=None)

        def tell(step: int, total: int, figures: Mapping[str, float]) -> None:
            steps.update(task, completed=step, total=total)
            if "eval_loss" in figures:
                text = f"validation loss {figures['eval_loss']:.4f}"
                steps.update(task, description=text)
                if not quiet and not err.is_terminal:
                    err.line(f"step {step} of {total}: {text}")

        yield tell


def run_json(done: FinishedRun) -> dict[str, JsonValue]:
    return {**asdict(done), "output": str(done.output)}


def print_run(done: FinishedRun) -> None:
    out = Out()
    shown = [row for row in done.curve if "validation_loss" in row]
    every = -(-len(shown) // _ROWS)
    shown = [row for place, row in enumerate(shown) if place % every == 0 or row is done.final]
    names = [name for name in columns(done.curve) if name != "seconds"]
    figures = table(*(name.replace("_", " ") for name in names))
    for row in shown:
        figures.add_row(*(_cell(name, row.get(name)) for name in names))
    out.table(figures)
    out.line(f"wrote {done.output}: {human(done.flops)} FLOPs, {done.seconds:.0f} s; curve.csv, curve.png, run.json")
    for note in done.notes:
        out.line(note)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name == "flops":
        return human(value)
    if name == "learning_rate":
        return f"{value:.2e}"
    return str(value) if name in COLUMNS[:1] else f"{value:.4f}"
