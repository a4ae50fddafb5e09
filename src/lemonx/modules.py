"""Row kinds: what each kind of module keeps on disk, and how its tensors expand.

A row states what it reads and what it writes; the expansions of those two spaces decide everything else.
Paper: appendix C (Pre-LN Transformers) and D (other architectures).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lemonx.errors import Refused
from lemonx.operators import CANCEL, KEEP, SILENT, Matrix
from lemonx.signature import Side, parse, side
from lemonx.vectors import AVG, PART, RAND, WEIGHED, ZERO, Expansion, identity, multiples_near, product

# What becomes of a norm inside an added Post-LN block: its affine part is the identity.
IDENTITY = "identity"
# A module that is given zeros and must write zeros: its weights are kept, its biases are zero.
UNBIASED = "unbiased"
# The bias of an expert that must not be picked: scores of one token differ by less, in any model that trains.
UNPICKED = -1e4


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
    """A tensor as a matrix: the first axis that is written makes the rows, whatever is read the columns.

    Axes before the last one of a table (tokens, positions), or before a matrix (experts), are rows too; those after
    (kernels) columns.
    """
    roles = [axis.role for axis in axes]
    transposed = "w" in roles and "r" in roles[: roles.index("w")]
    if transposed:
        first = roles.index("r")
        roles[first : first + 2] = "w", "r"
        expansions = (*expansions[:first], expansions[first + 1], expansions[first], *expansions[first + 2 :])
    cut = roles.index("w") + 1 if "r" in roles or roles[0] == "w" else len(roles) - 1
    if mode in (CANCEL, UNBIASED):
        mode = SILENT if "r" not in roles else KEEP if mode == UNBIASED else CANCEL
    rows, columns = product(*expansions[:cut]), product(*expansions[cut:])
    if rows.has(PART) or ("r" not in roles and columns.has(PART)):
        raise Refused(
            "several means would have to be written into one fused axis: only an axis of its own can hold a mean"
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

    def recipe(self, suffix: str, typed: Typed, mode: str) -> Recipe:
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
    # It keeps units in place: what it reads and what it writes are the same units.
    in_place = False
    # Its `require` says all about what it touches, which is then not taken to be under a nonlinearity.
    is_strict = False


@dataclass(frozen=True)
class Linear(Row):
    """A matrix and a bias. `tied` names the embedding row whose weight this is; then nothing is on disk.

    `own`: it is tied unless the file has a weight for it. `each`: a matrix for every unit of this axis, in one tensor
    that has the row's name itself. `joint`: the tensors are called `name_weight` and `name_bias`.
    """

    tied: str | None = None
    own: bool = False
    transposed: bool = False
    kernel: int = 0
    each: Side | None = None
    joint: bool = False
    flops_per_weight = 2

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        axes = (Axis(self.writes, "w"), Axis(self.reads, "r"))
        if self.transposed:
            axes = axes[::-1]
        if self.each:
            each = Axis(self.each, ".")
            return {"": (each, *axes), "_bias": (each, Axis(self.writes, "w"))}
        kernel = (Axis(side("_"), "."),) * self.kernel
        under = "_" if self.joint else ""
        return {f"{under}weight": axes + kernel, f"{under}bias": (Axis(self.writes, "w"),)}

    @property
    def touches(self) -> frozenset[str]:
        return super().touches | frozenset(self.each.axes if self.each else ())


@dataclass(frozen=True)
class Router(Linear):
    """A linear map to the scores of experts; those that are new and must not be picked get a bias far below."""

    def recipe(self, suffix: str, typed: Typed, mode: str) -> Recipe:
        experts = typed.writes
        if suffix == "bias" and experts.has(RAND):
            known = experts.source >= 0
            return Vector(experts, known.astype(float), rule="unpicked", rest=np.where(known, 0.0, UNPICKED))
        return super().recipe(suffix, typed, mode)


@dataclass(frozen=True)
class Embedding(Row):
    """A table of vectors: what it reads is an index, not an activation. `tied`: it repeats this other table."""

    tied: str | None = None

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {"weight": (Axis(self.reads, "."), Axis(self.writes, "w"))}


@dataclass(frozen=True)
class Parameter(Row):
    """A bare tensor, named in full by its row: tokens, position tables, one value per head, or for all."""

    axes: tuple[Side, ...] = ()

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {"": tuple(Axis(axis, "w" if axis == self.writes else ".") for axis in self.axes)}

    def recipe(self, suffix: str, typed: Typed, mode: str) -> Recipe:
        if self.writes not in self.axes:  # no axis grows
            size = math.prod(axis.size for axis in typed.axes)
            return Vector(identity(size), np.ones(size))
        return super().recipe(suffix, typed, mode)


@dataclass(frozen=True)
class Norm(Row):
    """A norm over the last axis with a gain and perhaps a bias. `eps`: config field, or its fixed value.

    `offset`: the file keeps the gain less this. `each`: a gain of its own for every unit of this axis. Without
    `affine` it has no parameters, so what it writes keeps the factor that the gain would have taken.
    """

    eps: str | float | None = None
    offset: float = 0.0
    each: Side | None = None
    affine: bool = True
    is_norm = in_place = is_strict = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        if not self.affine:
            return {}
        axes = (Axis(self.each, "."), Axis(self.writes, "w")) if self.each else (Axis(self.writes, "w"),)
        return dict.fromkeys(("weight", "bias"), axes)

    @property
    def touches(self) -> frozenset[str]:
        return super().touches | frozenset(self.each.axes if self.each else ())

    @abstractmethod
    def eta(self, reads: Expansion) -> float:
        """The factor by which the expanded input's scale shrinks; raises Refused if it varies by input."""

    def require(self, reads: Expansion, writes: Expansion) -> None:
        self.eta(reads)
        if not np.array_equal(writes.source, np.where(reads.source >= 0, reads.source, ZERO)):
            raise Refused(
                f"{reads.target_size} is not a multiple of {reads.size}, which a {self.name} that feeds "
                f"{self.writes} needs: try {multiples_near(reads.size, reads.target_size)}"
            )
        if not self.affine and not np.allclose(self._factor(reads, writes), writes.source >= 0, rtol=1e-12, atol=0):
            raise Refused(
                f"a {self.name} without parameters cannot take the scale that {self.writes} needs at "
                f"{reads.size} -> {reads.target_size}: give --set tie_word_embeddings=false"
            )

    def _factor(self, reads: Expansion, writes: Expansion) -> np.ndarray:
        """What the gain is multiplied by."""
        return np.where(writes.source >= 0, self.eta(reads) * writes.amp * writes.gain / reads.amp, 0.0)

    def recipe(self, suffix: str, typed: Typed, mode: str) -> Recipe:
        reads, writes = typed.reads, typed.writes
        each = product(*typed.axes[:-1]) if self.each else identity(1)
        where = product(each, writes)
        times = partial(np.tile, reps=each.target_size)
        if suffix == "bias":
            factor = times(np.where(writes.source >= 0, writes.amp * writes.gain, 0.0))
            return Vector(where, factor, constant=None if mode == KEEP else 0.0, rule=f"{self.name} bias")
        if mode in (SILENT, CANCEL):
            silent = np.zeros(where.target_size)
            return Vector(where, silent, constant=0.0, rule=f"{self.name} silenced", offset=self.offset)
        eta = self.eta(reads) if typed.exact else 1.0
        factor = self._factor(reads, writes) if typed.exact else np.where(writes.source >= 0, writes.amp, 0.0)
        constant = 1.0 if mode == IDENTITY else None
        rule = self.name if eta == 1.0 else f"{self.name} η={eta:.4g}"
        return Vector(where, times(factor), fill=1.0, constant=constant, rule=rule, offset=self.offset)

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class LayerNorm(Norm):
    """(avg, zero): equal copies leave mean and variance, entries at the mean shrink the variance by eta^2."""

    def eta(self, reads: Expansion) -> float:
        k = int(reads.copies[0])
        legal = (reads.copies == k).all() and (reads.amp == 1.0).all() and (reads.source[reads.source < 0] == AVG).all()
        if not legal:
            raise Refused(
                f"a LayerNorm reads {self.reads}, which must then be whole copies and entries at their mean, and at "
                f"{reads.size} -> {reads.target_size} it is not: try {multiples_near(reads.size, reads.target_size)}"
            )
        return math.sqrt(k * reads.size / reads.target_size)


