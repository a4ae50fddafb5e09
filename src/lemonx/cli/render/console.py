"""Lines, tables and progress bars on the terminal. Strings are text, never markup; style is given separately."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lemonx.guards import phase
from lemonx.guards.shown import shown
from lemonx.guards.terminal import bare, is_quiet, leave

# The width of a result in Python.
_WIDTH = 100


class _Plain(Console):
    """A console that prints strings literally, wherever they occur: no markup, no emoji, no escape sequences."""

    def __init__(self, stream: Any, **options: Any) -> None:
        super().__init__(file=stream, highlight=False, markup=False, emoji=False, force_jupyter=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **{**options, "markup": False, "emoji": False})

    def on_broken_pipe(self) -> None:
        self.quiet = True
        leave()


class Out:
    """Prints results, or, as `Out(stderr=True)`, progress."""

    def __init__(self, *, stderr: bool = False) -> None:
        self.console = _Plain(bare(sys.stderr if stderr else sys.stdout), quiet=is_quiet())

    @property
    def is_terminal(self) -> bool:
        return self.console.is_terminal

    def line(self, *parts: str | Text, wrapped: bool = True) -> None:
        """Print one line, joined from its parts."""
        self.console.print(Text.assemble(*(_text(part) for part in parts)), soft_wrap=not wrapped)

    def table(self, table: Table) -> None:
        self.console.print(table)


class TextOut(Out):
    """Collects lines and tables as a text, for `repr`."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.console = _Plain(self._stream, width=_WIDTH, no_color=True)

    @property
    def content(self) -> str:
        return "\n".join(line.rstrip() for line in self._stream.getvalue().splitlines())


class HtmlOut(Out):
    """Collects lines and tables as one table in HTML, for notebooks."""

    def __init__(self) -> None:
        self._rows: list[str] = []

    def line(self, *parts: str | Text, wrapped: bool = True) -> None:
        self._add([["".join(_text(part).plain for part in parts)]])

    def table(self, table: Table) -> None:
        cells = ([column.header, *column.cells] for column in table.columns)
        self._add(list(zip(*cells, strict=True)))

    def _add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Rows of a table; the only cell of a row is as wide as the table."""
        for row in rows:
            span = " colspan=9" if len(row) == 1 else ""
            cells = (f"<td{span} style='text-align: left'>{escape(shown(cell))}</td>" for cell in row)
            self._rows.append(f"<tr>{''.join(cells)}</tr>")

    @property
    def content(self) -> str:
        return f"<table>{''.join(self._rows)}</table>"


def _text(part: str | Text) -> Text:
    return part if isinstance(part, Text) else Text(shown(part))


def styled(style: str, text: object) -> Text:
    """A text in a colour, or bold."""
    return Text(shown(text), style)


def table(*headings: str) -> Table:
    """A table without lines, to which rows of strings or styled texts are added."""
    return Table(*headings, box=None, pad_edge=False)


class _Description(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(shown(task.description))


def bar(*columns: ProgressColumn, out: Out | None = None, hidden: bool) -> Progress:
    """A progress bar after the description of a task, with further columns."""
    console = (out or Out(stderr=True)).console
    return Progress(
        _Description(),
        BarColumn(),
        *columns,
        console=console,
        disable=hidden or console.quiet or not console.is_terminal,
        transient=True,
        redirect_stdout=False,  # what others print passes the guard instead
        redirect_stderr=False,
    )


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[None]:
    """Show a message on a terminal while something takes long."""
    console = Out(stderr=True).console
    if quiet or console.quiet or not console.is_terminal:
        yield
        return
    spinner = Spinner("dots", Text(shown(what)), style="status.spinner")
    live = Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    with live, phase.told(lambda begins: spinner.update(text=Text(shown(begins)))):
        yield
