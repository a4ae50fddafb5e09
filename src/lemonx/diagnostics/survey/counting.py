"""What a survey comes to: how many types grow exactly, and why the others do not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lemonx.diagnostics.survey.rows import (
    COLUMNS,
    ENOUGH,
    EXACT,
    FAILED,
    NONE,
    NOT_COMPARED,
    NOT_RUN,
    REFUSED,
    SMALL_GAINS,
    TOWERS,
    UP_TO_EPS,
    WRONG,
    Cell,
    Row,
)

# The better of two ways to grow: the first of these that either has. What is wrong is worth more notice than a refusal.
_BEST = (EXACT, WRONG, UP_TO_EPS, REFUSED, FAILED, NOT_COMPARED, NOT_RUN, NONE)
# A module's name, a space's, a number: what differs between two models that are refused alike.
_NAMES = re.compile(r"\b\w*[a-z]\w*(?:\.[\w*]+)+|\b[a-z]\w*_\w*_\w+\b")
_NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Count:
    """How many model types of a task were measured, run, and grow exactly; a type that is read too little is not."""

    surveyed: int
    built: int
    ran: int
    read: int
    exact: dict[str, int]
    # At width x2 and in depth; of these with small gains; the same where added blocks are as close as the eps of their
    # norms lets them be; and at width x1.5.
    both: int
    with_gains: int
    announced: int
    indivisible: int


def best(row: Row) -> dict[str, Cell]:
    """For every column the better of the ways in which it was grown."""
    ways = list(row.cells.values())
    columns = [column for column in (*COLUMNS, *TOWERS) if any(column in way for way in ways)]
    return {column: min((way[column] for way in ways if column in way), key=_rank) for column in columns}


def _rank(cell: Cell) -> int:
    return _BEST.index(cell.kind)


def count(rows: Iterable[Row]) -> Count:
    """What rows come to, each model type counted once, in whichever of its rows did best."""
    pairs = [(row, _grown(row, EXACT)) for row in rows]

    def types(*wanted: str) -> int:
        return len({row.model_type for row, found in pairs if found.issuperset(wanted)})

    def announced() -> set[str]:
        close = {row.model_type for row, found in pairs if "width x2" in found and "depth" in _grown(row, UP_TO_EPS)}
        return close | {row.model_type for row, found in pairs if found.issuperset(("width x2", "depth"))}

    def plainly() -> set[str]:
        both = [row for row, found in pairs if found.issuperset(("width x2", "depth"))]
        return {row.model_type for row in both if best(row)["depth"].why != SMALL_GAINS}

    return Count(
        surveyed=len({row.model_type for row, _ in pairs}),
        built=len({row.model_type for row, _ in pairs if row.built}),
        ran=len({row.model_type for row, _ in pairs if row.ran}),
        read=len({row.model_type for row, _ in pairs if row.ran and _is_read(row)}),
        exact={column: types(column) for column in (*COLUMNS, *TOWERS)},
        both=types("width x2", "depth"),
        with_gains=types("width x2", "depth") - len(plainly()),
        announced=len(announced()),
        indivisible=types("width x1.5"),
    )


def _is_read(row: Row) -> bool:
    return (row.share or 0.0) >= ENOUGH


def _grown(row: Row, kind: str) -> set[str]:
    """The columns of a row in which a growth came to this."""
    return {column for column, cell in best(row).items() if cell.kind == kind} if _is_read(row) else set()


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their task, in the order in which tasks are first met."""
    return {task: [row for row in rows if row.task == task] for task in dict.fromkeys(row.task for row in rows)}


def reasons(rows: Iterable[Row], columns: Iterable[str] = ("width x2", "depth")) -> Counter[str]:
    """Why types do not grow in these columns, without names and numbers: reason -> how many types."""
    found = {
        (row.model_type, plain(cell.why))
        for row in rows
        for column, cell in best(row).items()
        if column in set(columns) and cell.kind in (REFUSED, FAILED, WRONG)
    }
    return Counter(why for _, why in found)


def plain(why: str) -> str:
    """A reason without the names and numbers of one model, and without the advice.

    >>> plain("model_shared would change from 48 to 96, and model, masked_scatter: there is no rule: keep it at 48")
    'masked_scatter: there is no rule'
    """
    why = " ".join(why.split())
    why = re.sub(r"^\S+ would change from \d+ to \d+, and ", "", why)
    why = why.rsplit(": ", 1)[0] if why.count(": ") else why
    why = re.sub(r"^(?:the model|[\w.*]+), (?=\w+: )", "", why)
    why = _NUMBERS.sub("N", _NAMES.sub("...", why))
    return why if len(why) <= 160 else f"{why[:157]}..."
