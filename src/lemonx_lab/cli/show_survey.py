"""The survey of all model types as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, styled, table
from lemonx_lab.survey.counting import Count, by_task, count
from lemonx_lab.survey.rows import (
    COLUMNS,
    ENOUGH,
    EXACT,
    FAILED,
    NOT_COMPARED,
    NOT_VERIFIED,
    REFUSED,
    UP_TO_EPS,
    WRONG,
    Cell,
    Row,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_STYLES = {
    EXACT: "green",
    UP_TO_EPS: "green",
    NOT_COMPARED: "dim",
    REFUSED: "yellow",
    NOT_VERIFIED: "red",
    FAILED: "red",
    WRONG: "bold red",
}
_LONGEST_NAME = 27


def survey_json(rows: Sequence[Row]) -> dict[str, JsonValue]:
    counted = {"all": count(rows), **{task: count(of) for task, of in by_task(rows).items()}}
    return {"rows": [asdict(row) for row in rows], "counts": {name: asdict(found) for name, found in counted.items()}}


def print_survey(rows: Sequence[Row]) -> None:
    """A table for every task, what did not run with the reason, and the counts."""
    out = Out()
    for task, of_task in by_task(rows).items():
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
    "Each column is one `lemonx expand` of a folder. exact: outputs are equal to 1e-10 in float64 on inputs that the "
    "growth did not see; to eps: up to what the certificate says that eps changes; read: the share of all parameters "
    f"that these outputs depend on. Counts leave out what is read to less than {ENOUGH:.0%}."
)


def task_name(task: str) -> str:
    return task.replace("_", " ").lower()


def _table(rows: Sequence[Row]) -> Table:
    found = table("model_type", *COLUMNS, "read")
    for row in rows:
        found.add_row(_cut(row.model_type), *(_cell(cell) for cell in row.cells.values()), share_text(row))
    return found


def share_text(row: Row) -> str:
    return "?" if row.share is None else f"{int(100 * row.share)} %"


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 2]}.."


def _cell(cell: Cell) -> Text:
    return styled(_STYLES.get(cell.kind, ""), cell.kind)


def count_lines(rows: Sequence[Row]) -> list[str]:
    """All types, then one line for every task."""
    found = count(rows)
    return [
        f"{found.surveyed} model types: {found.built} built tiny, {found.ran} run, {found.read} read to {ENOUGH:.0%}",
        *(f"{task_name(task)}: {_counts(of)}" for task, of in {"all types": found, **counted(rows)}.items()),
    ]


def counted(rows: Sequence[Row]) -> dict[str, Count]:
    return {task: count(of) for task, of in by_task(rows).items()}


def _counts(found: Count) -> str:
    columns = (exact_text(found, column) for column in COLUMNS)
    told = (f"{column} {number}" for column, number in zip(COLUMNS, columns, strict=True))
    return f"of {found.surveyed} types exact: {', '.join(told)}"


def exact_text(found: Count, column: str) -> str:
    """The number of types that grow exactly; types that do so to eps stand behind a plus.

    >>> from lemonx_lab.survey.counting import Count
    >>> exact_text(Count(9, 9, 9, 9, {"depth +1": 5}, {"depth +1": 2}), "depth +1")
    '5 + 2'
    """
    near = found.to_eps[column]
    return f"{found.exact[column]}" + (f" + {near}" if near else "")
