"""Row kinds that hold weights: linear maps, convolutions, tables, bare parameters.

A row states what it reads and what it writes; the expansions of those two spaces decide everything else.
Paper: appendix C (Pre-LN Transformers) and D (other architectures).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lemonx.algebra.expansions import Expansion, identity, multiples_near, product
from lemonx.algebra.recipes import KEEP, TensorRecipe, Vector
from lemonx.errors import Refused
from lemonx.specs.rows import IDENTITY, Axis, Row, Typed, matrix
from lemonx.specs.signature import Side, parse, side

# The bias of an expert that must not be picked: scores of one token differ by less, in any model that trains.
UNPICKED = -1e4


@dataclass(frozen=True)
class Linear(Row):
    """A matrix and a bias. `tied` names the embedding row whose weight this is; then nothing is on disk.

    `own`: it is tied unless the file has a weight for it. `each`: a matrix for every unit of this axis, in one tensor
    that has the row's name itself. `joint`: the tensors are called `name_weight` and `name_bias`. `factor`: the number
    of that part of what it writes which only multiplies (the ungated half of a gated MLP): where that is zero, so is
    what the next row reads.
    """

    tied: str | None = None
    own: bool = False
    transposed: bool = False
    kernel: int = 0
    each: Side | None = None
    joint: bool = False
    factor: int | None = None
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

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        experts = typed.writes
        if suffix == "bias" and experts.is_free.any():
            known = experts.is_copy
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
    """A bare tensor, named in full by its row: tokens, position tables, one value per head, or for all.

    `is_factor`: one number that the stream of its block is multiplied by, and that is one in an added block.
    """

    axes: tuple[Side, ...] = ()
    is_factor: bool = False

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {"": tuple(Axis(axis, "w" if axis == self.writes else ".") for axis in self.axes)}

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        if self.writes not in self.axes:  # no axis grows
            size = math.prod(axis.size for axis in typed.axes)
            constant = 1.0 if mode == IDENTITY else None
            return Vector(identity(size), np.ones(size), constant=constant)
        return super().recipe(suffix, typed, mode)


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
        legal = reads.is_copy | reads.is_zero | reads.is_free
        plain = reads.is_plain and writes.is_plain
        if not (legal.all() and plain and reads.holds_as(writes)):
            raise Refused(
                f"a depthwise convolution reads {self.reads}, so every new channel must duplicate an old one, which "
                f"is not possible from {reads.size} to {reads.target_size}",
                f"try {multiples_near(reads.size, reads.target_size)}",
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        channels, *kernel = typed.axes
        if suffix == "weight":  # what reads zeros is free
            channels = channels.with_free_zeros()
        return matrix(self.tensors()[suffix], (channels, *kernel), mode)


@dataclass(frozen=True)
class WeightNormed(Row):
    """A map whose weight is kept as a length and a direction (weight norm): g v / |v|.

    `names`: what the two are called. `axes`: those of the direction, of which at most one is read and one written.
    `over`: the axes that its lengths are taken over. Whole copies make every length longer by one factor, which the
    stored lengths take.
    """

    axes: tuple[Side, ...] = ()
    names: tuple[str, str] = ("weight_g", "weight_v")
    over: tuple[int, ...] = ()

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        length, direction = self.names
        ones = (side("1") if place in self.over else axis for place, axis in enumerate(self.axes))
        return {
            length: tuple(Axis(axis, ".") for axis in ones),
            direction: tuple(Axis(axis, ".") for axis in self.axes),
        }

    def require(self, reads: Expansion, writes: Expansion) -> None:
        plain = reads.is_plain and writes.is_plain and reads.is_copy.all() and writes.is_copy.all()
        if not (plain and np.ptp(reads.copies) == 0 and np.ptp(writes.copies) == 0):
            sizes = " and ".join(f"{e.size} -> {e.target_size}" for e in (reads, writes))
            raise Refused(
                f"a weight norm divides by the length of a weight from {self.reads} to {self.writes}, so new entries "
                f"must be copies, all as often ({sizes})",
                "grow both by whole factors",
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        where = product(*typed.axes)
        if suffix != self.names[0]:
            return Vector(where, np.ones(where.target_size), rule="direction")
        inputs, outputs = int(typed.reads.copies[0]), int(typed.writes.copies[0])
        longer = math.prod(inputs if axis == self.reads else outputs if axis == self.writes else 1
                           for place, axis in enumerate(self.axes) if place in self.over)  # fmt: skip
        factor = math.sqrt(longer) / inputs if typed.exact else 1.0
        constant = None if mode == KEEP else 0.0
        return Vector(where, np.full(where.target_size, factor), constant=constant, rule="length")


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
    factor: int | None = None,
) -> Linear:
    """A fully connected layer; `transposed` where the file keeps it as (in, out); `each`: one for every expert.

    `joint`: the file has `name_weight` and `name_bias`. `factor`: which part of what it writes only multiplies.
    """
    optional = optional or tied is not None
    axis = side(each) if each else None
    return Linear(
        *parse(signature), optional=optional, tied=tied, own=own, transposed=transposed, each=axis, joint=joint,
        factor=factor,
    )  # fmt: skip


def router(signature: str, *, optional: bool = False) -> Router:
    """The linear map that scores experts; `optional` where there is but one, and so nothing to choose."""
    return Router(*parse(signature), optional=optional)


def conv(signature: str, *, kernel: int = 2, optional: bool = False) -> Linear:
    """A convolution along `kernel` axes: a linear map at every offset of its kernel."""
    return Linear(*parse(signature), kernel=kernel, optional=optional)


def embedding(signature: str, *, optional: bool = False, tied: str | None = None) -> Embedding:
    """A table; `tied`: the row that it repeats, where a file has both."""
    return Embedding(*parse(signature), optional=optional or tied is not None, tied=tied)


def parameter(axes: str, *, optional: bool = False) -> Parameter:
    """A bare tensor with these axes: `parameter("1 _ residual")`; with no space among them it stays as it is."""
    sides = tuple(side(axis) for axis in axes.split())
    space = next((s for s in sides if not s.axes[0].isdigit() and s.axes[0] != "_"), None)
    return Parameter(side("_"), space or side("_"), optional=optional, axes=sides)


def depthwise(signature: str, kernel: int) -> Depthwise:
    """A depthwise convolution over so many axes."""
    return Depthwise(*parse(signature), kernel=kernel)


def dropped() -> Dropped:
    return Dropped(side("_"), side("_"), optional=True)
