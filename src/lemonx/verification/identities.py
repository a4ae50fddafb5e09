"""The equation between a tensor of the target and its source tensor, checked entry by entry: T E_in = E_out W.

The expansion chooses one of many solutions of that equation, with noise; the check needs only the equation. So nothing
here draws a number or splits a weight. The columns of a unit's copies are added up and compared with the unit's column.
Entries that must be zero are compared with zero. Entries that nothing reads, or that read zeros, are free.

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
from typing import TYPE_CHECKING

import numpy as np
import torch

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.recipes import CANCEL, KEEP, MUTED, SILENT, Matrix
from lemonx.algebra.runs import Run
from lemonx.verification.entries import (
    Fault,
    Wanted,
    adds_up,
    first_fault,
    least,
    near_fault,
    sums,
    sums_fault,
    unit,
    zero_fault,
)

if TYPE_CHECKING:
    from lemonx.algebra.recipes import Spare, Vector
    from lemonx.execution.matrix import Reader

# What the solver of frames leaves open: it stops at 1e-12 (frames.SOLVED), and processors differ by as much again.
FRAME = 1e-9
# Free entries are drawn far below this. Above it a product in half precision could overflow, and 0 times Inf is NaN.
FREE = 1024.0


def is_free(run: Run, how: Matrix, appended: bool) -> bool:
    """Check whether the rows of a run are free: fresh units, and further units of a silent block."""
    if how.mode == SILENT:
        return False
    if run.is_free or (how.copied and how.copied.at(run, how.rows.target_size)[2]):
        return True
    return run.copy > 0 and (appended or 0 < how.jitter <= run.copy)


def wild_fault(found: torch.Tensor, how: Matrix, free: bool, most: float) -> Fault | None:
    """The first free entry of a block that is large enough to overflow; `most`: the source's largest entry."""
    columns = np.full(how.columns.target_size, free) | how.columns.is_zero
    far = (found.abs() > max(FREE, most)) & torch.from_numpy(columns)
    return first_fault(far, found, torch.zeros_like(found), 0, "free, but so large that it may overflow")


def wanted_rows(run: Run, how: Matrix, read: Reader) -> Wanted:
    """E_out W for the rows of a run."""
    if run.is_copy:
        rows = read.rows(run.source, run.source + run.length)
    elif run.is_mean or run.is_weighed_mean:
        rows = read.mean().expand(run.length, -1)
    elif run.is_dense:
        assert how.rows.frame is not None
        made = how.rows.frame.forth.along_rows(read.rows, read.mean, run.target, run.target + run.length)
        rows = made.to(read.rows(0, 0).dtype)
    else:
        rows = read.rows(0, 0).new_zeros(1, 1).expand(run.length, how.columns.size)
    amp = None
    if not how.rows.is_plain:
        amp = torch.from_numpy(how.rows.amp[run.target : run.target + run.length] * how.rows.gain)[:, None]
        rows = (rows.double() * amp).to(rows.dtype)
    if not run.needs_every_unit:
        return Wanted(rows)
    return Wanted(rows, lambda: _slack(rows, amp, run, how, read))


def _slack(rows: torch.Tensor, amp: torch.Tensor | None, run: Run, how: Matrix, read: Reader) -> torch.Tensor:
    """Neighbouring numbers for each rounding, and what the sums themselves leave open."""
    roundings = 1 if amp is None else 2
    found = rows.double().abs() * (2 * unit(rows.dtype) * roundings) + 2 * least(rows.dtype) * roundings
    if run.is_dense:
        return found + FRAME * rows.double().abs().amax(1, keepdim=True)
    sums = read.mean_size() * (how.rows.size * unit(torch.float64))
    return found + (sums if amp is None else sums * amp.abs())


def matrix_fault(found: torch.Tensor, run: Run, how: Matrix, read: Reader) -> Fault | None:
    """The first entry of the target's rows `run` that breaks the identity of its recipe; None if all hold."""
    if run.is_spare and how.spare is not None and how.mode != SILENT:
        return _spare_rows_fault(found, run, how.spare, how.rows.target_size)
    if how.mode == SILENT:
        return zero_fault(found, _not_spare(how), "must be 0: the block is silent") or _spare_fault(found, run, how)
    if how.mode == MUTED and run.is_zero:
        return zero_fault(found, slice(0, how.columns.target_size), "must be 0: half of the units are silent")
    wanted = wanted_rows(run, how, read)
    if how.mode == CANCEL:
        wanted = Wanted(wanted.rows.new_zeros(1, 1).expand(wanted.rows.shape))
    if not how.consumes:
        return _produced_fault(found, wanted, how.columns)
    if how.columns.frame is not None:
        return _framed_fault(found, wanted, how.columns)
    return _consumed_fault(found, wanted, run, how) or unread_fault(found, how.columns) or _spare_fault(found, run, how)


def _consumed_fault(found: torch.Tensor, wanted: Wanted, run: Run, how: Matrix) -> Fault | None:
    columns = how.columns
    if columns.is_identity and how.mode in (KEEP, MUTED):
        return near_fault(found, wanted.rows, 0, "must be the source's", slack=wanted.slack)
    if columns.is_plain and adds_up(found, wanted.rows, columns, how.kept_copy(run)):
        return None
    return sums_fault(sums(found, columns), wanted, columns, found.dtype)


