"""Records of long runs: a line of JSON for every case, so that a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import shown


def code() -> str:
    """What tells one state of src/ from another."""
    files = sorted((shown.ROOT / "src").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def read(record: Path | None, again: Collection[str]) -> list[dict[str, Any]]:
    """The last row of every case in a record, but for the kinds that are to run again."""
    lines = record.read_text().splitlines() if record and record.exists() else []
    rows = {row["case"]: row for row in map(_row, lines) if row is not None}
    return [row for row in rows.values() if row["kind"] not in again]


def _row(line: str) -> dict[str, Any] | None:
    """A line of a record; None if the run was killed while it wrote the line."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def add(record: Path, row: dict[str, Any]) -> None:
    """Write a row down, on a line of its own also behind half a line."""
    with record.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")


def earlier(rows: list[dict[str, Any]]) -> list[str]:
    """A line that says how many rows are of code that is no longer that of the last, if any are."""
    last = rows[-1]["code"] if rows else ""
    count = sum(row["code"] != last for row in rows)
    return [f"{count} of all ran before the last change of src/"] if count else []
