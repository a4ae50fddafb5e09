"""The blocks in which a tensor is computed, and the rows of the source file that each block needs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from lemonx.algebra.free_parameters import Free
from lemonx.algebra.recipes import KEEP, MUTED, SILENT, Matrix
from lemonx.algebra.runs import Run
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.values import all_finite
from lemonx.errors import BadCheckpoint
from lemonx.execution.matrix import Reader, blocks
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step

if TYPE_CHECKING:
    from lemonx.execution.noise import Scratch

# Bytes per block of the target: large enough that a call's cost does not show, small enough for the caches.
# Measured with bf16 and float32: at 1 MB a fifth of the speed is lost, at 8 MB between a tenth and a half.
BLOCK = 1 << 21
# For a weight that a file keeps transposed: bytes of the target, and of the source, in memory at a time. Each strip is
# a piece of every row of the file, so small strips cost many short reads and writes.
STRIP = 1 << 24
# Rows whose noise, where several tensors share it, is drawn from one generator.
NOISE_ROWS = 64
# Numbers of a tensor that tell its spread, to the 8 bits that it is kept in.
SAMPLE = 1 << 18


def _rows_per_block(width: int, dtype: torch.dtype) -> int:
    return max(1, BLOCK // (width * dtype.itemsize))


def is_whole(step: Step) -> bool:
    """Whether a block's rows are not the first axis of the file, so that tables and strips are computed instead."""
    how = step.recipe
    return isinstance(how, Matrix) and (how.transposed or step.shape[0] != how.rows.target_size)


def tables(shape: tuple[int, ...]) -> int:
    """How many tables, computed one at a time, make up a tensor: one per expert for (experts, in, out)."""
    return shape[0] if len(shape) == 3 else 1


def blocks_within(step: Step, rows: range) -> Iterator[tuple[int, Run]]:
    """The blocks of a matrix that hold any of these rows, numbered: a block's number seeds its generator."""
    how = step.recipe
    assert isinstance(how, Matrix)
    return blocks(how.rows, _rows_per_block(how.columns.target_size, torch_dtype(step.dtype)), rows)


