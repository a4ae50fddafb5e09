"""What fsck found, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import DownloadColumn, TransferSpeedColumn

from lemonx.checkpoints.destination import size_text
from lemonx.cli.render.console import Out, bar, styled
from lemonx.diagnostics.fsck_report import ERROR, NOTE, WARNING, Finding, Report

_STYLE = {ERROR: "red", WARNING: "yellow", NOTE: "dim"}


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes that are read."""
    out = Out(stderr=True)
    hidden = quiet or not total
    with bar(DownloadColumn(), TransferSpeedColumn(), out=out, hidden=hidden) as read:
        task = read.add_task("reading", total=total)
        yield lambda count: read.advance(task, count)


def print_finding(finding: Finding, out: Out) -> None:
    level = styled(_STYLE[finding.level], finding.level)
    out.line(level, f": {finding.file!r} {finding.found}: {finding.remedy}", wrapped=False)


def print_report(report: Report, out: Out) -> None:
    for finding in report.findings:
        print_finding(finding, out)
    if report.more:
        out.line(f"and {report.more} more")
    scope = f"against {report.spec}" if report.spec else "without a spec: files only"
    what = f"{report.what}; " if report.what else ""
    numbers = f", {size_text(report.scanned)} of numbers" if report.scanned else ", no numbers read"
    errors = sum(finding.level == ERROR for finding in report.findings) + report.more
    verdict = styled("green", "clean") if report.clean else styled("red", f"{errors} error{'s' * (errors > 1)}")
    looked = f"{what}{report.files} files, {report.tensors} tensors{numbers}, {scope}"
    out.line(f"{report.path}: ", verdict, f" ({looked})", wrapped=False)
