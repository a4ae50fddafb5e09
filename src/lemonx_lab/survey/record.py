"""What a survey found, kept in a file so that the next one goes on from there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lemonx.checkpoints.creating import write_whole
from lemonx.checkpoints.opening import read_file
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.errors import BadData
from lemonx_lab.survey.rows import Cell, Row

_LARGEST = 2**26


@dataclass(frozen=True)
class Record:
    """Rows, and the version of transformers that they were measured with."""

    transformers: str
    rows: list[Row]

    @staticmethod
    def empty() -> Record:
        return Record(version("transformers"), [])


def read(path: Path) -> Record:
    """A record; an empty one if there is no file yet."""
    if not path.exists():
        return Record.empty()
    try:
        found = parse_json(read_file(path, _LARGEST))
        return Record(str(found["transformers"]), [_row(entry) for entry in found["rows"]])
    except (ValueError, TypeError, KeyError) as error:
        raise BadData(f"is not a record of a survey ({error})", "give another file", file=path) from None


def write(path: Path, transformers: str, rows: Sequence[Row]) -> None:
    """Replace the file as a whole; a row is a line, without what is as in every row."""
    lines = ",\n".join(json.dumps(_without_defaults(row)) for row in rows)
    write_whole(path, f'{{"transformers": {json.dumps(transformers)}, "rows": [\n{lines}\n]}}\n')


def _without_defaults(row: Row) -> dict[str, JsonValue]:
    plain = Row("", "")
    entry = {name: value for name, value in asdict(row).items() if value != getattr(plain, name)}
    entry["cells"] = {column: _cell(cell) for column, cell in row.cells.items()}
    return entry


def _cell(cell: Cell) -> dict[str, JsonValue]:
    entry: dict[str, JsonValue] = {"kind": cell.kind}
    if cell.difference is not None:
        entry["difference"] = float(f"{cell.difference:.1e}")
    return entry | ({"why": cell.why} if cell.why else {})


def _row(entry: Any) -> Row:
    """A row as it was written; TypeError if it has other fields."""
    lists = {name: tuple(entry[name]) for name in _LISTS & entry.keys()}
    cells = {column: Cell(**cell) for column, cell in entry["cells"].items()}
    return Row(**{**entry, **lists, "cells": cells})


_LISTS = {field.name for field in fields(Row) if str(field.type).startswith("tuple")}