def unread_fault(found: torch.Tensor, columns: Expansion) -> Fault | None:
    """Columns that read a mean, or entries that nothing writes yet, must be zero; those that read zeros are free."""
    for run in columns.runs:
        if not run.is_copy and not run.is_zero and not run.is_spare:
            here = slice(run.target, run.target + run.length)
            if fault := zero_fault(found, here, "must be 0: it reads what is not the source's"):
                return fault
    return None


def _produced_fault(found: torch.Tensor, wanted: Wanted, columns: Expansion) -> Fault | None:
    """A table: both axes are produced, so every entry has one value."""
    base = wanted.rows
    if columns.is_identity:
        return near_fault(found, base, 0, "must be the source's", slack=wanted.slack)
    if columns.frame is not None:
        made = columns.frame.forth.along_columns(base)
        return near_fault(found, made, 0, "must be in the frame", roundings=1, slack=_of_frame(made, base))
    for run in columns.runs:
        here = found[:, run.target : run.target + run.length]
        if run.is_free:
            continue
        if fault := _produced_run_fault(here, base, columns, run):
            return fault
    return None


def _produced_run_fault(here: torch.Tensor, base: torch.Tensor, columns: Expansion, run: Run) -> Fault | None:
    scaled, mean = not columns.is_plain, run.is_mean
    amp = torch.from_numpy(columns.amp[run.target : run.target + run.length] * columns.gain) if scaled else None
    if mean:
        exact = base.double()
        made = exact.mean(1, keepdim=True).expand(here.shape)
        size = exact.abs().mean(1, keepdim=True) * (2 * base.shape[1] * unit(torch.float64))
        slack, made = lambda: size, made if amp is None else made * amp
        return near_fault(here, made, run.target, "must be the mean", roundings=1 + scaled, slack=slack)
    copied = run.is_copy
    made = base[:, run.units] if copied else base.new_zeros(1, 1).expand(here.shape)
    made = made if amp is None else (made.double() * amp).to(here.dtype)
    return near_fault(here, made, run.target, "must be a copy" if copied else "must be 0")


def _framed_fault(found: torch.Tensor, wanted: Wanted, columns: Expansion) -> Fault | None:
    assert columns.frame is not None and columns.frame.back is not None
    made = columns.frame.back.along_columns(wanted.rows)
    return near_fault(found, made, 0, "must read the frame", roundings=1, slack=_of_frame(made, wanted.rows))


def _of_frame(made: torch.Tensor, base: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The tolerance of the frames' solver, relative to the largest number of every row."""
    return lambda: FRAME * torch.maximum(made.abs().amax(1, keepdim=True), base.double().abs().amax(1, keepdim=True))


# ----------------------------------------------------------------- spare units, which pass a stream through


def _not_spare(how: Matrix) -> slice:
    spare = 2 * how.spare.size if how.spare and how.columns.is_spare.any() else 0
    return slice(0, how.columns.target_size - spare)


def _spare_fault(found: torch.Tensor, run: Run, how: Matrix) -> Fault | None:
    """The last columns must write what the spare units pass through, once with each sign."""
    if not how.columns.is_spare.any():
        return None
    if how.spare is None:
        size = int(how.columns.is_spare.sum())
        return zero_fault(found, slice(how.columns.target_size - size, how.columns.target_size), "must be 0")
    size, wide = how.spare.size, how.columns.target_size
    values = torch.from_numpy(how.spare.values(run.target, run.target + run.length))
    for sign, start in ((1.0, wide - 2 * size), (-1.0, wide - size)):
        here = found[:, start : start + size]
        made = sign * values
        fault = near_fault(here, made, start, "must pass the stream on", roundings=1, slack=_of_frame(made, made))
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
            fault = near_fault(here, made, 0, rule, roundings=1, slack=_of_frame(made, made))
            if fault:
                return fault._replace(row=fault.row + start - begin)
    return None


# ----------------------------------------------------------------- vectors


def vector_fault(found: torch.Tensor, source: torch.Tensor, how: Vector) -> Fault | None:
    """The first parameter of a norm, scale or statistic that differs from what its recipe makes of the source's."""
    if not found.is_floating_point():
        return near_fault(found.reshape(1, -1), source.reshape(1, -1), 0, "must be the source's")
    values = source.reshape(-1).double().numpy()
    if how.constant is not None:
        values = np.full_like(values, how.constant - how.offset)
    frame, beside = how.expansion.frame, ~how.expansion.is_copy
    gains = how.expansion.expand(values) if frame else values[how.expansion.unit]
    if how.levelled:
        root = float(np.sqrt(np.mean(np.square(values)))) or 1.0
        gains = np.where(beside, root if how.constant is None else how.constant, gains)
    wanted = (gains + how.offset) * how.factor - how.offset + how.rest
    here = found.reshape(-1).double().numpy()
    # One rounding, and that of this sum, which its largest term decides.
    largest = np.abs(gains * how.factor) + abs(how.offset) * (1 + np.abs(how.factor)) + np.abs(how.rest)
    allowed = np.abs(wanted) * unit(found.dtype) * (1 + 2**-8) + least(found.dtype)
    allowed += largest * (8 * unit(torch.float64)) + (FRAME * largest.max(initial=0.0) if frame else 0.0)
    far = ~(np.abs(here - wanted) <= allowed)
    if how.fill and not frame:  # what is multiplied by them is zero
        far &= ~(beside & (np.abs(here) <= FREE))
    if not far.any():
        return None
    at = int(far.argmax())
    return Fault(0, at, float(here[at]), float(wanted[at]), how.rule)
