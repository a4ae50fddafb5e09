"""What must hold between a tensor of the target and the tensor it was made from, entry by entry: T E_in = E_out W.

The expansion chooses one of many solutions of that equation, with noise; a check needs only the equation itself. So
nothing here draws a number or splits a weight: the columns of a unit's copies are added up and compared with the unit's
column, what must be zero is compared with zero, and what nothing reads, or what reads zeros, is free.

Tolerances follow from the arithmetic of the dtype that T is stored in, with u its unit of rounding and k copies:

    a copy is stored rounded where it is scaled                u |T|, and half the spacing of subnormal numbers
    float32, float64: k - 1 subtractions make the first copy   (k - 1) u (sum of |T| over the copies)
    bf16, fp16: the split is exact (execution/exact_split.py)                  0
    the sums of this check, which are made in float64          k 2^-53 (sum of |T| over the copies)
    a mean or a frame made on another machine, whose sums      one rounding more, and what float64 sums of so many
    may have been added in another order                       numbers, or the solver of frames, leave open

Every comparison is written so that NaN fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lemonx.algebra.expansions import AVG, DENSE, RAND, SPARE, WEIGHED, ZERO, Expansion, Run
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT, Matrix
from lemonx.execution.noise import HALF, Scratch

if TYPE_CHECKING:
    from lemonx.algebra.recipes import Spare, Vector
    from lemonx.execution.matrix import Reader

# What the solver of frames leaves open: it stops at 1e-12 (frames.SOLVED), and processors differ by as much again.
FRAME = 1e-9
# Nothing that is free is drawn near this. More, and a product in half precision overflows: 0 times Inf is NaN.
FREE = 1024.0
# Elements that are added up at a time: more leaves the caches.
CHUNK = 1 << 17

_scratch = Scratch()


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


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """The largest error of one rounding to a dtype near 0, where numbers are evenly spaced."""
    return torch.finfo(dtype).smallest_normal * unit(dtype)


def is_free(run: Run, how: Matrix, appended: bool) -> bool:
    """Whether the rows of a run may hold anything: fresh units, and further units of a block that is silent."""
    if how.mode == SILENT:
        return False
    if run.holds(RAND) or (how.copied and how.copied.at(run, how.rows.target_size)[2]):
        return True
    return run.copy > 0 and (appended or 0 < how.jitter <= run.copy)


def wild_fault(found: torch.Tensor, how: Matrix, free: bool, most: float) -> Fault | None:
    """The first free entry of a block that is so large that it may overflow; `most`: the largest of the source's."""
    columns = np.full(how.columns.target_size, free) | how.columns.holds(ZERO)
    far = (found.abs() > max(FREE, most)) & torch.from_numpy(columns)
    return _first_fault(far, found, torch.zeros_like(found), 0, "free, but so large that it may overflow")


def wanted_rows(run: Run, how: Matrix, read: Reader) -> Wanted:
    """E_out W for the rows of a run."""
    if run.is_copy:
        rows = read.rows(run.source, run.source + run.length)
    elif run.holds(AVG, WEIGHED):
        rows = read.mean().expand(run.length, -1)
    elif run.holds(DENSE):
        assert how.rows.frame is not None
        made = how.rows.frame.forth.along_rows(read.rows, read.mean, run.target, run.target + run.length)
        rows = made.to(read.rows(0, 0).dtype)
    else:
        rows = read.rows(0, 0).new_zeros(1, 1).expand(run.length, how.columns.size)
    amp = None
    if not how.rows.is_plain:
        amp = torch.from_numpy(how.rows.amp[run.target : run.target + run.length] * how.rows.gain)[:, None]
        rows = (rows.double() * amp).to(rows.dtype)
    if not run.holds(AVG, WEIGHED, DENSE):
        return Wanted(rows)
    return Wanted(rows, lambda: _slack(rows, amp, run, how, read))


def _slack(rows: torch.Tensor, amp: torch.Tensor | None, run: Run, how: Matrix, read: Reader) -> torch.Tensor:
    """Neighbouring numbers for each rounding, and what the sums themselves leave open."""
    roundings = 1 if amp is None else 2
    found = rows.double().abs() * (2 * unit(rows.dtype) * roundings) + 2 * least(rows.dtype) * roundings
    if run.holds(DENSE):
        return found + FRAME * rows.double().abs().amax(1, keepdim=True)
    sums = read.mean_size() * (how.rows.size * unit(torch.float64))
    return found + (sums if amp is None else sums * amp.abs())


