"""What the copies of every unit add up to, and whether that is the unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from lemonx.algebra.expansions import Expansion, Run
from lemonx.execution.noise import HALF, Scratch
from lemonx.verification.entries import Fault, least, same_bits, unit

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


def adds_up(found: torch.Tensor, base: torch.Tensor, columns: Expansion) -> bool:
    """Whether all copies add up to the last bit: a faster look than `sums`, which knows about rounding.

    In float32 and float64 the first copy is what subtraction leaves of the weight, rounded once for every other copy.
    Those of bf16 and fp16 are subtracted in float32, which misses nothing that is 2^-24 of the weight or more.
    """
    if columns.copies.min() == 0:
        return False
    first, further = _first_copies(found, columns), _further(columns)
    if not further:
        return same_bits(first, base)
    work = torch.float32 if found.dtype in HALF else found.dtype
    rows = max(1, CHUNK // columns.size)
    for here, one, whole in zip(found.split(rows), first.split(rows), base.split(rows), strict=True):
        rest = _scratch.tensor("rest", work, *whole.shape).copy_(whole)
        for run in reversed(further):
            copies = here[:, run.target : run.target + run.length]
            if found.dtype in HALF:
                copies = _scratch.tensor("copies", work, *copies.shape).copy_(copies)
            rest[:, run.units].sub_(copies)
        if found.dtype in HALF:
            one = _scratch.tensor("copies", work, *one.shape).copy_(one)
        if not same_bits(rest, one):
            return False
    return True


def sums(found: torch.Tensor, columns: Expansion) -> Sums:
    """What the copies of every unit add up to, in float64."""
    found = found.double()
    if not columns.is_plain:
        found = found * torch.from_numpy(columns.amp * columns.gain)
    total = _first_copies(found, columns).clone()
    sizes = total.abs()
    for run in _further(columns):
        copies = found[:, run.target : run.target + run.length]
        total[:, run.units] += copies
        sizes[:, run.units] += copies.abs()
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
    """Which units have a copy; None if all have: an expert that is a part of another has some only."""
    return None if columns.copies.min() > 0 else torch.from_numpy(columns.copies > 0)


@lru_cache(maxsize=64)
def _further(columns: Expansion) -> tuple[Run, ...]:
    """The runs of further copies, last copies first."""
    return tuple(sorted((r for r in columns.runs if r.is_copy and r.copy), key=lambda run: -run.copy))


def _first_copies(found: torch.Tensor, columns: Expansion) -> torch.Tensor:
    first = [run for run in columns.runs if run.is_copy and run.copy == 0]
    if len(first) == 1 and first[0].length == columns.size:
        return found[:, first[0].target : first[0].target + columns.size]
    total = found.new_zeros(len(found), columns.size)
    for run in first:
        total[:, run.units] = found[:, run.target : run.target + run.length]
    return total
