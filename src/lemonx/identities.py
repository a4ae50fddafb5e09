"""What must hold between a tensor of the target and the tensor it was made from, entry by entry: T E_in = E_out W.

The expansion chooses one of many solutions of that equation, with noise; a check needs only the equation itself. So
nothing here draws a number or splits a weight: the columns of a unit's copies are added up and compared with the unit's
column, what must be zero is compared with zero, and what nothing reads, or what reads zeros, is free.

Tolerances follow from the arithmetic of the dtype that T is stored in, with u its unit of rounding and k copies:

    a copy is stored rounded where it is scaled                u |T|, and half the spacing of the least numbers
    float32, float64: k - 1 subtractions make the first copy   (k - 1) u (sum of |T| over the copies)
    bf16, fp16: the split is exact (split.py)                  0
    the sums of this check, at the precision v it works in     k v (sum of |T| over the copies)

Every comparison is written so that NaN fails it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lemonx.noise import HALF
from lemonx.operators import CANCEL, KEEP, SILENT, Matrix
from lemonx.vectors import AVG, DENSE, RAND, SPARE, WEIGHED, ZERO, Expansion, Run

if TYPE_CHECKING:
    from lemonx.operators import Reader
    from lemonx.rows import Vector


class Fault(NamedTuple):
    """The first entry of a block that breaks its identity: its place in the block, what is there, what should be."""

    row: int
    column: int
    found: float
    wanted: float
    rule: str


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


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def spacing(dtype: torch.dtype) -> float:
    """The largest error of one rounding where numbers are so small that it is no longer relative: fp16 below 6e-5."""
    return torch.finfo(dtype).smallest_normal * unit(dtype)


def is_free(run: Run, how: Matrix, appended: bool) -> bool:
    """Whether the rows of a run may hold anything: fresh units, and further units of a block that is silent."""
    if how.mode == SILENT:
        return False
    if run.source == RAND or (how.copied and how.copied.at(run, how.rows.target_size)[2]):
        return True
    return run.copy > 0 and (appended or 0 < how.jitter <= run.copy)


def wanted_rows(run: Run, how: Matrix, read: Reader) -> torch.Tensor:
    """E_out W for the rows of a run, rounded as they are stored."""
    nothing = read.rows(0, 0)
    if run.source >= 0:
        rows = read.rows(run.source, run.source + run.length)
    elif run.source in (AVG, WEIGHED):
        rows = read.mean().expand(run.length, -1)
    elif run.source == DENSE:
        assert how.rows.frame is not None
        made = how.rows.frame.forth.along_rows(read.rows, read.mean, run.target, run.target + run.length)
        rows = made.to(nothing.dtype)
    else:
        rows = nothing.new_zeros(1, 1).expand(run.length, how.columns.size)
    if how.rows.is_plain:
        return rows
    amp = torch.from_numpy(how.rows.amp[run.target : run.target + run.length] * how.rows.gain)
    return (rows.double() * amp[:, None]).to(rows.dtype)


def matrix_fault(found: torch.Tensor, run: Run, how: Matrix, read: Reader) -> Fault | None:
    """The first entry of the target's rows `run` that breaks the identity of its recipe; None if all hold."""
    if run.source == SPARE and how.mode != SILENT:
        return _spare_rows_fault(found, run, how)
    if how.mode == SILENT:
        return _zero_fault(found, _not_spare(how), "must be 0: the block is silent") or _spare_fault(found, run, how)
    base = wanted_rows(run, how, read)
    if not how.consumes:
        return _produced_fault(found, base, how.columns)
    if how.columns.frame is not None:
        return _framed_fault(found, base, how.columns)
    if how.mode == CANCEL:
        base = base.new_zeros(1, 1).expand(base.shape)
    return _consumed_fault(found, base, how) or _unread_fault(found, how.columns) or _spare_fault(found, run, how)


def _consumed_fault(found: torch.Tensor, base: torch.Tensor, how: Matrix) -> Fault | None:
    columns = how.columns
    if columns.is_identity and how.mode == KEEP:
        return _equal_fault(found, base, "must be the source's")
    if found.dtype in HALF and columns.is_plain and int(columns.copies.min()) > 0:
        # Exact, copy by copy, if they are added in the reverse of the order in which they were split.
        total = _first_copies(found, columns)
        for run in _further(columns):
            total[:, run.source : run.source + run.length] += found[:, run.target : run.target + run.length]
        if bool((total == base).all()):
            return None
    return sums_fault(sums(found, columns), base, columns, found.dtype)


