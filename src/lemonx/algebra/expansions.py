"""Lossless expansion in vector space: x* = E x, and back.

A vector expansion says, for every target index t, which source index is copied there, or how an index
without a source is filled. The paper's four share one pattern, whole copies of x and then a remainder:

    >>> expansion("avg", 2, 5).expand(np.array([1.0, 3.0]))
    array([1., 3., 1., 3., 2.])
    >>> expansion("zero", 2, 5).expand(np.array([1.0, 3.0]))
    array([1., 3., 1., 3., 0.])
    >>> expansion("circ", 2, 5).expand(np.array([1.0, 3.0]))
    array([1., 3., 1., 3., 1.])

Paper: appendix B.3, lossless expansion in vector space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lemonx.algebra.dense import Frame
from lemonx.algebra.runs import Fill, Run, Split, remainder
from lemonx.errors import Refused


@dataclass(frozen=True, eq=False)
class Expansion:
    """x*[t] = gain * amp[t] * x[source[t]], or what the Fill at source[t] says: 0, the mean of x, anything.

    Where all entries are dense, `frame` says how, once the gains that decide it are known.
    """

    size: int
    source: NDArray[np.int64]
    amp: NDArray[np.float64]
    gain: float = 1.0
    frame: Frame | None = None

    @property
    def target_size(self) -> int:
        return len(self.source)

    @cached_property
    def is_identity(self) -> bool:
        return self.target_size == self.size and self.is_plain and bool((self.source == np.arange(self.size)).all())

    def holds_as(self, other: Expansion) -> bool:
        """Whether every entry copies the same unit as the other's, or has the same fill, amplitudes and gains apart."""
        return np.array_equal(self.source, other.source)

    def copies_of(self, unit: int) -> list[int]:
        """Where the copies of a unit stand, in order."""
        return np.flatnonzero(self.source == unit).tolist()

    @cached_property
    def is_plain(self) -> bool:
        """Copies are exact copies: no amplitude, no gain."""
        return self.gain == 1.0 and bool((self.amp == 1.0).all())

    @cached_property
    def copies(self) -> NDArray[np.int64]:
        """How often each source unit stands in the target."""
        return np.bincount(self.source[self.source >= 0], minlength=self.size)

    @cached_property
    def copy_number(self) -> NDArray[np.int64]:
        """0 at the first copy of a unit, 1 at the second, ...; 0 at entries that are no copies."""
        number = np.zeros(self.target_size, np.int64)
        index = np.flatnonzero(self.source >= 0)
        order = index[np.argsort(self.source[index], kind="stable")]
        starts = np.concatenate([[0], np.cumsum(self.copies)[:-1]])
        number[order] = np.arange(len(order)) - np.repeat(starts, self.copies)
        return number

    @cached_property
    def energy(self) -> NDArray[np.float64]:
        """The sum of amp^2 over the copies of each unit: kappa in docs/errata.md."""
        index = self.source >= 0
        return np.bincount(self.source[index], weights=self.amp[index] ** 2, minlength=self.size).astype(np.float64)

    @cached_property
    def origin(self) -> NDArray[np.int64]:
        """The unit that each target unit is made from: its source, or for one without a source the next in turn."""
        return np.where(self.source >= 0, self.source, np.arange(self.target_size) % self.size)

    @cached_property
    def is_copy(self) -> NDArray[np.bool_]:
        """At each entry, whether it is a copy of a unit."""
        return self.source >= 0

    @cached_property
    def is_zero(self) -> NDArray[np.bool_]:
        """At each entry, whether it is 0."""
        return self.source == Fill.ZERO

    @cached_property
    def is_mean(self) -> NDArray[np.bool_]:
        """At each entry, whether it is the mean of all."""
        return self.source == Fill.AVG

    @cached_property
    def is_weighed_mean(self) -> NDArray[np.bool_]:
        """At each entry, whether a scale behind it turns it into the mean."""
        return self.source == Fill.WEIGHED

    @cached_property
    def is_free(self) -> NDArray[np.bool_]:
        """At each entry, whether it may be anything."""
        return self.source == Fill.RAND

    @cached_property
    def is_spare(self) -> NDArray[np.bool_]:
        """At each entry, whether it is a unit beside all copies, with weights from a rule of its own."""
        return self.source == Fill.SPARE

    @cached_property
    def is_dense(self) -> bool:
        """Whether a frame carries it."""
        return bool((self.source == Fill.DENSE).any())

    @cached_property
    def has_partial_means(self) -> bool:
        """Whether some entries hold the mean of one part of a fused axis."""
        return bool((self.source == Fill.PART).any())

    def passes_nonlinearity(self, *, calm: bool) -> bool:
        """Whether f(E x) = E f(x) for any function f of single entries; `calm`: if f(0) = 0.

        Copies stay copies; means, amplitudes and gains do not survive. Nobody reads a free entry.
        """
        stays = self.is_copy | self.is_free | self.is_spare | (calm & self.is_zero)
        return self.is_plain and bool(stays.all())

    @cached_property
    def unit(self) -> NDArray[np.int64]:
        """At each entry, the unit that it copies; 0 where it copies none."""
        return np.maximum(self.source, 0)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The map in as few consecutive blocks as possible; whole copies of a space are one block each."""
        step = np.where(self.source[1:] >= 0, np.diff(self.source) == 1, np.diff(self.source) == 0)
        step &= np.diff(self.copy_number) == 0
        starts = np.concatenate([[0], np.flatnonzero(~step) + 1])
        ends = np.concatenate([starts[1:], [self.target_size]])
        return tuple(
            Run(int(a), int(self.source[a]), int(b - a), int(self.copy_number[a]))
            for a, b in zip(starts, ends, strict=True)
        )

    def further_copies(self, base: int = 0) -> tuple[Split, ...]:
        """Every copy after the one numbered `base`, paired with that one, in blocks of equal copy count."""
        return self._paired(self.copy_number > base, self.copy_number == base)

    def numbered(self, number: int) -> tuple[tuple[int, slice], ...]:
        """Where the copies with this number, modulo how many their unit has, stand; and of which units they are."""
        index = np.flatnonzero(self._has_number(number))
        joined = (np.diff(index) == 1) & (np.diff(self.source[index]) == 1)
        return tuple(
            (int(block[0]), slice(int(self.source[block[0]]), int(self.source[block[-1]]) + 1))
            for block in np.split(index, np.flatnonzero(~joined) + 1)
            if len(block)
        )

    def other_copies(self, number: int) -> tuple[Split, ...]:
        """Every copy but those with this number, modulo how many their unit has, paired with them."""
        here = self._has_number(number)
        return self._paired(~here, here)

    def _has_number(self, number: int) -> NDArray[np.bool_]:
        return self.is_copy & (self.copy_number == number % np.maximum(self.copies[self.unit], 1))

    def _paired(self, others: NDArray[np.bool_], bases: NDArray[np.bool_]) -> tuple[Split, ...]:
        """The copies among `others`, in the order of their numbers, each with its unit's copy among `bases`."""
        index = np.flatnonzero(self.is_copy & others)
        index = index[np.argsort(self.copy_number[index], kind="stable")]
        if not len(index):
            return ()
        at_base, found = np.full(self.size, -1), np.flatnonzero(self.is_copy & bases)
        at_base[self.source[found]] = found
        based, count = at_base[self.source[index]], self.copies[self.source[index]]
        joined = (np.diff(index) == 1) & (np.diff(based) == 1) & (np.diff(count) == 0)
        # Copies of units that are no neighbours may stand side by side, in both places.
        joined &= np.diff(self.source[index]) == 1
        starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
        ends = np.concatenate([starts[1:], [len(index)]])
        return tuple(
            Split(int(index[a]), int(based[a]), int(b - a), int(count[a])) for a, b in zip(starts, ends, strict=True)
        )

    def expand(self, x: NDArray, fill: NDArray | None = None) -> NDArray:
        """E x along the last axis; `fill` gives the free entries, 0 without it."""
        if self.has_partial_means or self.is_weighed_mean.any():
            raise ValueError("an axis fused from means, or in front of a scale, is not an expansion of one vector")
        if self.frame is not None:
            return x @ self.frame.forth.columns(0, self.target_size).T
        y = x[..., self.unit] * self.amp
        y[..., self.is_zero] = 0
        y[..., self.is_mean] = x.mean(-1, keepdims=True)
        y *= self.gain
        y[..., self.is_free] = 0 if fill is None else fill
        return y

    def back(self, y: NDArray) -> NDArray:
        """The left inverse that reads the first copy of each unit: back(expand(x)) == x."""
        if self.frame is not None and self.frame.back is not None:
            return y @ self.frame.back.rows(0, self.size).T
        first = self.first_copies
        return y[..., first] / (self.amp[first] * self.gain)

    @property
    def first_copies(self) -> NDArray[np.int64]:
        """The target index of each unit's first copy."""
        index = np.flatnonzero((self.source >= 0) & (self.copy_number == 0))
        return index[np.argsort(self.source[index])]

    def with_gain(self, gain: float) -> Expansion:
        return replace(self, gain=gain)

    def with_zeros(self) -> Expansion:
        """The same copies, and zeros elsewhere: what a norm writes."""
        return replace(self, source=np.where(self.is_copy, self.source, Fill.ZERO))

    def with_free_zeros(self) -> Expansion:
        """The same, but zeros may be anything: what a weight may hold that multiplies zeros."""
        return replace(self, source=np.where(self.is_zero, Fill.RAND, self.source))

    def after_scale(self) -> Expansion:
        """What a scale for every channel makes of it: weighed means become means."""
        return replace(self, source=np.where(self.is_weighed_mean, Fill.AVG, self.source))

    def with_spare(self, count: int) -> Expansion:
        """The same with so many spare units behind."""
        source = np.append(self.source, np.full(count, Fill.SPARE))
        return replace(self, source=source, amp=np.append(self.amp, np.ones(count)))

    def dual(self) -> Expansion:
        """The expansion D with sum_t (E x)[t] (D y)[t] = x . y, evenly split: what a tied decoder reads."""
        amp = 1.0 / (self.copies[self.unit] * self.amp * self.gain)
        return Expansion(self.size, self.with_zeros().source, np.where(self.is_copy, amp, 1.0))