@dataclass(frozen=True)
class RMSNorm(Norm):
    """(zero, zero): copies of equal energy, and zeros, shrink the mean square by eta^2."""

    def eta(self, reads: Expansion) -> float:
        energy = float(reads.energy[0])
        if not np.allclose(reads.energy, energy, rtol=1e-12) or (reads.source[reads.source < 0] != ZERO).any():
            raise Refused(
                f"an RMSNorm reads {self.reads}, which must then be copies of equal energy and zeros, and at "
                f"{reads.size} -> {reads.target_size} it is not: try {multiples_near(reads.size, reads.target_size)}"
            )
        return math.sqrt(energy * reads.size / reads.target_size)


@dataclass(frozen=True)
class BatchNorm(Row):
    """Statistics per channel: any copies, the same on both sides."""

    in_place = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        names = ("weight", "bias", "running_mean", "running_var")
        return {name: (Axis(self.writes, "w"),) for name in names} | {"num_batches_tracked": ()}

    def require(self, reads: Expansion, writes: Expansion) -> None:
        if not np.array_equal(reads.source, writes.source):
            sizes = " and ".join(f"{e.size} -> {e.target_size}" for e in (reads, writes))
            raise Refused(
                f"a BatchNorm keeps channels in place, but {self.reads} and {self.writes} expand differently "
                f"({sizes}): give both the same size"
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> Recipe:
        if suffix == "num_batches_tracked":
            return Vector(identity(1), np.ones(1), rule="copied")
        silenced = mode != KEEP and suffix in ("weight", "bias")
        factor = np.ones(typed.writes.target_size)
        return Vector(typed.writes, factor, constant=0.0 if silenced else None, rule="BatchNorm circ")


@dataclass(frozen=True)
class Scale(Row):
    """A factor for every channel of what a branch adds to the stream: (scaled, avg), (circ, circ).

    Where the stream holds the mean, so must the scaled branch: what writes the branch takes the mean of its rows
    weighted by the factors, over their root mean square, which the new factor is. `suffix` ends the tensor's name.
    """

    suffix: str = ""
    in_place = is_strict = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {self.suffix: (Axis(self.writes, "w"),)}

    def require(self, reads: Expansion, writes: Expansion) -> None:
        if not np.array_equal(np.where(reads.source == WEIGHED, AVG, reads.source), writes.source):
            raise Refused(
                f"a scale for every channel turns {self.reads} into {self.writes}, which expand differently at "
                f"{reads.size} -> {reads.target_size}: try {multiples_near(reads.size, reads.target_size)}"
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> Recipe:
        reads, writes = typed.reads, typed.writes
        factor = writes.amp * writes.gain / (reads.amp * reads.gain) if typed.exact else np.ones(writes.target_size)
        silenced = mode in (SILENT, CANCEL)
        return Vector(writes, factor, constant=0.0 if silenced else None, rule="scale", levelled=True)


@dataclass(frozen=True)
class Depthwise(Row):
    """A convolution of every channel with a kernel of its own: any copies, the same on both sides."""

    kernel: int = 1
    in_place = True
    flops_per_weight = 2

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        kernel = (Axis(side("_"), "."),) * self.kernel
        return {"weight": (Axis(self.writes, "w"), Axis(side("1"), "."), *kernel), "bias": (Axis(self.writes, "w"),)}

    def require(self, reads: Expansion, writes: Expansion) -> None:
        legal = (reads.source >= 0) | (reads.source == ZERO) | (reads.source == RAND)
        plain = reads.is_plain and writes.is_plain
        if not (legal.all() and plain and np.array_equal(reads.source, writes.source)):
            raise Refused(
                f"a depthwise convolution reads {self.reads}, so every new channel must be a copy, and at "
                f"{reads.size} -> {reads.target_size} some are not: try {multiples_near(reads.size, reads.target_size)}"
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> Recipe:
        channels, *kernel = typed.axes
        if suffix == "weight":  # what reads zeros is free
            channels = replace(channels, source=np.where(channels.source == ZERO, RAND, channels.source))
        return matrix(self.tensors()[suffix], (channels, *kernel), mode)


@dataclass(frozen=True)
class UnitLength(Row):
    """Division by the length, without parameters: copies of equal energy, and zeros, keep every angle."""

    is_strict = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {}

    def require(self, reads: Expansion, writes: Expansion) -> None:
        if np.ptp(reads.energy) > 1e-12 * reads.energy[0] or (reads.source[reads.source < 0] != ZERO).any():
            raise Refused(
                f"{self.reads} is divided by its length, so it must be copies of equal energy and zeros, and at "
                f"{reads.size} -> {reads.target_size} it is not: try {multiples_near(reads.size, reads.target_size)}"
            )


@dataclass(frozen=True)
class Dropped(Row):
    """A buffer that the model computes by itself: it is not written."""

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {"": ()}


def linear(
    signature: str,
    *,
    tied: str | None = None,
    optional: bool = False,
    transposed: bool = False,
    each: str | None = None,
    joint: bool = False,
    own: bool = False,
) -> Linear:
    """A fully connected layer; `transposed` where the file keeps it as (in, out); `each`: one for every expert.

    `joint`: the file has `name_weight` and `name_bias`.
    """
    optional = optional or tied is not None
    axis = side(each) if each else None
    return Linear(
        *parse(signature), optional=optional, tied=tied, own=own, transposed=transposed, each=axis, joint=joint
    )


def router(signature: str, *, optional: bool = False) -> Router:
    """The linear map that scores experts; `optional` where there is but one, and so nothing to choose."""
    return Router(*parse(signature), optional=optional)


def conv(signature: str, *, kernel: int = 2) -> Linear:
    """A convolution along `kernel` axes: a linear map at every offset of its kernel."""
    return Linear(*parse(signature), kernel=kernel)


def embedding(signature: str, *, optional: bool = False, tied: str | None = None) -> Embedding:
    """A table; `tied`: the row that it repeats, where a file has both."""
    return Embedding(*parse(signature), optional=optional or tied is not None, tied=tied)


def parameter(axes: str, *, optional: bool = False) -> Parameter:
    """A bare tensor with these axes: `parameter("1 _ residual")`; with no space among them it stays as it is."""
    sides = tuple(side(axis) for axis in axes.split())
    space = next((s for s in sides if not s.axes[0].isdigit() and s.axes[0] != "_"), None)
    return Parameter(side("_"), space or side("_"), optional=optional, axes=sides)


def layer_norm(
    signature: str,
    *,
    eps: str | float | None = None,
    optional: bool = False,
    each: str | None = None,
    affine: bool = True,
) -> LayerNorm:
    """A LayerNorm; `each`: with a gain of its own for every head; not `affine`: without parameters."""
    axis = side(each) if each else None
    return LayerNorm(*parse(signature), optional=optional, eps=eps, each=axis, affine=affine)


def rms_norm(signature: str, *, eps: str | float | None = None, optional: bool = False, offset: float = 0.0) -> RMSNorm:
    """An RMSNorm; `offset`: its gain is the stored weight plus this."""
    return RMSNorm(*parse(signature), optional=optional, eps=eps, offset=offset)


def batch_norm(signature: str) -> BatchNorm:
    return BatchNorm(*parse(signature))


def scale(signature: str, suffix: str = "", *, optional: bool = False) -> Scale:
    """A factor for every channel (LayerScale); `suffix`: what the tensor's name has behind the row's."""
    return Scale(*parse(signature), optional=optional, suffix=suffix)


def depthwise(signature: str, kernel: int) -> Depthwise:
    """A depthwise convolution over so many axes."""
    return Depthwise(*parse(signature), kernel=kernel)


def unit_length(signature: str) -> UnitLength:
    return UnitLength(*parse(signature))


def dropped() -> Dropped:
    return Dropped(side("_"), side("_"), optional=True)