def matrix_fault(found: torch.Tensor, run: Run, how: Matrix, read: Reader) -> Fault | None:
    """The first entry of the target's rows `run` that breaks the identity of its recipe; None if all hold."""
    if run.holds(SPARE) and how.spare is not None and how.mode != SILENT:
        return _spare_rows_fault(found, run, how.spare, how.rows.target_size)
    if how.mode == SILENT:
        return _zero_fault(found, _not_spare(how), "must be 0: the block is silent") or _spare_fault(found, run, how)
    wanted = wanted_rows(run, how, read)
    if how.mode == CANCEL:
        wanted = Wanted(wanted.rows.new_zeros(1, 1).expand(wanted.rows.shape))
    if not how.consumes:
        return _produced_fault(found, wanted, how.columns)
    if how.columns.frame is not None:
        return _framed_fault(found, wanted, how.columns)
    return _consumed_fault(found, wanted, how) or unread_fault(found, how.columns) or _spare_fault(found, run, how)


def _consumed_fault(found: torch.Tensor, wanted: Wanted, how: Matrix) -> Fault | None:
    columns = how.columns
    if columns.is_identity and how.mode == KEEP:
        return _near_fault(found, wanted.rows, 0, "must be the source's", slack=wanted.slack)
    if columns.is_plain and _adds_up(found, wanted.rows, columns):
        return None
    return sums_fault(sums(found, columns), wanted, columns, found.dtype)


def _adds_up(found: torch.Tensor, base: torch.Tensor, columns: Expansion) -> bool:
    """Whether all copies add up to the last bit: a faster look than `sums`, which knows about rounding.

    In float32 and float64 the first copy is what subtraction leaves of the weight, rounded once for every other copy.
    Those of bf16 and fp16 are subtracted in float32, which misses nothing that is 2^-24 of the weight or more.
    """
    if columns.copies.min() == 0:
        return False
    first, further = _first_copies(found, columns), _further(columns)
    if not further:
        return _same_bits(first, base)
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
        if not _same_bits(rest, one):
            return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal to the last bit; integers compare faster than floats."""
    a, b = _as_integers(one), _as_integers(other)
    return bool((a == b).all())


def _as_integers(tensor: torch.Tensor) -> np.ndarray:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(kind).numpy()


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
    first, *copies = (int(i) for i in np.flatnonzero(columns.source == unit_))
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


def unread_fault(found: torch.Tensor, columns: Expansion) -> Fault | None:
    """Columns that read a mean, or what nothing wrote yet, are zero; those that read zeros are free."""
    for run in columns.runs:
        if not run.is_copy and not run.holds(ZERO, SPARE):
            here = slice(run.target, run.target + run.length)
            if fault := _zero_fault(found, here, "must be 0: it reads what is not the source's"):
                return fault
    return None


def _produced_fault(found: torch.Tensor, wanted: Wanted, columns: Expansion) -> Fault | None:
    """A table: both axes are produced, so every entry has one value."""
    base = wanted.rows
    if columns.is_identity:
        return _near_fault(found, base, 0, "must be the source's", slack=wanted.slack)
    if columns.frame is not None:
        made = columns.frame.forth.along_columns(base)
        return _near_fault(found, made, 0, "must be in the frame", roundings=1, slack=_of_frame(made, base))
    for run in columns.runs:
        here = found[:, run.target : run.target + run.length]
        if run.holds(RAND):
            continue
        if fault := _produced_run_fault(here, base, columns, run):
            return fault
    return None


def _produced_run_fault(here: torch.Tensor, base: torch.Tensor, columns: Expansion, run: Run) -> Fault | None:
    scaled, mean = not columns.is_plain, run.holds(AVG)
    amp = torch.from_numpy(columns.amp[run.target : run.target + run.length] * columns.gain) if scaled else None
    if mean:
        exact = base.double()
        made = exact.mean(1, keepdim=True).expand(here.shape)
        size = exact.abs().mean(1, keepdim=True) * (2 * base.shape[1] * unit(torch.float64))
        slack, made = lambda: size, made if amp is None else made * amp
        return _near_fault(here, made, run.target, "must be the mean", roundings=1 + scaled, slack=slack)
    copied = run.is_copy
    made = base[:, run.units] if copied else base.new_zeros(1, 1).expand(here.shape)
    made = made if amp is None else (made.double() * amp).to(here.dtype)
    return _near_fault(here, made, run.target, "must be a copy" if copied else "must be 0")


def _framed_fault(found: torch.Tensor, wanted: Wanted, columns: Expansion) -> Fault | None:
    assert columns.frame is not None and columns.frame.back is not None
    made = columns.frame.back.along_columns(wanted.rows)
    return _near_fault(found, made, 0, "must read the frame", roundings=1, slack=_of_frame(made, wanted.rows))


def _of_frame(made: torch.Tensor, base: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What the solver of frames leaves open, by the largest number of every row."""
    return lambda: FRAME * torch.maximum(made.abs().amax(1, keepdim=True), base.double().abs().amax(1, keepdim=True))


