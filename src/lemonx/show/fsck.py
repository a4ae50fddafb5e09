"""What fsck found, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lemonx.checkpoints.destination import size_text
from lemonx.fsck import ERROR, NOTE, WARNING, Report
from lemonx.show.console import console

_STYLE = {ERROR: "red", WARNING: "yellow", NOTE: "dim"}


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes that are read."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    out = console(stderr=True)
    with Progress(*columns, console=out, disable=quiet or not total or not out.is_terminal, transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda count: bar.advance(task, count)


def print_report(report: Report) -> None:
    out = console()
    for finding in report.findings:
        style = _STYLE[finding.level]
        text = f"{finding.file!r} {finding.found}: {finding.remedy}"
        out.print(f"[{style}]{finding.level}[/]: {escape(text)}", soft_wrap=True)
    scope = f"against {report.spec}" if report.spec else "without a spec: files only"
    numbers = f", {size_text(report.scanned)} of numbers" if report.scanned else ", no numbers read"
    errors = sum(finding.level == ERROR for finding in report.findings)
    verdict = "[green]clean[/green]" if report.clean else f"[red]{errors} error{'s' * (errors > 1)}[/red]"
    looked = f"{report.files} files, {report.tensors} tensors{numbers}, {scope}"
    out.print(f"{escape(str(report.path))}: {verdict} ({escape(looked)})", soft_wrap=True)
