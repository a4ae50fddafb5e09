"""Row kinds that keep units in place: norms, and scales for every channel.

What a norm reads decides a factor, which its gain takes. Paper: appendix C.1, D.1 to D.3.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from lemonx.algebra.expansions import Expansion, identity, multiples_near, product
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT, TensorRecipe, Vector
from lemonx.errors import Refused
from lemonx.specs.rows import IDENTITY, Axis, Row, Typed
from lemonx.specs.signature import Side, parse, side


class Fed(Refused):
    """A norm feeds a space that has to hold more than copies and zeros: a frame might carry it."""


@dataclass(frozen=True)
class Norm(Row):
    """A norm over the last axis with a gain and perhaps a bias. `eps`: config field, or its fixed value.

    `offset`: the file keeps the gain less this. `each`: a gain of its own for every unit of this axis. Without
    `affine` it has no parameters, so what it writes keeps the factor that the gain would have taken. `idle`: the file
    has it, but this class does not run it.
    """

    eps: str | float | None = None
    offset: float = 0.0
    each: Side | None = None
    affine: bool = True
    idle: bool = False
    is_norm = in_place = is_strict = True
    # It takes the mean away before it divides.
    centres = False

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
        if not writes.holds_as(reads.with_zeros()):
            raise Fed(
                f"{reads.target_size} is not a multiple of {reads.size}, which the size of {self.writes} must be, as "
                f"a {self.name} feeds it",
                f"try {multiples_near(reads.size, reads.target_size)}",
            )
        if not self.affine and not np.allclose(self._factor(reads, writes), writes.is_copy, rtol=1e-12, atol=0):
            raise Refused(
                f"a {self.name} without weights cannot absorb the rescaling from {reads.size} to {reads.target_size}",
                "untie the output head with --set tie_word_embeddings=false",
            )

    def _factor(self, reads: Expansion, writes: Expansion) -> np.ndarray:
        """What the gain is multiplied by."""
        return np.where(writes.is_copy, self.eta(reads) * writes.amp * writes.gain / reads.amp, 0.0)

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        reads, writes = typed.reads, typed.writes
        each = product(*typed.axes[:-1]) if self.each else identity(1)
        where = product(each, writes)
        times = partial(np.tile, reps=each.target_size)
        if suffix == "bias":
            factor = times(np.where(writes.is_copy, writes.amp * writes.gain, 0.0))
            return Vector(where, factor, constant=None if mode == KEEP else 0.0, rule=f"{self.name} bias")
        if mode in (SILENT, CANCEL):
            silent = np.zeros(where.target_size)
            return Vector(where, silent, constant=0.0, rule=f"{self.name} silenced", offset=self.offset)
        eta = self.eta(reads) if typed.exact else 1.0
        factor = self._factor(reads, writes) if typed.exact else np.where(writes.is_copy, writes.amp, 0.0)
        constant = 1.0 if mode == IDENTITY else None
        rule = self.name if eta == 1.0 else f"{self.name} η={eta:.4g}"
        return Vector(where, times(factor), fill=1.0, constant=constant, rule=rule, offset=self.offset)

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class LayerNorm(Norm):
    """(avg, zero): equal copies leave mean and variance, entries at the mean shrink the variance by eta^2."""

    centres = True

    def eta(self, reads: Expansion) -> float:
        k = int(reads.copies[0])
        legal = (reads.copies == k).all() and (reads.amp == 1.0).all() and (reads.is_copy | reads.is_mean).all()
        if not legal:
            raise _unfit(
                f"a LayerNorm reads {self.reads}, so new entries must be copies, all as often, or the mean", reads
            )
        return math.sqrt(k * reads.size / reads.target_size)


@dataclass(frozen=True)
class RMSNorm(Norm):
    """(zero, zero): copies of equal energy, and zeros, shrink the mean square by eta^2."""

    def eta(self, reads: Expansion) -> float:
        energy = float(reads.energy[0])
        if not np.allclose(reads.energy, energy, rtol=1e-12) or not (reads.is_copy | reads.is_zero).all():
            raise _unfit(f"an RMSNorm reads {self.reads}, so new entries must be copies, all as often, or zero", reads)
        return math.sqrt(energy * reads.size / reads.target_size)


@dataclass(frozen=True)
class BatchNorm(Row):
    """Statistics per channel: any copies, the same on both sides."""

    in_place = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        names = ("weight", "bias", "running_mean", "running_var")
        return {name: (Axis(self.writes, "w"),) for name in names} | {"num_batches_tracked": ()}

    def require(self, reads: Expansion, writes: Expansion) -> None:
        if not reads.holds_as(writes):
            sizes = " and ".join(f"{e.size} -> {e.target_size}" for e in (reads, writes))
            raise Refused(
                f"a BatchNorm reads and writes the same channels, but {self.reads} and {self.writes} would grow "
                f"differently ({sizes})",
                "give both the same size",
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        if suffix == "num_batches_tracked":
            return Vector(identity(1), np.ones(1), rule="copied")
        silenced = mode != KEEP and suffix in ("weight", "bias")
        factor = np.ones(typed.writes.target_size)
        return Vector(typed.writes, factor, constant=0.0 if silenced else None, rule="BatchNorm circ")


@dataclass(frozen=True)
class GroupNorm(Row):
    """Statistics per group of channels: in every group whole copies of its own channels, the same on both sides."""

    groups: int = 1
    in_place = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return dict.fromkeys(("weight", "bias"), (Axis(self.writes, "w"),))

    def require(self, reads: Expansion, writes: Expansion) -> None:
        inside = np.arange(reads.target_size) * self.groups // reads.target_size
        at_home = reads.is_copy.all() and np.array_equal(reads.unit * self.groups // reads.size, inside)
        whole = at_home and bool((reads.copies * reads.size == reads.target_size).all())
        if not (whole and reads.is_plain and writes.is_plain and reads.holds_as(writes)):
            raise Refused(
                f"a GroupNorm reads {self.reads}, so each of its {self.groups} groups must hold whole copies of its "
                "channels",
                f"try {multiples_near(reads.size, reads.target_size)}",
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        factor = np.ones(typed.writes.target_size)
        return Vector(typed.writes, factor, constant=None if mode == KEEP else 0.0, rule="GroupNorm circ")


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
        if not reads.after_scale().holds_as(writes):
            raise Refused(
                f"a scale per channel joins {self.reads} and {self.writes}, which would grow differently from "
                f"{reads.size} to {reads.target_size}",
                f"try {multiples_near(reads.size, reads.target_size)}",
            )

    def recipe(self, suffix: str, typed: Typed, mode: str) -> TensorRecipe:
        reads, writes = typed.reads, typed.writes
        factor = writes.amp * writes.gain / (reads.amp * reads.gain) if typed.exact else np.ones(writes.target_size)
        silenced = mode in (SILENT, CANCEL)
        return Vector(writes, factor, constant=0.0 if silenced else None, rule="scale", levelled=True)


@dataclass(frozen=True)
class UnitLength(Row):
    """Division by the length, without parameters: copies of equal energy, and zeros, keep every angle."""

    is_strict = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {}

    def require(self, reads: Expansion, writes: Expansion) -> None:
        if np.ptp(reads.energy) > 1e-12 * reads.energy[0] or not (reads.is_copy | reads.is_zero).all():
            must = "new entries must be copies, all as often, or zero"
            raise _unfit(f"{self.reads} is divided by its length, so {must}", reads)


@dataclass(frozen=True)
class Averaged(Row):
    """The mean of all entries, used as it is: copies, all as often, and the mean itself leave it.

    `squares`: a mean of squares, or a variance, which copies alone leave.
    """

    squares: bool = False
    is_strict = True

    def tensors(self) -> Mapping[str, tuple[Axis, ...]]:
        return {}

    def require(self, reads: Expansion, writes: Expansion) -> None:
        legal = reads.is_copy | (reads.is_mean & (not self.squares))
        if not (np.ptp(reads.copies) == 0 and legal.all() and reads.is_plain):
            what, rest = ("mean square", "") if self.squares else ("mean", ", or the mean")
            raise _unfit(
                f"the {what} of {self.reads} is used, so new entries must be copies, all as often{rest}", reads
            )


def _unfit(must: str, reads: Expansion) -> Refused:
    near = multiples_near(reads.size, reads.target_size)
    return Refused(f"{must}, which is not possible from {reads.size} to {reads.target_size}", f"try {near}")


def layer_norm(
    signature: str,
    *,
    eps: str | float | None = None,
    optional: bool = False,
    each: str | None = None,
    affine: bool = True,
    idle: bool = False,
) -> LayerNorm:
    """A LayerNorm; `each`: with a gain of its own for every head; not `affine`: without parameters; `idle`: not run."""
    axis = side(each) if each else None
    return LayerNorm(*parse(signature), optional=optional, eps=eps, each=axis, affine=affine, idle=idle)


def rms_norm(signature: str, *, eps: str | float | None = None, optional: bool = False, offset: float = 0.0) -> RMSNorm:
    """An RMSNorm; `offset`: its gain is the stored weight plus this."""
    return RMSNorm(*parse(signature), optional=optional, eps=eps, offset=offset)


def batch_norm(signature: str) -> BatchNorm:
    return BatchNorm(*parse(signature))


def group_norm(signature: str, groups: int) -> GroupNorm:
    return GroupNorm(*parse(signature), groups=groups)


def scale(signature: str, suffix: str = "", *, optional: bool = False) -> Scale:
    """A factor for every channel (LayerScale); `suffix`: what the tensor's name has behind the row's."""
    return Scale(*parse(signature), optional=optional, suffix=suffix)


def averaged(signature: str, *, squares: bool = False) -> Averaged:
    """The mean over an axis, or a mean of `squares`, where something other than a norm uses it."""
    return Averaged(*parse(signature), squares=squares)


def unit_length(signature: str) -> UnitLength:
    return UnitLength(*parse(signature))