def _near_fault(
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
    if not wanted.numel() or _same_bits(found, rounded) or bool((found == rounded).all()):
        return None
    exact = wanted.double()
    allowed = torch.zeros_like(exact)
    if roundings:
        allowed = (exact.abs() * (unit(found.dtype) * (1 + 2**-8)) + least(found.dtype)) * roundings
    if slack is not None:
        allowed = allowed + slack()
    return _first_fault(~((found.double() - exact).abs() <= allowed), found, exact, column, rule)


def _zero_fault(found: torch.Tensor, columns: slice, rule: str) -> Fault | None:
    here = found[:, columns]
    bits = _as_integers(here)
    if not bits.size or (bits.max() == 0 and bits.min() == 0):
        return None
    return _first_fault(~(here == 0), here, torch.zeros_like(here), columns.start or 0, rule)


def _first_fault(far: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor, column: int, rule: str) -> Fault | None:
    if not bool(far.any()):
        return None
    row, at = (int(i) for i in far.nonzero()[0])
    return Fault(row, at + column, float(found[row, at]), float(wanted[row, at]), rule)


# ----------------------------------------------------------------- spare units, which pass a stream through


def _not_spare(how: Matrix) -> slice:
    spare = 2 * how.spare.size if how.spare and how.columns.has(SPARE) else 0
    return slice(0, how.columns.target_size - spare)


def _spare_fault(found: torch.Tensor, run: Run, how: Matrix) -> Fault | None:
    """The last columns write what spare units pass on, once with each sign."""
    if not how.columns.has(SPARE):
        return None
    if how.spare is None:
        size = int(how.columns.holds(SPARE).sum())
        return _zero_fault(found, slice(how.columns.target_size - size, how.columns.target_size), "must be 0")
    size, wide = how.spare.size, how.columns.target_size
    values = torch.from_numpy(how.spare.values(run.target, run.target + run.length))
    for sign, start in ((1.0, wide - 2 * size), (-1.0, wide - size)):
        here = found[:, start : start + size]
        made = sign * values
        fault = _near_fault(here, made, start, "must pass the stream on", roundings=1, slack=_of_frame(made, made))
        if fault:
            return fault
    return None


def _spare_rows_fault(found: torch.Tensor, run: Run, spare: Spare, rows: int) -> Fault | None:
    """The last rows read the stream for spare units, once with each sign; their biases are 0, as those of no unit."""
    begin = run.target - (rows - 2 * spare.size)
    for sign, low in ((1.0, 0), (-1.0, spare.size)):
        start, stop = max(begin, low), min(begin + run.length, low + spare.size)
        if start < stop:
            made, rule = torch.from_numpy(sign * spare.values(start - low, stop - low)), "must read the stream as it is"
            here = found[start - begin : stop - begin]
            fault = _near_fault(here, made, 0, rule, roundings=1, slack=_of_frame(made, made))
            if fault:
                return fault._replace(row=fault.row + start - begin)
    return None


# ----------------------------------------------------------------- vectors


def vector_fault(found: torch.Tensor, source: torch.Tensor, how: Vector) -> Fault | None:
    """The first parameter of a norm, a scale or a statistic that is not what its recipe makes of the source's."""
    if not found.is_floating_point():
        return _near_fault(found.reshape(1, -1), source.reshape(1, -1), 0, "must be the source's")
    values = source.reshape(-1).double().numpy()
    if how.constant is not None:
        values = np.full_like(values, how.constant - how.offset)
    index, frame = how.expansion.source, how.expansion.frame
    gains = how.expansion.expand(values) if frame else values[np.maximum(index, 0)]
    if how.levelled:
        root = float(np.sqrt(np.mean(np.square(values)))) or 1.0
        gains = np.where(index < 0, root if how.constant is None else how.constant, gains)
    wanted = (gains + how.offset) * how.factor - how.offset + how.rest
    here = found.reshape(-1).double().numpy()
    # One rounding, and that of this sum, which its largest term decides.
    largest = np.abs(gains * how.factor) + abs(how.offset) * (1 + np.abs(how.factor)) + np.abs(how.rest)
    allowed = np.abs(wanted) * unit(found.dtype) * (1 + 2**-8) + least(found.dtype)
    allowed += largest * (8 * unit(torch.float64)) + (FRAME * largest.max(initial=0.0) if frame else 0.0)
    far = ~(np.abs(here - wanted) <= allowed)
    if how.fill and not frame:  # what is multiplied by them is zero
        far &= ~((index < 0) & (np.abs(here) <= FREE))
    if not far.any():
        return None
    at = int(far.argmax())
    return Fault(0, at, float(here[at]), float(wanted[at]), how.rule)
