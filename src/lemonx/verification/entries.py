"""Entries that are compared with what they should be: to the last bit, to a number of roundings, or with zero.

The copies of a unit are compared by their sum. Every comparison is written so that NaN fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from lemonx.algebra.expansions import Expansion
from lemonx.execution.noise import HALF, Scratch


class Fault(NamedTuple):
    """The first entry of a block that breaks its identity: its place in the block, what is there, what should be.

    `copies`: the columns of its other copies, where it is their sum that is wrong.
    """

    row: int
    column: int
    found: float
    wanted: float
    rule: str
    copies: tuple[int, ...] = ()


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """The largest error of one rounding to a dtype near 0, where numbers are evenly spaced."""
    return torch.finfo(dtype).smallest_normal * unit(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two tensors of one dtype to the last bit, as integers, which compare faster than floats."""
    a, b = as_integers(one), as_integers(other)
    return bool((a == b).all())


def as_integers(tensor: torch.Tensor) -> np.ndarray:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(kind).numpy()


def near_fault(
    found: torch.Tensor,
    wanted: torch.Tensor,
    column: int,
    rule: str,
    *,
    roundings: int = 0,
    slack: Callable[[], torch.Tensor] | None = None,
) -> Fault | None:
    """The first entry that is not what is wanted, to so many roundings and to the slack; without either, not equal."""
    rounded = wanted.to(found.dtype)
    if not wanted.numel() or same_bits(found, rounded) or bool((found == rounded).all()):
        return None
    exact = wanted.double()
    allowed = torch.zeros_like(exact)
    if roundings:
        allowed = (exact.abs() * (unit(found.dtype) * (1 + 2**-8)) + least(found.dtype)) * roundings
    if slack is not None:
        allowed = allowed + slack()
    return first_fault(~((found.double() - exact).abs() <= allowed), found, exact, column, rule)


def zero_fault(found: torch.Tensor, columns: slice, rule: str) -> Fault | None:
    here = found[:, columns]
    bits = as_integers(here)
    if not bits.size or (bits.max() == 0 and bits.min() == 0):
        return None
    return first_fault(~(here == 0), here, torch.zeros_like(here), columns.start or 0, rule)


def first_fault(far: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor, column: int, rule: str) -> Fault | None:
    if not bool(far.any()):
        return None
    row, at = (int(i) for i in far.nonzero()[0])
    return Fault(row, at + column, float(found[row, at]), float(wanted[row, at]), rule)


# ----------------------------------------------------------------- the sums of copies

# Elements that are added up at a time: more leaves the caches.
CHUNK = 1 << 17

_scratch = Scratch()


@dataclass(frozen=True)
class Sums:
    """T E_in of a block of rows, and the same of absolute values, which rounding is measured by."""

    values: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def zero(cls, rows: int, columns: int) -> Sums:
        return cls(torch.zeros(rows, columns, dtype=torch.float64), torch.zeros(rows, columns, dtype=torch.float64))

    def plus(self, other: Sums) -> Sums:
        return Sums(self.values + other.values, self.sizes + other.sizes)


@dataclass(frozen=True)
class Wanted:
    """E_out W for some rows, rounded as they are stored.

    `slack`: by how much these may be off on another machine, where they are sums; asked for if they are not equal.
    """

    rows: torch.Tensor
    slack: Callable[[], torch.Tensor] | None = None


def adds_up(found: torch.Tensor, base: torch.Tensor, columns: Expansion, kept: int = 0) -> bool:
    """Check that all copies add up to the last bit: faster than `sums`, which allows for rounding.

    In float32 and float64 the copy numbered `kept` is what subtraction leaves of the weight, rounded once for every
    other copy. Those of bf16 and fp16 are subtracted in float32, which misses nothing that is 2^-24 of the weight or
    more.
    """
    if columns.copies.min() == 0:
        return False
    left, others = _copies(found, columns, kept), _others(columns, kept)
    if not others:
        return same_bits(left, base)
    work = torch.float32 if found.dtype in HALF else found.dtype
    rows = max(1, CHUNK // columns.size)
    for here, one, whole in zip(found.split(rows), left.split(rows), base.split(rows), strict=True):
        rest = _scratch.tensor("rest", work, *whole.shape).copy_(whole)
        for target, units in others:
            copies = here[:, target : target + units.stop - units.start]
            if found.dtype in HALF:
                copies = _scratch.tensor("copies", work, *copies.shape).copy_(copies)
            rest[:, units].sub_(copies)
        if found.dtype in HALF:
            one = _scratch.tensor("copies", work, *one.shape).copy_(one)
        if not same_bits(rest, one):
            return False
    return True


def sums(found: torch.Tensor, columns: Expansion) -> Sums:
    """Return the sum of the copies of every unit, in float64."""
    found = found.double()
    if not columns.is_plain:
        found = found * torch.from_numpy(columns.amp * columns.gain)
    total = _copies(found, columns, 0).clone()
    sizes = total.abs()
    for target, units in reversed(_others(columns, 0)):
        copies = found[:, target : target + units.stop - units.start]
        total[:, units] += copies
        sizes[:, units] += copies.abs()
    return Sums(total, sizes)


def sums_fault(of: Sums, wanted: Wanted, columns: Expansion, stored: torch.dtype, times: int = 1) -> Fault | None:
    """The first unit whose copies do not add up to the unit; `times`: over so many matrices that are used together."""
    most, scaled = int(columns.copies.max()), not columns.is_plain
    # Each of several matrices had its noise added, and the first of them all the others' taken away.
    steps = 0 if stored in HALF else most - 1 + (2 * times if times > 1 else 0)
    allowed = of.sizes * (unit(stored) * (steps + scaled) + unit(torch.float64) * (most + 1) * times)
    if scaled:
        allowed += least(stored) * most * times * float(np.abs(columns.amp * columns.gain).max())
    if wanted.slack is not None:
        allowed += wanted.slack() * times
    base = wanted.rows.double() * times
    far = ~((of.values - base).abs() <= allowed)
    if (known := _held(columns)) is not None:
        far &= known
    if not bool(far.any()):
        return None
    row, unit_ = (int(i) for i in far.nonzero()[0])
    first, *copies = columns.copies_of(unit_)
    rule = "must add up" if copies else "must be the source's"
    return Fault(row, first, float(of.values[row, unit_]), float(base[row, unit_]), rule, tuple(copies))


@lru_cache(maxsize=64)
def _held(columns: Expansion) -> torch.Tensor | None:
    """Mask of the units that have a copy; None if all have. An expert that is part of another has only some units."""
    return None if columns.copies.min() > 0 else torch.from_numpy(columns.copies > 0)


@lru_cache(maxsize=64)
def _others(columns: Expansion, kept: int) -> tuple[tuple[int, slice], ...]:
    """The copies with another number than `kept`, and their units, in the order in which they took their share."""
    pairs = columns.other_copies(kept)
    return tuple((p.target, slice(u := int(columns.source[p.target]), u + p.length)) for p in pairs)


@lru_cache(maxsize=64)
def _places(columns: Expansion, kept: int) -> tuple[tuple[int, slice], ...]:
    return columns.numbered(kept)


def _copies(found: torch.Tensor, columns: Expansion, number: int) -> torch.Tensor:
    """The copies of all units with this number."""
    places = _places(columns, number)
    if len(places) == 1 and places[0][1] == slice(0, columns.size):
        return found[:, places[0][0] : places[0][0] + columns.size]
    total = found.new_zeros(len(found), columns.size)
    for target, units in places:
        total[:, units] = found[:, target : target + units.stop - units.start]
    return total
