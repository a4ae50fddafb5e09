"""Runs a plan over a checkpoint: block of rows by block of rows, read, expanded, written in place.

The blocks of a tensor depend on its shape alone and each has a generator of its own, so the bytes written
depend on neither threads nor shards, and a process that holds some rows of a tensor makes only the blocks that these
are in. Memory holds a few blocks per thread, whatever the size of the model; only
weights that a file keeps transposed (GPT-2) and tables with leading axes are in memory whole, two at a time.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.values import all_finite
from lemonx.errors import BadCheckpoint
from lemonx.modules import Vector
from lemonx.operators import Matrix, Reader, blocks, expand_block
from lemonx.planning import Plan
from lemonx.steps import Step
from lemonx.vectors import Expansion, Run

if TYPE_CHECKING:
    import torch

    from lemonx.noise import Scratch

# Bytes per block of the target: large enough that a call's cost does not show, small enough for the caches.
# Measured with bf16 and float32: at 1 MB a fifth of the speed is lost, at 8 MB between a tenth and a half.
BLOCK = 1 << 21
# Rows whose noise, where several tensors share it, is drawn from one generator.
NOISE_ROWS = 64

Progress = Callable[[int], None]
Job = Callable[[], None]
# Which rows of a tensor, along its first axis as the file keeps it, are wanted here.
Wanted = Callable[[Step], range]


class Sink(Protocol):
    """Where rows of tensors go: a file, or what one process holds of a model."""

    def write(self, name: str, start: int, values: torch.Tensor, /) -> None:
        """Take the rows from `start` on; they are valid during the call only."""


def everything(step: Step) -> range:
    """All rows; a tensor without axes counts as one row."""
    return range(step.shape[0] if step.shape else 1)


def run_plan(
    plan: Plan,
    checkpoint: Checkpoint,
    writer: Sink,
    *,
    wanted: Wanted = everything,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write every tensor of the plan, at least the rows that are `wanted`; `progress` gets counts of bytes written."""
    import torch

    tell = progress or (lambda count: None)
    _check_tied(plan, checkpoint, wanted)
    task = _Task(plan, checkpoint, writer, wanted, tell)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run(task.jobs(), threads or min(os.cpu_count() or 1, 8))
    finally:
        torch.set_num_threads(before)
    checkpoint.check_unchanged()


def write_made(plan: Plan, tensors: Mapping[str, torch.Tensor], writer: Sink, progress: Progress | None = None) -> None:
    """Write the tensors that a method made, by name, in the dtypes of the plan."""
    if odd := sorted(tensors.keys() ^ {step.name for step in plan.steps}):
        raise BadCheckpoint(
            f"{odd[0]} is named otherwise by transformers than by the source's file: load the source with "
            "transformers, save it again, and use that"
        )
    for step in plan.steps:
        tensor = tensors[step.name].to(torch_dtype(step.dtype))
        if tensor.is_floating_point():
            _check_finite(tensor, step.name)
        writer.write(step.name, 0, tensor)
        if progress:
            progress(tensor.nbytes)


def _run(jobs: Iterator[Job], workers: int) -> None:
    """Do all the jobs. A worker takes the next when it is free, so a model of any size has no list of jobs."""
    lock, stop = threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            try:
                job()
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in [pool.submit(work) for _ in range(workers)]:
                done.result()
        finally:
            stop.set()


