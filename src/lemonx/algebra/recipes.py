"""How one tensor of the target is made from one of the source's: as a matrix, or as a vector of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.runs import Run

# What becomes of a weight that writes the stream: kept; zero (type 1); copies that cancel (type 2); half of its columns
# zero (type 3). And of a factor of what that weight reads: the rows of the other half are zero (type 3).
KEEP, SILENT, CANCEL, HALF, MUTED = "keep", "silent", "cancel", "half", "muted"
_SAID = {
    SILENT: "silent: zero",
    CANCEL: "type 2: cancelling copies",
    HALF: "type 3: half the columns zero",
    MUTED: "type 3: half the rows zero",
}


@dataclass(frozen=True)
class Copied:
    """Experts that are copies of others, as slices of one tensor or as tensors of their own.

    For each expert: its number among the copies of its origin, how many copies there are, and whether it is unused so
    far. Copies in use are used together with equal weights, so noise that sums to zero over them keeps their sum.
    """

    number: tuple[int, ...]
    copies: tuple[int, ...]
    unused: tuple[bool, ...]

    def at(self, run: Run, rows: int) -> tuple[int, int, bool]:
        """The three facts for the expert that these rows belong to, in a tensor with so many rows.

        A run never crosses experts that are copies of different numbers.
        """
        which = run.target * len(self.number) // rows
        return self.number[which], self.copies[which], self.unused[which]


@dataclass(frozen=True)
class Spare:
    """Pairs of units that pass `size` numbers through an activation: act(a) - act(-a) = a.

    `values(start, stop)` gives rows of the weight that they read or write by. The second unit of a pair has the same
    weights with the opposite sign.
    """

    values: Callable[[int, int], np.ndarray]
    size: int


@dataclass(frozen=True)
class Matrix:
    """How a weight with two axes expands: rows are produced; columns are consumed, or in tables produced too.

    `transposed`: the file stores it as (columns, rows). `jitter`: copies of a unit from this number on (0: none) get
    noise on their fan-in, because their fan-out is zero and cannot make them differ. `copied`: it is the weight of a
    copied expert, or holds several, which noise makes different. `spare`: the weights of its spare units. `own`: rows
    that are copy i of their unit leave the rest of what copies share on copy i of their input; otherwise all rows
    leave it on the first. `as_if`: what the columns would be if none of them were silenced, which decides what those
    that read zeros hold.
    """

    rows: Expansion
    columns: Expansion
    consumes: bool
    mode: str = KEEP
    transposed: bool = False
    jitter: int = 0
    copied: Copied | None = None
    spare: Spare | None = None
    own: bool = False
    as_if: Expansion | None = None

    def kept_copy(self, run: Run) -> int:
        """The number of the copy of each input that keeps the rest in these rows, modulo the number of its copies."""
        return run.copy if self.own and run.is_copy else 0

    @property
    def rule(self) -> str:
        """The operators in the paper's words; an axis that stays is not named."""
        passing = " + pass-through" if self.spare else ""
        if self.mode != KEEP:
            return _SAID[self.mode] + passing
        words = []
        if not self.columns.is_identity:
            words.append(column_rule(self.columns) if self.consumes else row_rule(self.columns))
            words[-1] += " (own copy)" if self.own else ""
        if not self.rows.is_identity:
            words.append(row_rule(self.rows))
        return (" ∘ ".join(words) or "copied") + passing


def row_rule(rows: Expansion) -> str:
    if rows.is_mean.any():
        return "row-avg"
    if rows.is_weighed_mean.any():
        return "row-avg, scaled"
    if rows.is_zero.any():
        return "row-zero"
    if rows.is_free.any():
        return "row-rand"
    return "row-frame" if rows.is_dense else "row-circ"


def column_rule(columns: Expansion) -> str:
    return "col-frame" if columns.is_dense else "col-rand" if columns.is_zero.any() else "col-circ"


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


TensorRecipe = Matrix | Vector