def sums(found: torch.Tensor, columns: Expansion) -> Sums:
    """What the copies of every unit add up to; in float32 for halves, in float64 where copies have amplitudes."""
    work = torch.float32 if found.dtype in HALF else found.dtype
    if not columns.is_plain:
        work = torch.float64
        found = found.to(work) * torch.from_numpy(columns.amp * columns.gain)
    found = found.to(work)
    total = _first_copies(found, columns)
    sizes = total.abs()
    for run in _further(columns):
        copies = found[:, run.target : run.target + run.length]
        total[:, run.source : run.source + run.length] += copies
        sizes[:, run.source : run.source + run.length] += copies.abs()
    return Sums(total, sizes)


def sums_fault(of: Sums, base: torch.Tensor, columns: Expansion, stored: torch.dtype, times: int = 1) -> Fault | None:
    """The first unit whose copies do not add up to the unit; `times`: over so many matrices that are used together."""
    most = int(columns.copies.max())
    # Each of several matrices had its noise added, and the first of them all the others' taken away.
    steps = 0 if stored in HALF else most - 1 + (2 * times if times > 1 else 0)
    rounded = unit(stored) * (steps + (not columns.is_plain)) + unit(of.values.dtype) * (most + 1) * times
    wanted = base.to(of.values.dtype) * times
    allowed = of.sizes * rounded
    if not columns.is_plain:
        allowed += spacing(stored) * most * times * float(np.abs(columns.amp).max() * abs(columns.gain))
    far = (of.values - wanted).abs_() > allowed
    far |= ~torch.isfinite(of.values)
    if (known := _held(columns)) is not None:
        far &= known
    if not bool(far.any()):
        return None
    row, unit_ = (int(i) for i in far.nonzero()[0])
    at = np.flatnonzero(columns.source == unit_)
    rule = "must be the source's" if len(at) == 1 else f"with its copies in columns {at[1:].tolist()} must add up"
    return Fault(row, int(at[0]), float(of.values[row, unit_]), float(wanted[row, unit_]), rule)


@lru_cache(maxsize=64)
def _held(columns: Expansion) -> torch.Tensor | None:
    """Which units have a copy; None if all have: an expert that is a part of another has some only."""
    return None if columns.copies.min() > 0 else torch.from_numpy(columns.copies > 0)


@lru_cache(maxsize=64)
def _further(columns: Expansion) -> tuple[Run, ...]:
    """The runs of further copies, last copies first."""
    return tuple(sorted((r for r in columns.runs if r.source >= 0 and r.copy), key=lambda run: -run.copy))


def _first_copies(found: torch.Tensor, columns: Expansion) -> torch.Tensor:
    first = [run for run in columns.runs if run.source >= 0 and run.copy == 0]
    if len(first) == 1 and first[0].length == columns.size:
        return found[:, first[0].target : first[0].target + columns.size].clone()
    total = found.new_zeros(len(found), columns.size)
    for run in first:
        total[:, run.source : run.source + run.length] = found[:, run.target : run.target + run.length]
    return total


def _unread_fault(found: torch.Tensor, columns: Expansion) -> Fault | None:
    """Columns that read a mean, or what nothing wrote yet, are zero; those that read zeros are free."""
    for run in columns.runs:
        if run.source < 0 and run.source not in (ZERO, SPARE):
            here = slice(run.target, run.target + run.length)
            if fault := _zero_fault(found, here, "must be 0: it reads what is not the source's"):
                return fault
    return None


def _produced_fault(found: torch.Tensor, base: torch.Tensor, columns: Expansion) -> Fault | None:
    """A table: both axes are produced, so every entry has one value."""
    if columns.is_identity:
        return _equal_fault(found, base, "must be the source's")
    if columns.frame is not None:
        return _near_fault(found, columns.frame.forth.along_columns(base), 0, "must be in the frame")
    for run in columns.runs:
        here = found[:, run.target : run.target + run.length]
        if run.source >= 0:
            wanted = base[:, run.source : run.source + run.length]
        elif run.source == AVG:
            wanted = base.double().mean(1, keepdim=True).to(found.dtype).expand(here.shape)
        elif run.source == RAND:
            continue
        else:
            wanted = base.new_zeros(1, 1).expand(here.shape)
        if not columns.is_plain:
            amp = torch.from_numpy(columns.amp[run.target : run.target + run.length] * columns.gain)
            wanted = (wanted.double() * amp).to(found.dtype)
        mean = run.source == AVG  # two sums of many numbers may round to neighbours
        rule = "must be the mean" if mean else "must be a copy" if run.source >= 0 else "must be 0"
        fault = _near_fault(here, wanted.double(), run.target, rule) if mean else _equal_fault(here, wanted, rule)
        if fault:
            return fault if mean else fault._replace(column=fault.column + run.target)
    return None