class _Task:
    """A plan, where it reads from and where it writes to."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, writer: Sink, wanted: Wanted, tell: Progress) -> None:
        from lemonx import noise

        self.plan = plan
        self.checkpoint = checkpoint
        self.writer = writer
        self.wanted = wanted
        self.tell = tell
        self.scratch = noise.Scratch()
        self.whole_tensors = threading.Semaphore(2)

    def jobs(self) -> Iterator[Job]:
        """The independent pieces of work that make all tensors, in order."""
        for step in self.plan.steps:
            wanted = self.wanted(step)
            if not wanted:
                continue
            if isinstance(step.recipe, Vector):
                yield partial(self._write_vector, step, step.recipe)
            elif is_whole(step):
                yield partial(self._write_whole, step, step.recipe, wanted)
            else:
                source = _Source(step, step.recipe, self.plan, self.checkpoint, self.scratch)
                for part, run in wanted_blocks(step, wanted):
                    yield partial(self._write_block, step, step.recipe, source, part, run)

    def _write_block(self, step: Step, how: Matrix, source: _Source, part: int, run: Run) -> None:
        out = self.scratch.tensor("target", source.dtype, run.length, how.columns.target_size)
        block = self._expanded(step, how, source, part, run, out)
        self.writer.write(step.name, run.target, block.reshape(run.length, *step.shape[1:]))
        self.tell(out.nbytes)

    def _write_whole(self, step: Step, how: Matrix, wanted: range) -> None:
        """A weight kept as (in, out), or a table such as (1, positions, width)."""
        import torch

        with self.whole_tensors:
            source = _Whole(step, how, self.plan, self.checkpoint, self.scratch, wanted)
            rows = torch.empty(how.rows.target_size, how.columns.target_size, dtype=source.dtype)
            for part, run in _blocks(how, source.dtype):
                here = rows[run.target : run.target + run.length]
                here.copy_(self._expanded(step, how, source, part, run))
            result = source.as_stored(rows, step.shape)
            self.writer.write(step.name, 0, result)
        self.tell(result.nbytes)

    def _expanded(
        self, step: Step, how: Matrix, source: _Source, part: int, run: Run, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from lemonx import noise

        rng = noise.generator(self.plan.seed, step.name, part)
        return expand_block(run, how, source.reader(further=run.copy > 0), self.plan.free, rng, out)

    def _write_vector(self, step: Step, recipe: Vector) -> None:
        import torch

        from lemonx import noise
        from lemonx.checkpoints.safetensors_file import torch_dtype

        result = self.checkpoint.read(step.source)
        if result.is_floating_point():
            _check_finite(result, _named(self.checkpoint, step.source))
            values = result.reshape(-1).double().numpy()
            if recipe.constant is not None:
                values = np.full_like(values, recipe.constant)
                values -= recipe.offset
            placed = _placed(values, recipe.expansion)
            if recipe.levelled:
                placed[recipe.expansion.source < 0] = _level(values) if recipe.constant is None else recipe.constant
            values = placed * recipe.factor + recipe.rest
            # The gain v + offset takes the factor: what stays has no rounding.
            values = torch.from_numpy(values + recipe.offset * (recipe.factor - 1.0))
            free = torch.from_numpy(recipe.expansion.source < 0)
            if recipe.fill and not recipe.expansion.frame and bool(free.any()):
                zeta = torch.empty(int(free.sum()), dtype=torch.float64)
                bound = recipe.fill * self.plan.free.norm_zeta
                values[free] = noise.uniform(zeta, bound, noise.generator(self.plan.seed, step.name, 0))
            result = values.to(torch_dtype(step.dtype)).reshape(step.shape)
        self.writer.write(step.name, 0, result)
        self.tell(result.nbytes)


def _placed(values: np.ndarray, expansion: Expansion) -> np.ndarray:
    """Each target entry's source; entries without one have any, and a factor of 0. Dense entries are sums."""
    return expansion.expand(values) if expansion.frame else values[np.maximum(expansion.source, 0)]


