"""Counts over a survey: how many types grow, and why the others do not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lemonx_lab.survey.rows import COLUMNS, EXACT, UP_TO_EPS, Row

# A module's name, a space's, a number: what differs between two models that are refused alike.
_NAMES = re.compile(r"\b\w*[a-z]\w*(?:\.[\w*]+)+|\b[a-z]\w*_\w*_\w+\b")
_NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Count:
    """How many model types were surveyed, built and run, how many are read enough, and how many grow in each column."""

    surveyed: int
    built: int
    ran: int
    read: int
    exact: dict[str, int]
    to_eps: dict[str, int]


def count(rows: Iterable[Row]) -> Count:
    """Count each model type once, in whichever of its rows did best."""
    rows = list(rows)

    def types(chosen: Iterable[Row]) -> int:
        return len({row.model_type for row in chosen})

    exact = {column: types(row for row in rows if column in row.grown(EXACT)) for column in COLUMNS}
    near = {column: types(row for row in rows if column in row.grown(EXACT, UP_TO_EPS)) for column in COLUMNS}
    return Count(
        surveyed=types(rows),
        built=types(row for row in rows if row.built),
        ran=types(row for row in rows if row.ran),
        read=types(row for row in rows if row.ran and row.is_read),
        exact=exact,
        to_eps={column: near[column] - exact[column] for column in COLUMNS},
    )


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their task, in the order in which tasks are first met."""
    return {task: [row for row in rows if row.task == task] for task in dict.fromkeys(row.task for row in rows)}


def reasons(rows: Iterable[Row]) -> Counter[str]:
    """Why types do not grow in some column, without names and numbers: reason -> how many types."""
    found = {
        (row.model_type, plain(cell.why))
        for row in rows
        for cell in row.cells.values()
        if cell.kind not in (EXACT, UP_TO_EPS)
    }
    return Counter(why for _, why in found)


def plain(why: str) -> str:
    """Return a reason without the names and numbers of one model, and without the advice.

    >>> plain("model_shared would change from 48 to 96, and model, masked_scatter: there is no rule: keep it at 48")
    'masked_scatter: there is no rule'
    """
    why = " ".join(why.split())
    why = re.sub(r"^\S+ would change from \d+ to \d+, and ", "", why)
    why = why.rsplit(": ", 1)[0] if why.count(": ") else why
    why = re.sub(r"^(?:the model|[\w.*]+), (?=\w+: )", "", why)
    why = _NUMBERS.sub("N", _NAMES.sub("...", why))
    return why if len(why) <= 160 else f"{why[:157]}..."
