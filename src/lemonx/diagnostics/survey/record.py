"""What a survey found, kept in a file so that the next one goes on from there; and what it comes to, counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lemonx.checkpoints.creating import write_whole
from lemonx.checkpoints.opening import read_file
from lemonx.diagnostics.survey.measuring import COLUMNS, EXACT, NONE, NOT_RUN, Cell, Row
from lemonx.errors import BadData

_LARGEST = 2**26
# An exact growth counts if the inputs read at least this share of the parameters.
ENOUGH = 0.98
# The better of two ways to grow: the first of these that either has.
_BEST = (EXACT, "wrong", "refused", "failed", NOT_RUN, NONE)


def read(path: Path) -> list[Row]:
    """The rows of a record; none if there is no file yet."""
    if not path.exists():
        return []
    try:
        return [_row(entry) for entry in json.loads(read_file(path, _LARGEST))]
    except (ValueError, TypeError, KeyError) as error:
        raise BadData(f"is not a record of a survey ({error})", "give another --record", file=path) from None


def write(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file as a whole."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    write_whole(path, f"[\n{lines}\n]\n")


def _row(entry: dict[str, Any]) -> Row:
    cells = {way: {name: Cell(**cell) for name, cell in found.items()} for way, found in entry["cells"].items()}
    lists = {name: tuple(entry[name]) for name in ("unread", "inputs")}
    return Row(**{**entry, **lists, "cells": cells})


def best(row: Row) -> dict[str, Cell]:
    """For every column the better of the ways in which it was grown."""
    ways = list(row.cells.values())
    return {column: min((way[column] for way in ways), key=_rank) for column in COLUMNS} if ways else {}


def _rank(cell: Cell) -> int:
    return _BEST.index(cell.kind)


def counts(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Task -> what was counted in it; the last entry counts each model type once, in the best of its tasks.

    `exact` columns count every exact growth; `whole` those of rows whose inputs read enough of the parameters.
    """
    found: dict[str, Counter[str]] = {}
    once: dict[str, set[str]] = {}
    for row in rows:
        marks = _marks(row)
        found.setdefault(row.task, Counter()).update(marks)
        for mark in marks:
            once.setdefault(mark, set()).add(row.model_type)
    return {**{task: dict(count) for task, count in found.items()}, "all": {mark: len(of) for mark, of in once.items()}}


def _marks(row: Row) -> list[str]:
    marks = ["surveyed", *(["built"] if row.built else []), *(["ran"] if row.ran else [])]
    exact = [column for column, cell in best(row).items() if cell.kind == EXACT]
    whole = (row.share or 0) >= ENOUGH
    marks += ["read"] if row.ran and whole else []
    return marks + exact + [f"{column}, whole" for column in exact if whole]


def reasons(rows: Iterable[Row]) -> Counter[str]:
    """Why types were not built or run, by what another library says, without its numbers; the most frequent first."""
    return Counter(_plain(row.why) for row in rows if row.why)


def _plain(why: str) -> str:
    return "".join("#" if c.isdigit() else c for c in why)[:100]
