"""Prints the families as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lemonx import architectures
from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, styled, table
from lemonx.diagnostics import capabilities
from lemonx.diagnostics.capabilities import Cell, Verdict

if TYPE_CHECKING:
    from rich.text import Text

    from lemonx.diagnostics.why import Diagnosis

CapabilityTable = Mapping[str, Mapping[str, Cell]]
_STYLES = {Verdict.EXACT: "green", Verdict.REFUSED: "red", Verdict.NONE: "dim"}
# Words and headings with which the matrix fits a terminal of 80 columns.
_WORDS = {Verdict.EXACT: "ok", Verdict.REFUSED: "no", Verdict.NONE: "-"}
_SHORT = {"width x2": "x2", "width x1.5": "x1.5", "kv_heads": "kv", "head_dim": "dim", "experts": "exp."}


def architectures_json(cells: CapabilityTable) -> list[dict[str, JsonValue]]:
    """Every family: its title, the config fields behind each option, and what can grow."""
    known = architectures.families()
    return [
        {
            "model_type": name,
            "title": known[name].title,
            "sizes": {option: list(fields) for option, fields in known[name].sizes.items()},
            "kind": known[name].kind,
            "grows": {column: cell.as_dict() for column, cell in row.items()},
        }
        for name, row in cells.items()
    ]


def print_architectures(cells: CapabilityTable) -> None:
    """The matrix, with what needs more words as numbered notes below it."""
    out, notes = Out(), list[str]()
    found = table("model_type", *(_SHORT.get(column, column) for column in capabilities.COLUMNS))
    found.padding = (0, 1, 0, 0)  # whole on a terminal of 80 columns
    for name, row in cells.items():
        found.add_row(name, *(_styled(cell, notes) for cell in row.values()))
    out.table(found)
    for number, note in enumerate(notes, start=1):
        out.line(f"[{number}] {note}")
    out.line("x2, x1.5: the width; kv: kv_heads; dim: head_dim; exp.: experts")
    out.line("ok: the same function in exact arithmetic, for every input; -: the family has no such size")
    known = architectures.families()
    for name in cells:
        sizes = ", ".join(field for fields in known[name].sizes.values() for field in fields)
        out.line(styled("bold", name), f": {known[name].title}. Sizes for --set: {sizes}")


def print_why(found: Diagnosis) -> None:
    """The family, what has no row, what has no tensor, and what to do."""
    out = Out()
    if found.reason is None:
        out.line(f"{found.model_type}: nothing is missing; all {found.tensors} tensors have a row")
        return
    out.line(f"{found.model_type}: {found.reason}")
    word = "its own" if found.known else "the nearest"
    out.line(f"{word} family is {found.family}: {found.covered} of {found.tensors} tensors have a row there")
    for name in found.without_row:
        out.line(f"  no row for {name}")
    for name in found.without_tensor:
        out.line(f"  no tensor for {name}")
    if not found.known:
        out.line("docs/add-an-architecture.md shows how to write a spec: one file, one row per module")


def architectures_markdown(cells: CapabilityTable) -> str:
    """The matrix for a page, with its notes below."""
    known, notes = architectures.families(), list[str]()
    lines = [f"| family | {' | '.join(capabilities.COLUMNS)} |", "|---" * (len(capabilities.COLUMNS) + 1) + "|"]
    for name, row in cells.items():
        marked = [
            f"{cell.verdict.value} ({number})" if (number := _number(cell, notes)) else cell.verdict.value
            for cell in row.values()
        ]
        lines.append(f"| {known[name].title.partition(':')[0]} (`{name}`) | {' | '.join(marked)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))])


def _number(cell: Cell, notes: list[str]) -> int:
    """The number of a cell's note among all notes (0: it has none)."""
    if cell.note and cell.note not in notes:
        notes.append(cell.note)
    return notes.index(cell.note) + 1 if cell.note else 0


def _styled(cell: Cell, notes: list[str]) -> Text:
    number = _number(cell, notes)
    return styled(_STYLES[cell.verdict], _WORDS[cell.verdict]) + (f" {number}" if number else "")
