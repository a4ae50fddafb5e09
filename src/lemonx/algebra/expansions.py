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

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lemonx.algebra.dense import Frame
from lemonx.errors import Refused

# Flags stand where a target index has no source index: it holds zero, the mean, anything; or, in a fused axis, the
# mean of a part of it, which nothing can produce or norm, but a linear map may ignore. WEIGHED, in front of a scale for
# every channel, is what that scale turns into the mean.
ZERO, AVG, RAND, PART, WEIGHED = -1, -2, -3, -4, -5

# Dense: every entry is a sum of several (algebra/dense.py). Spare: units beside all copies that another rule fills.
DENSE, SPARE = -6, -7

# What the entries behind whole copies hold, by the kind of a space; other kinds copy on.
_FLAGS = {"avg": AVG, "zero": ZERO, "rand": RAND, "scaled": WEIGHED}


class Run(NamedTuple):
    """Consecutive target indices `target..target+length` that copy consecutive source indices.

    `source` is the first source index, or a flag; `copy` is 0 where these are the first copies of their
    units, 1 for the second copies, and so on.
    """

    target: int
    source: int
    length: int
    copy: int

    @property
    def is_copy(self) -> bool:
        """Whether these entries are copies of units, and not what a flag says."""
        return self.source >= 0

    def holds(self, *flags: int) -> bool:
        """Whether these entries are what one of the flags says."""
        return self.source in flags

    @property
    def units(self) -> slice:
        """The units that they copy."""
        return slice(self.source, self.source + self.length)


class Split(NamedTuple):
    """Copies at `target..target+length` of units whose base copies stand at `base..`, with `copies` in all."""

    target: int
    base: int
    length: int
    copies: int


@dataclass(frozen=True, eq=False)
class Expansion:
    """x*[t] = gain * amp[t] * x[source[t]], or as the flag at source[t] says: 0, the mean of x, anything.

    Where all are dense, `frame` says how, once the gains that decide it are known.
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
        """0 at the first copy of a unit, 1 at the second, ...; 0 at flags."""
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
        """At each entry, whether it is a copy of a unit, and not what a flag says."""
        return self.source >= 0

    @cached_property
    def unit(self) -> NDArray[np.int64]:
        """At each entry, the unit that it copies; 0 where it copies none."""
        return np.maximum(self.source, 0)

    def holds(self, *flags: int) -> NDArray[np.bool_]:
        """At each entry, whether it is what one of the flags says."""
        return np.isin(self.source, flags)

    def has(self, flag: int) -> bool:
        return bool(self.holds(flag).any())

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The map as few consecutive blocks: the copies of a circular expansion are block copies."""
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
        index = np.flatnonzero((self.source >= 0) & (self.copy_number > base))
        index = index[np.argsort(self.copy_number[index], kind="stable")]
        if not len(index):
            return ()
        at_base = np.full(self.size, -1)
        bases = np.flatnonzero((self.source >= 0) & (self.copy_number == base))
        at_base[self.source[bases]] = bases
        based, count = at_base[self.source[index]], self.copies[self.source[index]]
        joined = (np.diff(index) == 1) & (np.diff(based) == 1) & (np.diff(count) == 0)
        starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
        ends = np.concatenate([starts[1:], [len(index)]])
        return tuple(
            Split(int(index[a]), int(based[a]), int(b - a), int(count[a])) for a, b in zip(starts, ends, strict=True)
        )

    def expand(self, x: NDArray, fill: NDArray | None = None) -> NDArray:
        """E x along the last axis; `fill` gives the arbitrary entries (flag RAND), 0 without it."""
        if self.has(PART) or self.has(WEIGHED):
            raise ValueError("an axis fused from means, or in front of a scale, is not an expansion of one vector")
        if self.frame is not None:
            return x @ self.frame.forth.columns(0, self.target_size).T
        y = x[..., np.maximum(self.source, 0)] * self.amp
        y[..., self.source == ZERO] = 0
        y[..., self.source == AVG] = x.mean(-1, keepdims=True)
        y *= self.gain
        y[..., self.source == RAND] = 0 if fill is None else fill
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

    def dual(self) -> Expansion:
        """The expansion D with sum_t (E x)[t] (D y)[t] = x . y, evenly split: what a tied decoder reads."""
        index = np.maximum(self.source, 0)
        amp = 1.0 / (self.copies[index] * self.amp * self.gain)
        source = np.where(self.source >= 0, self.source, ZERO)
        return Expansion(self.size, source, np.where(source >= 0, amp, 1.0))


def multiples_near(size: int, target: int) -> str:
    """The sizes above the source's that are whole multiples of it, next to the one asked for: advice."""
    below = target // size * size
    return " or ".join(f"{n} (x{n // size})" for n in (below, below + size) if n > size)


def identity(size: int) -> Expansion:
    return Expansion(size, np.arange(size), np.ones(size))


def expansion(kind: str, size: int, target: int) -> Expansion:
    """Whole copies of x, then a remainder: avg, zero, circ, rand or iso; or one copy, and new ones: fresh, alibi."""
    copies, rest = divmod(target, size)
    if kind == "fresh":  # one copy: what is new is new
        return Expansion(size, np.append(np.arange(size), np.full(target - size, RAND)), np.ones(target))
    if kind == "alibi":
        return alibi_expansion(size, target)
    flag = _FLAGS.get(kind)
    remainder = np.arange(rest) if flag is None else np.full(rest, flag)
    source = np.concatenate([np.tile(np.arange(size), copies), remainder]).astype(np.int64)
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
        raise Refused(f"{target} heads have other ALiBi slopes than {size} heads: try {2 * size}")
    source = np.full(target, RAND)
    source[equal.argmax(1)] = np.arange(size)
    return Expansion(size, source, np.ones(target))


def concat(*parts: Expansion, by: Expansion | None = None) -> Expansion:
    """Axes one after the other; with `by`, in slices: for every unit of it the slice of each part that is under it."""
    if len(parts) == 1:
        return parts[0]
    over, over_target = (by.size, by.target_size) if by else (1, 1)
    widths, starts = [p.size // over for p in parts], np.cumsum([0, *(p.size // over for p in parts)])
    source, amp = [], []
    for part, width, start in zip(parts, widths, starts[:-1], strict=True):
        # A mean over one part is not the mean over the whole axis.
        flags = np.where(np.isin(part.source, (AVG, WEIGHED)), PART, part.source)
        slice_, within = np.divmod(part.source, width)
        placed = np.where(part.source < 0, flags, slice_ * starts[-1] + start + within)
        source.append(placed.reshape(over_target, -1))
        amp.append((part.amp * part.gain).reshape(over_target, -1))
    return Expansion(
        sum(p.size for p in parts), np.concatenate(source, 1).reshape(-1), np.concatenate(amp, 1).reshape(-1)
    )


def product(*factors: Expansion) -> Expansion:
    """The expansion of fused axes (a b c), first axis outermost."""
    if len(factors) == 1:
        return factors[0]
    result = identity(1)
    for factor in factors:
        flagged = np.minimum(result.source[:, None], factor.source[None, :])
        index = result.source[:, None] * factor.size + factor.source[None, :]
        source = np.where(flagged < 0, flagged, index).reshape(-1)
        for flag in (AVG, WEIGHED):
            if (factor.has(flag) and result.size > 1) or (result.has(flag) and factor.size > 1):
                source[source == flag] = PART
        amp = (result.amp[:, None] * factor.amp[None, :]).reshape(-1)
        result = Expansion(result.size * factor.size, source, amp, result.gain * factor.gain)
    return result
