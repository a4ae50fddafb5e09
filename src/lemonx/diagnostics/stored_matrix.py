"""The matrix of what can grow, as it was when lemonx was built: asking the type check anew takes many seconds.

`make table` writes it, and a test compares it with what the type check says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lemonx import architectures
from lemonx.diagnostics.capabilities import Cell, row

FILE = Path(__file__).with_name("matrix.json")


def stored_matrix() -> dict[str, dict[str, Cell]]:
    """Model type -> column -> cell, as stored; a family that is not stored is asked now."""
    stored = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {
        name: {column: Cell.from_dict(cell) for column, cell in stored[name].items()} if name in stored else row(name)
        for name in sorted(architectures.families())
    }


def matrix_text(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """The content of the file: one line per family."""
    lines = [
        f"{json.dumps(name)}: {json.dumps({column: cell.as_dict() for column, cell in row.items()})}"
        for name, row in sorted(cells.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"