def source_rows(step: Step, rows: int, wanted: range) -> Iterator[tuple[int, int]]:
    """Which of the file's `rows` rows the wanted rows of a whole tensor need, as (start, stop).

    Where the file keeps (in, out), an input of the target needs only the weights of the same input in the source:
    copies and means of outputs are taken input by input. An expert needs only the experts that it is made from.
    """
    how = step.recipe
    assert isinstance(how, Matrix)
    if (count := tables(step.shape)) > 1:
        size = how.rows.target_size // count
        runs = [run for _, run in blocks_within(step, range(wanted.start * size, wanted.stop * size))]
        last = [np.arange(run.source, run.source + run.length) for run in runs if run.is_copy]
        units = np.unique(np.concatenate(last) // (how.rows.size // rows)) if last else np.array([], np.int64)
        everywhere = any(run.needs_every_unit for run in runs)
    else:
        here = slice(wanted.start, wanted.stop)
        units = np.unique(how.columns.unit[here][how.columns.is_copy[here]])
        everywhere = not how.transposed or how.columns.frame is not None
    if everywhere:
        yield 0, rows
        return
    for block in np.split(units, np.flatnonzero(np.diff(units) > 1) + 1):
        if len(block):
            yield int(block[0]), int(block[-1]) + 1


def needed_columns(step: Step, shape: tuple[int, ...], wanted: range) -> list[range] | None:
    """Which columns of a source of this shape the wanted columns of its target need; None: all, or nearly.

    A column of the target needs the column that it is a copy of, unless it is a mean or a mixture of columns.
    """
    how = step.recipe
    assert isinstance(how, Matrix)
    here, mixed = slice(wanted.start, wanted.stop), how.columns.is_mean | how.columns.is_weighed_mean
    if len(shape) != 2 or how.columns.frame is not None or how.as_if is not None or mixed[here].any():
        return None
    units = np.unique(how.columns.unit[here][how.columns.is_copy[here]])
    if len(units) > 0.75 * shape[1]:
        return None
    return [range(int(run[0]), int(run[-1]) + 1) for run in np.split(units, np.flatnonzero(np.diff(units) > 1) + 1)]


def sampled_rows(shape: Sequence[int]) -> list[range]:
    """The rows whose numbers tell the spread of a tensor: all of a small one, else some that lie evenly apart.

    So no process has to read a large tensor whole for the size of its noise.

    >>> sampled_rows((8, 1 << 17))
    [range(0, 1), range(4, 5)]
    """
    count, size = shape[0], math.prod(shape)
    wanted = max(1, SAMPLE * count // max(size, 1))
    if wanted >= count:
        return [range(count)]
    return [range(place * count // wanted, place * count // wanted + 1) for place in range(wanted)]


def takes_spread(step: Step, free: Free, rows: range) -> bool:
    """Whether noise in units of the tensor's spread tells copies apart in any of these rows of the target."""
    how = step.recipe
    if not (isinstance(how, Matrix) and free.relative and free.phi) or how.mode == SILENT:
        return False
    # Of pairs that cancel, noise of the same size sets only further copies apart.
    copies = 1 if how.mode in (KEEP, MUTED) else 2
    if (how.consumes and how.columns.copies.max() > copies) or how.copied:
        return True
    return how.jitter > 0 and (is_whole(step) or any(run.copy >= how.jitter for _, run in blocks_within(step, rows)))


class Source:
    """The rows of a step's source tensors, as matrices in the target's dtype; `columns`: those of the target wanted."""

    def __init__(
        self,
        step: Step,
        how: Matrix,
        plan: Plan,
        checkpoint: Checkpoint,
        scratch: Scratch,
        columns: range | None = None,
    ) -> None:
        from lemonx.checkpoints.safetensors_file import torch_dtype

        self.dtype = torch_dtype(step.dtype)
        self._seed, self._free = plan.seed, plan.free
        self.how = how
        self._step = step
        self._checkpoint = checkpoint
        self._scratch = scratch
        info = checkpoint.tensors[step.source]
        self._stored = torch_dtype(info.dtype)
        self._needed_columns = None if columns is None else needed_columns(step, info.shape, columns)
        self._lock = threading.Lock()
        self._mean: torch.Tensor | None = None
        self._spread: float | None = None

    def reader(self, *, further: bool) -> Reader:
        """Access to the source's rows; further copies may come from another tensor."""
        name = self._step.appended if further and self._step.appended else self._step.source
        rows = partial(self._rows, name, checked=further)
        return Reader(rows, self._mean_row, self._apart, self._mean_size, self._spread_of_sample)

    def _apart(self, copy: int, start: int, stop: int) -> torch.Tensor:
        """The noise of these source rows in the copy with this number, whatever blocks they are read in.

        The first copy subtracts what all the others add, so the noise may depend only on the source's name and rows.
        """
        from lemonx.execution import noise

        step, width = self._step, self.how.columns.size
        std, parts = self.reader(further=False).phi(self._free), []
        for chunk in range(start // NOISE_ROWS, -(-stop // NOISE_ROWS)):
            rng = noise.generator(self._seed, f"{step.source} in {step.block}, copy {copy}", chunk)
            phi = noise.normal(torch.empty(NOISE_ROWS, width, dtype=self.dtype), std, rng)
            first = chunk * NOISE_ROWS
            parts.append(phi[max(start - first, 0) : stop - first])
        return torch.cat(parts)

    def _rows(self, name: str, start: int, stop: int, *, checked: bool = False) -> torch.Tensor:
        """Rows of a tensor, valid until this thread asks again. First copies read every row, so they are checked."""
        rows = self._read(name, start, stop)
        if rows.dtype != self.dtype:
            rows = self._scratch.tensor("cast", self.dtype, *rows.shape).copy_(rows)
        if not checked:
            check_finite(rows, name, self._checkpoint)
        return rows

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        info = self._checkpoint.tensors[name]  # what further copies come from may be stored in another dtype
        rows = self._scratch.tensor("source", torch_dtype(info.dtype), stop - start, *info.shape[1:])
        if self._needed_columns is None:
            self._checkpoint.read(name, start, stop, out=rows)
        else:  # a block is wholly made, but only the needed columns of it are kept
            rows.zero_()
            for columns in self._needed_columns:
                rows[:, columns.start : columns.stop] = self._checkpoint.read(name, start, stop, columns=columns)
        return rows.view(stop - start, self.how.columns.size)

    def _mean_row(self) -> torch.Tensor:
        """The mean row, summed in float64 over blocks; it is computed once for all blocks that need it."""
        with self._lock:
            if self._mean is None:
                self._mean = self._mean_of(lambda terms: terms).to(self.dtype)
        return self._mean

    def _spread_of_sample(self) -> float:
        """The spread of the source tensor, whichever of its rows are wanted here; it is computed once."""
        from lemonx.execution import noise

        name = self._step.source
        with self._lock:
            if self._spread is None:
                rows = sampled_rows(self._checkpoint.tensors[name].shape)
                self._spread = noise.spread(self._checkpoint.read(name, r.start, r.stop) for r in rows)
        return self._spread

    def _mean_size(self) -> torch.Tensor:
        """The mean absolute value per column: the yardstick for the rounding of the mean."""
        return self._mean_of(lambda terms: terms.abs())

    def _mean_of(self, terms: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        count, width = self.how.rows.size, self.how.columns.size
        total, weights = torch.zeros(width, dtype=torch.float64), self._weights()
        for start in range(0, count, limit := _rows_per_block(width, torch.float64)):
            rows = terms(self._rows(self._step.source, start, min(start + limit, count)).double())
            by = None if weights is None else terms(weights[start : start + len(rows)])
            total += rows.sum(0) if by is None else by @ rows
        return total / count

    def _weights(self) -> torch.Tensor | None:
        """The factors that a scale after this weight applies to its rows, relative to the factor of new rows."""
        if self._step.scaled_by is None:
            return None
        values = self._checkpoint.read(self._step.scaled_by).double()
        return values / level(values.numpy())


class StripReader(Source):
    """The same for tensors whose rows are not the first axis of the file: the last few strips are held in memory."""

    HELD = 4  # two threads, and each may read a second tensor for further copies

    def __init__(
        self, step: Step, how: Matrix, plan: Plan, checkpoint: Checkpoint, scratch: Scratch, wanted: range
    ) -> None:
        super().__init__(step, how, plan, checkpoint, scratch)
        self._wanted = wanted
        self._held: dict[tuple[str, int], torch.Tensor] = {}
        self._reading = threading.Lock()

    def pieces(self, columns: range | None = None) -> Iterator[range]:
        """The rows that are computed at a time: a table, or a strip of a transposed one that has wanted `columns`."""
        count = tables(self._step.shape)
        size = self.how.rows.target_size // count
        limit = self._limit(size, self.how.columns.target_size, self.dtype)
        for first in (table * size for table in (self._wanted if count > 1 else (0,))):
            for start in range(first, first + size, limit):
                stop = min(start + limit, first + size)
                apart = columns and (start - first >= columns.stop or columns.start >= stop - first)
                if not (self.how.transposed and apart):
                    yield range(start, stop)

    def _limit(self, size: int, width: int, dtype: torch.dtype) -> int:
        return min(size, max(1, STRIP // (width * dtype.itemsize))) if self.how.transposed else size

    def as_stored(self, rows: torch.Tensor) -> torch.Tensor:
        """A piece as the file keeps it."""
        shape = self._step.shape
        if self.how.transposed:
            return rows.T.reshape(*(1,) * (len(shape) - 2), -1, len(rows))
        return rows.view(shape[0] // tables(shape), *shape[1:])

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        width = self.how.columns.size
        size = self.how.rows.size // tables(self._checkpoint.tensors[name].shape)
        limit, parts = self._limit(size, width, self._stored), []
        while start < stop:
            table, place = divmod(start, size)
            first = table * size + place // limit * limit
            end = min(first + limit, (table + 1) * size)
            parts.append(self._strip(name, first, end)[start - first : stop - first])
            start = end
        return torch.cat(parts) if parts else torch.empty(0, width, dtype=self._stored)

    def _strip(self, name: str, first: int, end: int) -> torch.Tensor:
        with self._reading:
            if (name, first) not in self._held:
                while len(self._held) >= self.HELD:
                    del self._held[next(iter(self._held))]
                kept = self._needed(name, first, end)
                width = self.how.columns.size
                rows = kept.reshape(width, -1).T.contiguous() if self.how.transposed else kept.view(-1, width)
                self._held[name, first] = rows
            return self._held[name, first]

    def _needed(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows as the file keeps them, with zeros for rows of the file that the wanted rows do not need."""
        shape, dtype = self._checkpoint.tensors[name].shape, torch_dtype(self._checkpoint.tensors[name].dtype)
        table, place = divmod(first, self.how.rows.size // tables(shape))
        columns = range(place, place + end - first) if self.how.transposed else None
        if tables(shape) > 1:
            return self._checkpoint.read(name, table, table + 1, columns=columns)
        held = torch.zeros((*shape[:-1], len(columns) if columns else shape[-1]), dtype=dtype)
        for start, stop in source_rows(self._step, shape[0], self._wanted):
            self._checkpoint.read(name, start, stop, columns=columns, out=held[start:stop])
        return held


def level(values: np.ndarray) -> float:
    """The root of the mean square, or 1 where that is 0."""
    return float(np.sqrt(np.mean(np.square(values)))) or 1.0


def check_finite(tensor: torch.Tensor, name: str, checkpoint: Checkpoint | None = None) -> None:
    """Raise if a number is NaN or Inf, perhaps because it was cast to a dtype that is too small for it."""
    if not all_finite(tensor):
        where = f"{str(checkpoint.origin / checkpoint.tensors[name].file.name)!r}: " if checkpoint else ""
        raise BadCheckpoint(
            f"{where}{name} holds NaN or Inf, or numbers too large for {tensor.dtype}",
            "go back to a checkpoint without them",
        )
