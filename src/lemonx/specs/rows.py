"""What a row of a spec is: a module on disk, the axes of its tensors, and how these expand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from lemonx.algebra.dense import Woven
from lemonx.algebra.expansions import Expansion, product
from lemonx.algebra.recipes import CANCEL, HALF, KEEP, MUTED, SILENT, Matrix, TensorRecipe
from lemonx.errors import Refused
from lemonx.specs.signature import Side

# What becomes of a norm inside an added Post-LN block: its affine part is the identity; and of a factor of its stream.
IDENTITY = "identity"

# A module that is given zeros and must write zeros: its weights are kept, its biases are zero.
UNBIASED = "unbiased"


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor on disk and its role: `w` written, `r` read, `.` neither."""

    side: Side
    role: str


@dataclass(frozen=True)
class Typed:
    """The expansions of what a row reads and writes, and of each axis of the tensor at hand.

    `exact`: they were checked; if not, a norm's parameters are copied as they are.
    """

    reads: Expansion
    writes: Expansion
    axes: tuple[Expansion, ...]
    exact: bool = True


def matrix(axes: tuple[Axis, ...], expansions: tuple[Expansion, ...], mode: str) -> Matrix:
    """A tensor as a matrix: the first axis that is written gives the rows, the axes that are read give the columns.

    Axes in front of the last one of a table (tokens, positions), or in front of a matrix (experts), are rows too; axes
    behind (kernels) are columns.
    """
    roles = [axis.role for axis in axes]
    transposed = "w" in roles and "r" in roles[: roles.index("w")]
    if transposed:
        first = roles.index("r")
        roles[first : first + 2] = "w", "r"
        expansions = (*expansions[:first], expansions[first + 1], expansions[first], *expansions[first + 2 :])
    cut = roles.index("w") + 1 if "r" in roles or roles[0] == "w" else len(roles) - 1
    if mode in (CANCEL, UNBIASED, HALF):
        mode = SILENT if "r" not in roles else KEEP if mode == UNBIASED else mode
    mode = KEEP if mode == MUTED else mode  # which rows are zero, the whole block decides
    rows, columns = product(*expansions[:cut]), product(*expansions[cut:])
    if rows.has_partial_means or ("r" not in roles and columns.has_partial_means):
        raise Refused(
            "a weight of several joined axes cannot hold the mean of new entries", "choose a multiple of the width"
        )
    if rows.frame and isinstance(rows.frame.forth, Woven):
        raise Refused(
            "a weight of several joined axes cannot write a change of basis", "choose a multiple of the width"
        )
    return Matrix(rows, columns, consumes="r" in roles, mode=mode, transposed=transposed)


@dataclass(frozen=True)
class Row(ABC):
    """A module on disk. `optional`: present in some classes only (heads, poolers)."""

    reads: Side
    writes: Side
    optional: bool = False

    @abstractmethod
    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        """Suffix -> axes on disk. The first tensor is required, the others may be absent."""

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        """How the tensor `suffix` expands; unless a kind says otherwise, as a matrix."""
        return matrix(self.tensors()[suffix], typed.axes, mode)

    def require(self, reads: Expansion, writes: Expansion) -> None:  # noqa: B027
        """Raise Refused unless this kind of module maps `reads` to `writes`; a linear map always can."""

    @property
    def touches(self) -> frozenset[str]:
        """Every axis that it reads or writes."""
        return frozenset({*self.reads.axes, *self.writes.axes})

    flops_per_weight = 0
    is_norm = False
    # It is a number that the stream of its block is multiplied by.
    is_factor = False
    # It keeps units in place: what it reads and what it writes are the same units.
    in_place = False
    # Its `require` says all about what it touches, which is then not taken to be under a nonlinearity.
    is_strict = False
