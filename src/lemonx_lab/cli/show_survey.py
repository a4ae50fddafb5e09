"""The survey of all model types as tables of 80 columns, and for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, styled, table
from lemonx_lab.survey.counting import Count, by_task, count, plain, reasons
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
_LONGEST_NAME, _MOST_REASONS = 27, 30


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
        found.add_row(_cut(row.model_type), *(_cell(cell) for cell in row.cells.values()), _share(row))
    return found


def _share(row: Row) -> str:
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
        *(f"{task_name(task)}: {_counts(of)}" for task, of in {"all types": found, **_counted(rows)}.items()),
    ]


def _counted(rows: Sequence[Row]) -> dict[str, Count]:
    return {task: count(of) for task, of in by_task(rows).items()}


def _counts(found: Count) -> str:
    columns = (_exact(found, column) for column in COLUMNS)
    told = (f"{column} {number}" for column, number in zip(COLUMNS, columns, strict=True))
    return f"of {found.surveyed} types exact: {', '.join(told)}"


def _exact(found: Count, column: str) -> str:
    """How many types grow exactly; those that do so to eps behind a plus.

    >>> from lemonx_lab.survey.counting import Count
    >>> _exact(Count(9, 9, 9, 9, {"depth +1": 5}, {"depth +1": 2}), "depth +1")
    '5 + 2'
    """
    near = found.to_eps[column]
    return f"{found.exact[column]}" + (f" + {near}" if near else "")


def survey_markdown(rows: Sequence[Row], transformers: str, jobs: int) -> str:
    """The same for a page: counts, the reasons by how many types they stop, and a folded table for every task.

    `jobs`: how many rows a whole survey has.
    """
    numbers = {why: number for number, (why, _) in enumerate(reasons(rows).most_common(_MOST_REASONS), 1)}
    measured = f" So far {len(rows)} of {jobs} pairs of a model type and a task are measured, drawn at random."
    share = "" if len(rows) == jobs else measured
    lines = [
        f"Measured with transformers {transformers}.{share}",
        "",
        *_count_table(rows),
        "",
        *_reason_table(rows),
        "",
    ]
    for task, of_task in by_task(sorted(rows, key=lambda row: (row.task, row.model_type))).items():
        ran = [row for row in of_task if row.ran]
        lines += [*_folded(f"{task_name(task)}: {len(ran)} of {len(of_task)} run", ran, numbers), ""]
    if silent := sorted((row for row in rows if not row.ran), key=lambda row: row.model_type):
        lines += ["<details><summary>Not run, and why</summary>", ""]
        lines += [f"- `{row.model_type}` ({task_name(row.task)}): {_line(row.why)}" for row in silent]
        lines += ["", "</details>"]
    return "\n".join(lines).rstrip()


def _count_table(rows: Sequence[Row]) -> list[str]:
    head = ["task", "types", "run", "read", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, found in {"all types, each once": count(rows), **_counted(rows)}.items():
        numbers = (found.surveyed, found.ran, found.read, *(_exact(found, column) for column in COLUMNS))
        lines.append(f"| {task_name(name)} | {' | '.join(map(str, numbers))} |")
    return lines


def _reason_table(rows: Sequence[Row]) -> list[str]:
    found = reasons(rows).most_common(_MOST_REASONS)
    lines = ["Why types do not grow in some column, by how many:", "", "| | types | reason |", "|---|---|---|"]
    return lines + [f"| {number} | {many} | {_line(why)} |" for number, (why, many) in enumerate(found, 1)]


def _folded(title: str, rows: Sequence[Row], numbers: Mapping[str, int]) -> list[str]:
    head = f"| model type | {' | '.join(COLUMNS)} | read |"
    lines = [f"<details><summary>{title}</summary>", "", head, "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        cells = (_noted(cell, numbers) for cell in row.cells.values())
        lines.append(f"| `{row.model_type}` | {' | '.join(cells)} | {_share(row)} |")
    return [*lines, "", "</details>"]


def _noted(cell: Cell, numbers: Mapping[str, int]) -> str:
    number = numbers.get(plain(cell.why))
    return f"{cell.kind} ({number})" if cell.why and number is not None else cell.kind


def _line(text: str) -> str:
    """A message of another library as one line of a page."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")[:200]