def multiples_near(size: int, target: int) -> str:
    """The sizes above the source's that are whole multiples of it, next to the one asked for: advice."""
    below = target // size * size
    return " or ".join(f"{n} (x{n // size})" for n in (below, below + size) if n > size)


def identity(size: int) -> Expansion:
    return Expansion(size, np.arange(size), np.ones(size))


def all_free(size: int, target: int) -> Expansion:
    """New entries only, which may hold anything."""
    return Expansion(size, np.full(target, Fill.RAND), np.ones(target))


def dense(size: int, target: int, frame: Frame | None = None) -> Expansion:
    """Entries in a frame; without one, before it is solved for."""
    return Expansion(size, np.full(target, Fill.DENSE), np.ones(target), frame=frame)


def expansion(kind: str, size: int, target: int) -> Expansion:
    """Whole copies of x and a remainder (avg, zero, circ, rand, iso, scaled), or one copy and new units (fresh, alibi).

    >>> expansion("fresh", 2, 4).is_free
    array([False, False,  True,  True])
    """
    copies, rest = divmod(target, size)
    if kind == "fresh":  # one copy of each unit, then new ones
        return Expansion(size, np.append(np.arange(size), np.full(target - size, Fill.RAND)), np.ones(target))
    if kind == "alibi":
        return alibi_expansion(size, target)
    fill = remainder(kind)
    behind = np.arange(rest) if fill is None else np.full(rest, fill)
    source = np.concatenate([np.tile(np.arange(size), copies), behind]).astype(np.int64)
    plain = Expansion(size, source, np.ones(target))
    if kind != "iso":
        return plain
    # Every unit gets the energy of `copies` plain copies, so equal copy counts stay plain copies.
    return replace(plain, amp=np.sqrt(copies / plain.copies[source]))


