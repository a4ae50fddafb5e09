"""How one tensor of the target is made from one of the source's: as a matrix, or as a vector of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lemonx.algebra.expansions import AVG, DENSE, RAND, WEIGHED, ZERO, Expansion, Run

if TYPE_CHECKING:
    pass


# What becomes of a weight that writes the stream: kept; zero (type 1); copies that cancel (type 2).
KEEP, SILENT, CANCEL = "keep", "silent", "cancel"


@dataclass(frozen=True)
class Copied:
    """Matrices that follow one another in a tensor, or are tensors of their own, as copies of others: experts.

    For each of them the number of this copy among those of its origin, how many these are, and whether nobody uses it
    yet. Copies in use are used together with equal weights, so noise that sums to zero over them keeps their sum.
    """

    number: tuple[int, ...]
    copies: tuple[int, ...]
    unused: tuple[bool, ...]

    def at(self, run: Run, rows: int) -> tuple[int, int, bool]:
        """Of the matrix in which these rows of a tensor with so many rows lie; a run is in matrices of one number."""
        which = run.target * len(self.number) // rows
        return self.number[which], self.copies[which], self.unused[which]


@dataclass(frozen=True)
class Spare:
    """Pairs of units that pass `size` numbers on: `values(start, stop)` are rows of the weight they read or write by.

    The first of a pair has these weights, the second the same with the other sign.
    """

    values: Callable[[int, int], np.ndarray]
    size: int


@dataclass(frozen=True)
class Matrix:
    """How a weight with two axes expands: rows are produced, columns are consumed, or else produced too.

    `transposed`: the file keeps it the other way round, as (columns, rows). `jitter`: copies of a unit
    from this number on (0: none) get noise on their fan-in, because their fan-out is silent and tells nothing apart.
    `copied`: it is a copy of another, or holds several, told apart by noise. `spare`: weights of its spare units.
    """

    rows: Expansion
    columns: Expansion
    consumes: bool
    mode: str = KEEP
    transposed: bool = False
    jitter: int = 0
    copied: Copied | None = None
    spare: Spare | None = None

    @property
    def rule(self) -> str:
        """The operators in the paper's words; an axis that stays is not named."""
        passing = " + pass-through" if self.spare else ""
        if self.mode != KEEP:
            return ("silent: zero" if self.mode == SILENT else "type 2: cancelling copies") + passing
        words = []
        if not self.columns.is_identity:
            words.append(column_rule(self.columns) if self.consumes else row_rule(self.columns))
        if not self.rows.is_identity:
            words.append(row_rule(self.rows))
        return (" ∘ ".join(words) or "copied") + passing


def row_rule(rows: Expansion) -> str:
    flags = (AVG, "row-avg"), (WEIGHED, "row-avg, scaled"), (ZERO, "row-zero"), (RAND, "row-rand"), (DENSE, "row-frame")
    for flag, name in flags:
        if rows.has(flag):
            return name
    return "row-circ"


def column_rule(columns: Expansion) -> str:
    return "col-frame" if columns.has(DENSE) else "col-rand" if columns.has(ZERO) else "col-circ"


@dataclass(frozen=True)
class Vector:
    """Norm parameters: v*[t] = factor[t] v[source[t]], elsewhere uniform in (-fill, fill).

    `constant` stands in for v where the parameters are replaced: 1 or 0. `offset`: the file keeps v - offset. `rest`
    is added to every entry: where the factor is 0, that is what it holds. `levelled`: elsewhere the root of the mean
    square of v instead, times factor[t].
    """

    expansion: Expansion
    factor: np.ndarray
    fill: float = 0.0
    constant: float | None = None
    rule: str = "copied"
    offset: float = 0.0
    rest: np.ndarray | float = 0.0
    levelled: bool = False


Recipe = Matrix | Vector
