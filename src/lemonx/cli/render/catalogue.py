"""The families and the methods as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx import architectures, methods
from lemonx.cli.render.console import Out, styled, table
from lemonx.diagnostics import capabilities

if TYPE_CHECKING:
    from rich.text import Text


def methods_json(check: bool) -> list[dict[str, Any]]:
    """Every method: its title, paper, what it grows; with `check` what was measured."""
    from lemonx.experiments import method_table

    measured = method_table.overview() if check else {}
    return [
        {"method": name, "title": m.title, "paper": m.paper, "grows": list(m.grows), **measured.get(name, {})}
        for name, m in sorted(methods.methods().items())
    ]


def print_methods(content: list[dict[str, Any]]) -> None:
    out = Out()
    columns = [key for key in content[0] if key not in ("title", "paper", "grows")]
    if len(columns) > 1:
        found = table(*columns)
        for entry in content:
            found.add_row(*(str(entry[column]) for column in columns))
        out.table(found)
        out.line("lossless, or the largest difference of an output relative to the largest output; -: not defined")
    for entry in content:
        out.line(styled("bold", entry["method"]), f" ({' and '.join(entry['grows'])}): {entry['title']}.")
        out.line(f"  {entry['paper']}")


def architectures_json() -> list[dict[str, Any]]:
    """Every family: its title, the config fields behind each option, and what can grow."""
    known = architectures.families()
    return [
        {
            "model_type": name,
            "title": known[name].title,
            "sizes": {option: list(fields) for option, fields in known[name].sizes.items()},
            "kind": known[name].kind,
            "grows": cells,
        }
        for name, cells in capabilities.matrix().items()
    ]


def print_architectures(content: list[dict[str, Any]]) -> None:
    """The matrix, with what needs more words as numbered notes below it."""
    out, notes = Out(), list[str]()
    found = table("model_type", *capabilities.COLUMNS)
    for entry in content:
        found.add_row(entry["model_type"], *(_cell(cell, notes) for cell in entry["grows"].values()))
    out.table(found)
    for number, note in enumerate(notes, start=1):
        out.line(f"[{number}] {note}")
    out.line("exact: the same function in exact arithmetic, for every input; -: the family has no such size")
    for entry in content:
        sizes = ", ".join(field for fields in entry["sizes"].values() for field in fields)
        out.line(styled("bold", entry["model_type"]), f": {entry['title']}. Sizes for --set: {sizes}")


def why_json(folder: Path) -> dict[str, Any]:
    """What a checkpoint lacks."""
    from lemonx.checkpoints import Checkpoint
    from lemonx.diagnostics.why import diagnose

    with Checkpoint.open(folder) as checkpoint:
        return asdict(diagnose(checkpoint))


def print_why(found: dict[str, Any]) -> None:
    """The family, what has no row, what has no tensor, and what to do."""
    out = Out()
    if found["reason"] is None:
        out.line(f"{found['model_type']}: nothing; all {found['tensors']} tensors have a row")
        return
    out.line(f"{found['model_type']}: {found['reason']}")
    word = "its own" if found["known"] else "the nearest"
    out.line(f"{word} family is {found['family']}: {found['covered']} of {found['tensors']} tensors have a row there")
    for name in found["without_row"]:
        out.line(f"  no row for {name}")
    for name in found["without_tensor"]:
        out.line(f"  no tensor for {name}")
    if not found["known"]:
        out.line("docs/add-an-architecture.md shows how to write a spec: one file, one row a module")


def architectures_markdown(cells: Mapping[str, Mapping[str, str]]) -> str:
    """The matrix for a page, with its notes below."""
    known, notes = architectures.families(), list[str]()
    lines = [f"| family | {' | '.join(capabilities.COLUMNS)} |", "|---" * (len(capabilities.COLUMNS) + 1) + "|"]
    for name, row in cells.items():
        words = [_noted(cell, notes) for cell in row.values()]
        marked = [f"{word} ({number})" if number else word for word, number in words]
        lines.append(f"| {known[name].title.partition(':')[0]} (`{name}`) | {' | '.join(marked)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))])


def _noted(text: str, notes: list[str]) -> tuple[str, int]:
    """The first word of a cell, and the number of its note among all notes (0: none)."""
    word, _, note = text.partition(", " if text.startswith(capabilities.EXACT) else ": ")
    if note and note not in notes:
        notes.append(note)
    return word, notes.index(note) + 1 if note else 0


def _cell(text: str, notes: list[str]) -> Text:
    word, number = _noted(text, notes)
    style = "green" if word == capabilities.EXACT else "dim" if word == capabilities.NONE else "red"
    return styled(style, word) + (f" [{number}]" if number else "")