def alibi_slopes(heads: int) -> NDArray[np.float64]:
    """The slope of every head: powers of 2^(-8/n) for n a power of two; above it, odd powers for the next one."""
    whole = 1 << heads.bit_length() - 1
    slopes = 2.0 ** (-8 / whole * np.arange(1, whole + 1))
    between = 2.0 ** (-4 / whole * np.arange(1, 2 * (heads - whole), 2))
    return np.concatenate([slopes, between], dtype=np.float64)


def alibi_expansion(size: int, target: int) -> Expansion:
    """Every head goes to the first head of the same slope; the others are new."""
    old, new = alibi_slopes(size), alibi_slopes(target)
    equal = np.isclose(old[:, None], new[None, :], rtol=1e-9)
    if not equal.any(1).all():
        raise Refused(f"{target} heads have other ALiBi slopes than {size} heads", f"try {2 * size}")
    source = np.full(target, Fill.RAND)
    source[equal.argmax(1)] = np.arange(size)
    return Expansion(size, source, np.ones(target))


def concat(*parts: Expansion, by: Expansion | None = None) -> Expansion:
    """Axes one after the other. With `by` they alternate: for every unit of `by`, the slice of each part under it."""
    if len(parts) == 1:
        return parts[0]
    over, over_target = (by.size, by.target_size) if by else (1, 1)
    widths, starts = [p.size // over for p in parts], np.cumsum([0, *(p.size // over for p in parts)])
    source, amp = [], []
    for part, width, start in zip(parts, widths, starts[:-1], strict=True):
        # A mean over one part is not the mean over the whole axis.
        fills = np.where(part.is_mean | part.is_weighed_mean, Fill.PART, part.source)
        slice_, within = np.divmod(part.source, width)
        placed = np.where(part.is_copy, slice_ * starts[-1] + start + within, fills)
        source.append(placed.reshape(over_target, -1))
        amp.append((part.amp * part.gain).reshape(over_target, -1))
    return Expansion(
        sum(p.size for p in parts), np.concatenate(source, 1).reshape(-1), np.concatenate(amp, 1).reshape(-1)
    )


def product(*factors: Expansion) -> Expansion:
    """The expansion of fused axes (a b c), first axis outermost."""
    if len(factors) == 1:
        return factors[0]
    if (at := next((place for place, factor in enumerate(factors) if factor.frame), None)) is not None:
        return _woven(factors, at)
    result = identity(1)
    for factor in factors:
        # Of two fills the later one holds, and either of them over a copy: all are negative, in their order.
        fill = np.minimum(result.source[:, None], factor.source[None, :])
        index = result.source[:, None] * factor.size + factor.source[None, :]
        source = np.where(fill < 0, fill, index).reshape(-1)
        for mean in (Fill.AVG, Fill.WEIGHED):
            # A mean along one axis is not the mean over all of them.
            if (mean in factor.source and result.size > 1) or (mean in result.source and factor.size > 1):
                source[source == mean] = Fill.PART
        amp = (result.amp[:, None] * factor.amp[None, :]).reshape(-1)
        result = Expansion(result.size * factor.size, source, amp, result.gain * factor.gain)
    return result


def _woven(factors: Sequence[Expansion], at: int) -> Expansion:
    """A frame among axes that stay as they are."""
    framed, others = factors[at], [factor for place, factor in enumerate(factors) if place != at]
    if not all(factor.is_identity for factor in others):
        raise Refused(
            "an axis of several joined ones cannot follow a change of basis while another of them grows",
            f"try {multiples_near(framed.size, framed.target_size)}",
        )
    outer, inner = (math.prod(factor.size for factor in part) for part in (factors[:at], factors[at + 1 :]))
    assert framed.frame is not None
    if outer * inner == 1:
        return framed
    times = outer * inner
    return dense(framed.size * times, framed.target_size * times, framed.frame.woven(outer, inner))