def _rows_per_block(width: int, dtype: torch.dtype) -> int:
    return max(1, BLOCK // (width * dtype.itemsize))


def _blocks(how: Matrix, dtype: torch.dtype) -> Iterator[tuple[int, Run]]:
    """The blocks of a tensor in the target, numbered: a block's number seeds its generator."""
    return enumerate(blocks(how.rows, _rows_per_block(how.columns.target_size, dtype)))


def is_whole(step: Step) -> bool:
    """The rows that a block is made of are not the first axis of the file: the tensor is made in one go."""
    how = step.recipe
    return isinstance(how, Matrix) and (how.transposed or step.shape[0] != how.rows.target_size)


def wanted_blocks(step: Step, wanted: range) -> Iterator[tuple[int, Run]]:
    """The numbered blocks that hold any of the wanted rows."""
    assert isinstance(step.recipe, Matrix)
    for part, run in _blocks(step.recipe, torch_dtype(step.dtype)):
        if run.target < wanted.stop and wanted.start < run.target + run.length:
            yield part, run


def source_rows(step: Step, rows: int, wanted: range) -> Iterator[tuple[int, int]]:
    """The rows of the file, `rows` in all, that the wanted rows of a whole tensor are made of, as (start, stop).

    Where the file keeps (in, out), an input of the target needs the weights of its own input in the source only:
    copies and means of outputs are taken input by input.
    """
    how = step.recipe
    if not isinstance(how, Matrix) or not how.transposed or len(step.shape) > 2 or how.columns.frame:
        yield 0, rows
        return
    units = np.unique(how.columns.source[wanted.start : wanted.stop])
    units = units[units >= 0]
    for block in np.split(units, np.flatnonzero(np.diff(units) > 1) + 1):
        if len(block):
            yield int(block[0]), int(block[-1]) + 1


class _Source:
    """The rows of a step's source tensors, as matrices in the target's dtype."""

    def __init__(self, step: Step, how: Matrix, plan: Plan, checkpoint: Checkpoint, scratch: Scratch) -> None:
        from lemonx.checkpoints.safetensors_file import torch_dtype

        self.dtype = torch_dtype(step.dtype)
        self._seed, self._phi = plan.seed, plan.free.phi
        self.how = how
        self._step = step
        self._checkpoint = checkpoint
        self._scratch = scratch
        self._stored = torch_dtype(checkpoint.tensors[step.source].dtype)
        self._lock = threading.Lock()
        self._mean: torch.Tensor | None = None

    def reader(self, *, further: bool) -> Reader:
        """Access to the source's rows; further copies may come from another tensor."""
        name = self._step.appended if further and self._step.appended else self._step.source
        return Reader(partial(self._rows, name, checked=further), self._mean_row, self._apart)

    def _apart(self, copy: int, start: int, stop: int) -> torch.Tensor:
        """The noise of the source's rows in the copy with this number: of these rows, whoever asks and in what blocks.

        The first copy takes what all others have, so what is drawn hangs on the source's name and rows alone.
        """
        import torch

        from lemonx import noise

        step, width = self._step, self.how.columns.size
        parts = []
        for chunk in range(start // NOISE_ROWS, -(-stop // NOISE_ROWS)):
            rng = noise.generator(self._seed, f"{step.source} in {step.block}, copy {copy}", chunk)
            phi = noise.normal(torch.empty(NOISE_ROWS, width, dtype=self.dtype), self._phi, rng)
            first = chunk * NOISE_ROWS
            parts.append(phi[max(start - first, 0) : stop - first])
        return torch.cat(parts)

    def _rows(self, name: str, start: int, stop: int, *, checked: bool = False) -> torch.Tensor:
        """Rows of a tensor, valid until this thread asks again. First copies read every row: these are checked."""
        rows = self._read(name, start, stop)
        if rows.dtype != self.dtype:
            rows = self._scratch.tensor("cast", self.dtype, *rows.shape).copy_(rows)
        if not checked:
            _check_finite(rows, _named(self._checkpoint, name))
        return rows

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = (stop - start, *self._checkpoint.tensors[name].shape[1:])
        rows = self._checkpoint.read(name, start, stop, out=self._scratch.tensor("source", self._stored, *shape))
        return rows.view(stop - start, self.how.columns.size)

    def _mean_row(self) -> torch.Tensor:
        """The mean row, summed in float64 over blocks, once for all the blocks that want it."""
        import torch

        count, width = self.how.rows.size, self.how.columns.size
        with self._lock:
            if self._mean is None:
                total = torch.zeros(width, dtype=torch.float64)
                weights = self._weights()
                for start in range(0, count, limit := _rows_per_block(width, torch.float64)):
                    rows = self._rows(self._step.source, start, min(start + limit, count)).double()
                    total += weights[start : start + len(rows)] @ rows if weights is not None else rows.sum(0)
                self._mean = (total / count).to(self.dtype)
        return self._mean

    def _weights(self) -> torch.Tensor | None:
        """The factors that a scale behind this weight has for its rows, relative to the factor of new ones."""
        if self._step.scaled_by is None:
            return None
        values = self._checkpoint.read(self._step.scaled_by).double()
        return values / _level(values.numpy())


def _level(values: np.ndarray) -> float:
    """The root of the mean square, or 1 where that is 0."""
    return float(np.sqrt(np.mean(np.square(values)))) or 1.0


class _Whole(_Source):
    """The same for tensors whose rows are not the first axis of the file: read once, held in memory."""

    def __init__(
        self, step: Step, how: Matrix, plan: Plan, checkpoint: Checkpoint, scratch: Scratch, wanted: range
    ) -> None:
        super().__init__(step, how, plan, checkpoint, scratch)
        names = {step.source, step.appended or step.source}
        self._held = {name: self.as_rows(self._needed(name, wanted), how.columns.size) for name in names}

    def _needed(self, name: str, wanted: range) -> torch.Tensor:
        """The tensor, with zeros in rows of the file that the wanted ones do not need."""
        import torch

        shape = self._checkpoint.tensors[name].shape
        held = torch.zeros(shape, dtype=self._stored)
        for start, stop in source_rows(self._step, shape[0], wanted):
            self._checkpoint.read(name, start, stop, out=held[start:stop])
        return held

    def as_rows(self, tensor: torch.Tensor, columns: int) -> torch.Tensor:
        """A tensor as the file keeps it, rows first."""
        if not self.how.transposed:
            return tensor.view(-1, columns)
        return tensor.view(math.prod(tensor.shape[:-2]), columns, -1).transpose(1, 2).reshape(-1, columns)

    def as_stored(self, rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The way back."""
        if not self.how.transposed:
            return rows.view(shape)
        slices = math.prod(shape[:-2])
        return rows.view(slices, -1, rows.shape[1]).transpose(1, 2).reshape(shape)

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._held[name][start:stop].contiguous()


def _check_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise if a number is NaN or Inf, perhaps because it was cast to a dtype that is too small for it."""
    if not all_finite(tensor):
        raise BadCheckpoint(
            f"{name} holds NaN or Inf, or numbers too large for {tensor.dtype}: go back to a checkpoint that is whole"
        )


def _named(checkpoint: Checkpoint, name: str) -> str:
    """A tensor and the file it is in, for people."""
    return f"{str(checkpoint.origin / checkpoint.tensors[name].file.name)!r}: {name}"


def _check_tied(plan: Plan, checkpoint: Checkpoint, wanted: Wanted) -> None:
    """A file may repeat a tied weight; were it another weight, leaving it out would lose it."""
    for name, row in plan.tied.items():
        step = next(step for step in plan.steps if step.row == row)
        # Each process checks the rows it holds; those that a larger vocabulary adds are nobody's.
        held = wanted(step)
        rows = range(held.start, min(held.stop, plan.tensors[name].shape[0]))
        if not checkpoint.same(name, step.source, rows):
            raise BadCheckpoint(
                f"{str(checkpoint.origin / 'config.json')!r} ties {name} to {step.source}, but the file holds two "
                "different weights: set tie_word_embeddings to false there, as transformers reads it"
            )