def _framed_fault(found: torch.Tensor, base: torch.Tensor, columns: Expansion) -> Fault | None:
    assert columns.frame is not None and columns.frame.back is not None
    return _near_fault(found, columns.frame.back.along_columns(base), 0, "must read the frame")


def _near_fault(found: torch.Tensor, wanted: torch.Tensor, column: int, rule: str) -> Fault | None:
    """Equal to one rounding, and to the rounding of the sums that made it, which is measured by their row."""
    work = found.double()
    size = wanted.abs().amax(1, keepdim=True) if wanted.numel() else wanted
    allowed = wanted.abs() * unit(found.dtype) * (1 + 2**-8) + size * (wanted.shape[1] * unit(torch.float64) * 4)
    allowed += spacing(found.dtype) * (1 + 2**-8)
    return _first_fault(~((work - wanted).abs() <= allowed), work, wanted, column, rule)


def _equal_fault(found: torch.Tensor, wanted: torch.Tensor, rule: str) -> Fault | None:
    if found.dtype == wanted.dtype and bool((found == wanted).all()):
        return None
    return _first_fault(~(found == wanted), found, wanted, 0, rule)


def _zero_fault(found: torch.Tensor, columns: slice, rule: str) -> Fault | None:
    here = found[:, columns]
    if not bool(here.any()):  # NaN is true too
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
        size = int((how.columns.source == SPARE).sum())
        return _zero_fault(found, slice(how.columns.target_size - size, how.columns.target_size), "must be 0")
    size, wide = how.spare.size, how.columns.target_size
    values = torch.from_numpy(how.spare.values(run.target, run.target + run.length))
    for sign, start in ((1.0, wide - 2 * size), (-1.0, wide - size)):
        here = found[:, start : start + size]
        if fault := _near_fault(here, sign * values, start, "must pass the stream on"):
            return fault
    return None


def _spare_rows_fault(found: torch.Tensor, run: Run, how: Matrix) -> Fault | None:
    if how.spare is None:
        return None  # their fan-out is zero
    begin = run.target - (how.rows.target_size - 2 * how.spare.size)
    for sign, low in ((1.0, 0), (-1.0, how.spare.size)):
        start, stop = max(begin, low), min(begin + run.length, low + how.spare.size)
        if start < stop:
            values = torch.from_numpy(sign * how.spare.values(start - low, stop - low))
            fault = _near_fault(found[start - begin : stop - begin], values, 0, "must read the stream as it is")
            if fault:
                return fault._replace(row=fault.row + start - begin)
    return None


# ----------------------------------------------------------------- vectors


def vector_fault(found: torch.Tensor, source: torch.Tensor, how: Vector) -> Fault | None:
    """The first parameter of a norm, a scale or a statistic that is not what its recipe makes of the source's."""
    if not found.is_floating_point():
        return _equal_fault(found.reshape(1, -1), source.reshape(1, -1), "must be the source's")
    values = source.reshape(-1).double().numpy()
    if how.constant is not None:
        values = np.full_like(values, how.constant - how.offset)
    index = how.expansion.source
    gains = how.expansion.expand(values) if how.expansion.frame else values[np.maximum(index, 0)]
    if how.levelled:
        root = float(np.sqrt(np.mean(np.square(values)))) or 1.0
        gains = np.where(index < 0, root if how.constant is None else how.constant, gains)
    wanted = (gains + how.offset) * how.factor - how.offset + how.rest
    here = found.reshape(-1).double().numpy()
    # One rounding, and that of this sum, which its largest term decides.
    largest = np.abs(gains * how.factor) + abs(how.offset) * (1 + np.abs(how.factor)) + np.abs(how.rest)
    allowed = np.abs(wanted) * unit(found.dtype) * (1 + 2**-8) + largest * (8 * unit(torch.float64))
    allowed += spacing(found.dtype) * (1 + 2**-8)
    far = ~(np.abs(here - wanted) <= allowed)
    if how.fill and not how.expansion.frame:  # what is multiplied by them is zero
        far &= ~((index < 0) & np.isfinite(here))
    if not far.any():
        return None
    at = int(far.argmax())
    return Fault(0, at, float(here[at]), float(wanted[at]), how.rule)
