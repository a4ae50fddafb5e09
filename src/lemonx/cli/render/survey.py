"""The survey of all model types as a table of 80 columns, and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, styled, table
from lemonx.diagnostics.survey.measuring import COLUMNS, EXACT, NONE, Row
from lemonx.diagnostics.survey.record import best, counts

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {EXACT: "green", NONE: "dim", "wrong": "bold red", "failed": "red", "refused": "yellow"}
# Headings that fit beside a name of 27 letters on 80 columns.
_SHORT = {"width x2": "x2", "width x1.5": "x1.5"}
_LONGEST_NAME = 27


def survey_json(rows: Sequence[Row]) -> dict[str, JsonValue]:
    return {"rows": [asdict(row) for row in rows], "counts": counts(rows)}


def print_survey(rows: Sequence[Row]) -> None:
    """A table for every task, what did not run with the reason, and the counts."""
    out = Out()
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        ran = [row for row in of_task if row.ran]
        out.line(styled("bold", task_name(task)), f": {len(of_task)} model types, of which {len(ran)} run")
        if ran:
            out.table(_table(ran))
        for row in of_task:
            if not row.ran:
                out.line(f"  {row.model_type}: {row.why}")
    for line in count_lines(rows):
        out.line(line)
    out.line(NOTE)


NOTE = (
    "x2, x1.5: the width, with heads and inner sizes; exact: outputs are equal to 1e-10 in float64 on inputs that the "
    "growth did not see; -: no such size; read: the share of all parameters that the inputs read"
)


def task_name(task: str) -> str:
    return task.replace("_", " ").lower()


def _table(rows: Sequence[Row]) -> Any:
    found = table("model_type", *(_SHORT.get(column, column) for column in COLUMNS), "read")
    for row in rows:
        share = "?" if row.share is None else f"{int(100 * row.share)} %"
        found.add_row(_cut(row.model_type), *(_cell(cell.kind) for cell in best(row).values()), share)
    return found


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 2]}.."


def _cell(kind: str) -> Text:
    return styled(_STYLES.get(kind, ""), kind)


def count_lines(rows: Iterable[Row]) -> list[str]:
    """One line for every task, and one for all."""
    lines = []
    for task, count in counts(rows).items():
        name = "all types" if task == "all" else task_name(task)
        grown = ", ".join(f"{column} {count.get(column, 0)}" for column in COLUMNS)
        ran = f"{count.get('surveyed', 0)} types, {count.get('built', 0)} built, {count.get('ran', 0)} run"
        lines.append(f"{name}: {ran}; exact: {grown}")
    return lines


def survey_markdown(rows: Sequence[Row]) -> str:
    """The same for a page; the reasons of what was refused stand below as numbered notes."""
    notes: list[str] = []
    lines = [f"| model type | task | {' | '.join(COLUMNS)} | read |", "|---" * (len(COLUMNS) + 3) + "|"]
    for row in sorted((row for row in rows if row.ran), key=lambda row: (row.model_type, row.task)):
        cells = [_noted(cell.kind, cell.why, notes) for cell in best(row).values()]
        share = "?" if row.share is None else f"{int(100 * row.share)} %"
        lines.append(f"| `{row.model_type}` | {task_name(row.task)} | {' | '.join(cells)} | {share} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]
    silent = sorted((row for row in rows if not row.ran), key=lambda row: row.model_type)
    lines += [
        "",
        "Not run:",
        "",
        *(f"- `{row.model_type}` ({task_name(row.task)}): {_line(row.why)}" for row in silent),
    ]
    return "\n".join([*(f"- {line}" for line in count_lines(rows)), "", *lines])


def _noted(kind: str, why: str, notes: list[str]) -> str:
    if not why:
        return kind
    note = _line(why)
    if note not in notes:
        notes.append(note)
    return f"{kind} ({notes.index(note) + 1})"


def _line(text: str) -> str:
    """A message of another library as one line of a page."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")[:200]
