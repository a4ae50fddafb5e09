"""Prints the list of experiments, the progress of one, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from lemonx.cli.render.console import Out, bar, styled, table
from lemonx_lab.experiments import wording
from lemonx_lab.experiments.pool import Progress as Far
from lemonx_lab.experiments.pool import Tell
from lemonx_lab.experiments.result_file import Result
from lemonx_lab.experiments.spec import Experiment


def print_list(found: list[Experiment]) -> None:
    out = Out()
    for experiment in found:
        out.line(styled("bold", experiment.name), f": {experiment.title}")
        out.line(f"  {experiment.claim} Cost: {experiment.cost}")


@contextmanager
def progress(*, quiet: bool) -> Iterator[Tell]:
    """A bar over the pieces of an experiment, with the time left as far as it can be told."""
    with bar(MofNCompleteColumn(), TimeElapsedColumn(), hidden=quiet) as far_bar:
        task = far_bar.add_task("looking at the cache", total=None)

        def tell(far: Far) -> None:
            left = "" if far.left is None else f", about {far.left / 60:.0f} min left"
            far_bar.update(task, completed=far.done, total=far.total, description=f"{far.label}{left}")

        yield tell


def print_result(content: Result, page: Path) -> None:
    out = Out()
    out.line(styled("bold", content.experiment.title))
    out.line(f"mark: {wording.mark_text(content)}; {wording.seeds_text(content)}")
    answer = wording.table(content, {"steps": "saved"})
    for names, *rows in (answer, wording.forgetting_table(content), wording.head_start_table(content)):
        shown = table(*names)
        for row in rows:
            shown.add_row(*row)
        if rows:
            out.table(shown)
    out.line(f"report: {page}")
