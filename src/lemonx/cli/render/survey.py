"""The survey of all model types as tables of 80 columns, and for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, styled, table
from lemonx.diagnostics.survey.counting import Count, best, by_task, count, plain, reasons
from lemonx.diagnostics.survey.rows import COLUMNS, ENOUGH, EXACT, NONE, SMALL_GAINS, TOWERS, UP_TO_EPS, Cell, Row

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_STYLES = {EXACT: "green", UP_TO_EPS: "green", NONE: "dim", "wrong": "bold red", "failed": "red", "refused": "yellow"}
# Headings that fit beside a name of 27 letters on 80 columns.
_SHORT = {"width x2": "x2", "width x1.5": "x1.5"}
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
    if any(_towers(row) for row in rows):
        out.line(styled("bold", "towers one at a time"), ", width x2")
        out.table(_tower_table([row for row in rows if _towers(row)]))
    for line in count_lines(rows):
        out.line(line)
    out.line(NOTE)


NOTE = (
    "x2, x1.5: the width, with heads and inner sizes; exact: outputs are equal to 1e-10 in float64 on inputs that the "
    "growth did not see, in depth perhaps with --small-gains; to eps: up to what the eps of norms in added Post-LN "
    "blocks changes; -: no such size; read: the share of all parameters that these outputs depend on. "
    f"Counts leave out what is read to less than {ENOUGH:.0%}."
)


def task_name(task: str) -> str:
    return task.replace("_", " ").lower()


def _table(rows: Sequence[Row]) -> Table:
    found = table("model_type", *(_SHORT.get(column, column) for column in COLUMNS), "read")
    for row in rows:
        cells = best(row)
        shown = (_cell(cells[column]) for column in COLUMNS if column in cells)
        found.add_row(_cut(row.model_type), *shown, _share(row))
    return found


def _tower_table(rows: Sequence[Row]) -> Table:
    found = table("model_type", *TOWERS, "read")
    for row in rows:
        found.add_row(_cut(row.model_type), *(_cell(cell) for cell in _towers(row).values()), _share(row))
    return found


def _towers(row: Row) -> Mapping[str, Cell]:
    return {column: cell for column, cell in best(row).items() if column in TOWERS}


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
        f"exact at width x2 and in depth: {found.both} types, {found.with_gains} of them with small gains "
        f"({found.announced} with depth up to the eps of norms)",
        f"exact at an indivisible width (x1.5): {found.indivisible} types",
        *(_task_line(task_name(task), count(of)) for task, of in by_task(rows).items()),
    ]


def _task_line(name: str, found: Count) -> str:
    ran = f"{found.both} of {found.surveyed} exact at width x2 and in depth"
    ran += f", {found.with_gains} with small gains" if found.with_gains else ""
    close = f"{found.announced} up to eps" if found.announced > found.both else "none more up to eps"
    return f"{name}: {ran} ({close}; {found.indivisible} at x1.5; {found.ran} run, {found.read} read to {ENOUGH:.0%})"


def survey_markdown(rows: Sequence[Row], transformers: str, jobs: int) -> str:
    """The same for a page: counts, the reasons by how many types they stop, and a folded table for every task.

    `jobs`: how many rows a whole survey has.
    """
    numbers = {why: number for number, (why, _) in enumerate(reasons(rows, COLUMNS).most_common(_MOST_REASONS), 1)}
    share = "" if len(rows) == jobs else f" So far {len(rows)} of {jobs} pairs of a model type and a task are measured."
    lines = [
        f"Measured with transformers {transformers}.{share}",
        "",
        *_count_table(rows),
        "",
        *_reason_table(rows),
        "",
    ]
    if with_towers := [row for row in rows if row.ran and _towers(row)]:
        lines += [*_folded("Towers one at a time, width x2", with_towers, list(TOWERS), numbers), ""]
    for task, of_task in by_task(sorted(rows, key=lambda row: (row.task, row.model_type))).items():
        ran = [row for row in of_task if row.ran]
        lines += [*_folded(f"{task_name(task)}: {len(ran)} of {len(of_task)} run", ran, list(COLUMNS), numbers), ""]
    if silent := sorted((row for row in rows if not row.ran), key=lambda row: row.model_type):
        lines += ["<details><summary>Not run, and why</summary>", ""]
        lines += [f"- `{row.model_type}` ({task_name(row.task)}): {_line(row.why)}" for row in silent]
        lines += ["", "</details>"]
    return "\n".join(lines).rstrip()


def _count_table(rows: Sequence[Row]) -> list[str]:
    head = [
        "task",
        "types",
        "run",
        "read",
        "x2 and depth",
        "with small gains",
        "or to eps",
        *(_SHORT.get(column, column) for column in COLUMNS),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, of in {"all types, each once": rows, **by_task(rows)}.items():
        found = count(of)
        exact = (found.exact[column] for column in COLUMNS)
        numbers = (found.surveyed, found.ran, found.read, found.both, found.with_gains, found.announced, *exact)
        lines.append(f"| {task_name(name)} | {' | '.join(map(str, numbers))} |")
    return lines


def _reason_table(rows: Sequence[Row]) -> list[str]:
    found = reasons(rows, COLUMNS).most_common(_MOST_REASONS)
    lines = ["Why types are refused in some column, by how many:", "", "| | types | reason |", "|---|---|---|"]
    return lines + [f"| {number} | {many} | {_line(why)} |" for number, (why, many) in enumerate(found, 1)]


def _folded(title: str, rows: Sequence[Row], columns: list[str], numbers: Mapping[str, int]) -> list[str]:
    head = f"| model type | {' | '.join(_SHORT.get(column, column) for column in columns)} | read |"
    lines = [f"<details><summary>{title}</summary>", "", head, "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        cells = [_noted(cell, numbers) for column, cell in best(row).items() if column in columns]
        lines.append(f"| `{row.model_type}` | {' | '.join(cells)} | {_share(row)} |")
    return [*lines, "", "</details>"]


def _noted(cell: Cell, numbers: Mapping[str, int]) -> str:
    if cell.why == SMALL_GAINS:
        return f"{cell.kind}, {cell.why}"
    number = numbers.get(plain(cell.why))
    return f"{cell.kind} ({number})" if cell.why and number is not None else cell.kind


def _line(text: str) -> str:
    """A message of another library as one line of a page."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")[:200]
