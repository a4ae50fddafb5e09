"""Runs a plan over a checkpoint: block of rows by block of rows, read, expanded, written in place.

The blocks of a tensor depend only on its shape, and each has its own random generator. So the bytes written depend on
neither threads nor shards, and a process that holds some rows of a tensor computes only the blocks that contain them.
Memory holds a few blocks per thread, whatever the size of the model and of its largest tensor, or a few strips of a
weight that a file keeps transposed (GPT-2; experts, in, out).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.recipes import Matrix, Vector
from lemonx.algebra.runs import Run
from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.writer import Written
from lemonx.errors import BadCheckpoint, BadOutput
from lemonx.execution import kernels
from lemonx.execution.matrix import expand_block
from lemonx.execution.row_readers import Source, StripReader, blocks_within, check_finite, is_whole, level, tables
from lemonx.guards.workers import NoWorker, can_fork, cores, in_processes, one_thread_each
from lemonx.planning.plan import Plan
from lemonx.planning.summary import bytes_on_disk
from lemonx.planning.tensor_steps import Step

# From so many bytes of output on workers are processes, which take some hundredths of a second to start.
WORTH_PROCESSES = 1 << 28

CountBytes = Callable[[int], None]
Job = Callable[[], None]
# Which rows of a tensor, along its first axis as the file keeps it, are wanted here; or which columns, along its last.
WantedRows = Callable[[Step], range]


class Sink(Protocol):
    """Where rows of tensors are written: a file, or the part of a model that one process holds."""

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        """Take rows from `start` on, and columns from `column` on; `values` is valid during the call only."""


def everything(step: Step) -> range:
    """All rows; a tensor without axes counts as one row."""
    return range(step.shape[0] if step.shape else 1)


def every_column(step: Step) -> range:
    """All of the last axis."""
    return range(step.shape[-1] if step.shape else 1)


def run_plan(
    plan: Plan,
    checkpoint: Checkpoint,
    writer: Sink,
    *,
    wanted: WantedRows = everything,
    columns: WantedRows = every_column,
    threads: int | None = None,
    progress: CountBytes | None = None,
) -> None:
    """Write every tensor of the plan, at least the rows that are `wanted`; `progress` gets counts of bytes written.

    Of these rows, only the `columns` need be right: what the others are made of is not read.
    """
    if not plan.solved:
        raise TypeError("this plan is an outline: make it with solve=True")
    tell = progress or (lambda count: None)
    _check_tied(plan, checkpoint, wanted)
    written = bytes_on_disk(plan)[1]
    kernels.prepare(written)
    task = _Task(plan, checkpoint, writer, wanted, columns, tell)
    parts = in_parts(plan.steps, threads or cores())
    with one_thread_each():
        apart = len(parts) > 1 and written >= WORTH_PROCESSES and can_fork()
        if not (apart and isinstance(writer, CheckpointWriter) and _run_apart(task, parts, writer)):
            run_jobs([task.jobs(steps) for steps in parts])
    checkpoint.check_unchanged()


def _run_apart(task: _Task, parts: Sequence[Sequence[Step]], writer: CheckpointWriter) -> bool:
    """Run each part in a process of its own, and note here what these have written; false if none can be had."""
    try:
        for record in in_processes([partial(task.run_alone, steps, writer) for steps in parts], task.tell):
            writer.note_written(record)
        return True
    except NoWorker:
        return False
    except ChildProcessError as error:
        raise BadOutput(
            f"is not complete: {error}", "free some memory, or use --threads 1", file=writer.output
        ) from None


def write_made(
    plan: Plan, tensors: Mapping[str, torch.Tensor], writer: Sink, progress: CountBytes | None = None
) -> None:
    """Write the tensors that a method made, by name, in the dtypes of the plan."""
    if odd := sorted(tensors.keys() ^ {step.name for step in plan.steps}):
        raise BadCheckpoint(
            f"the source's file names {odd[0]} differently from transformers",
            "load the source with transformers, save it again, and expand that",
        )
    for step in plan.steps:
        tensor = tensors[step.name].to(torch_dtype(step.dtype))
        if tensor.is_floating_point():
            check_finite(tensor, step.name)
        writer.write(step.name, 0, tensor)
        if progress:
            progress(tensor.nbytes)


def in_parts(steps: Sequence[Step], count: int) -> list[Sequence[Step]]:
    """The steps in `count` consecutive parts, with about the same number of elements each."""
    ends = np.cumsum([math.prod(step.shape) for step in steps])
    cuts = np.searchsorted(ends, [ends[-1] * part / count for part in range(count + 1)])
    return [steps[start:stop] for start, stop in pairwise([0, *cuts[1:-1], len(steps)])]


def run_jobs(parts: list[Iterator[Job]]) -> None:
    """Run all jobs, with one worker per part, because two workers that write to one file wait for one another.

    A worker that finishes its part helps with the next. Workers take jobs when they are free, so no list is built.
    """
    locks, stop = [threading.Lock() for _ in parts], threading.Event()

    def take(first: int) -> Job | None:
        for part in (*range(first, len(parts)), *range(first)):
            with locks[part]:
                if job := next(parts[part], None):
                    return job
        return None

    def work(first: int) -> None:
        try:
            while not stop.is_set() and (job := take(first)):
                job()
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        try:
            for done in [pool.submit(work, part) for part in range(len(parts))]:
                done.result()
        finally:
            stop.set()


class _Task:
    """A plan, where it reads from and where it writes to."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        writer: Sink,
        wanted: WantedRows,
        columns: WantedRows,
        tell: CountBytes,
    ) -> None:
        from lemonx.execution import noise

        self.plan = plan
        self.checkpoint = checkpoint
        self.writer = writer
        self.wanted = wanted
        self.columns = columns
        self.tell = tell
        self.scratch = noise.Scratch()
        self.whole_tensors = threading.Semaphore(2)

    def run_alone(self, steps: Sequence[Step], writer: CheckpointWriter, tell: CountBytes) -> Written:
        """Make these tensors in a process that does nothing else; returns what the writer of this process has noted."""
        self.tell = tell
        for job in self.jobs(steps):
            job()
        return writer.noted([step.name for step in steps])

    def jobs(self, steps: Sequence[Step]) -> Iterator[Job]:
        """The independent pieces of work that make these tensors, in order."""
        for step in steps:
            wanted = self.wanted(step)
            if not wanted:
                continue
            if isinstance(step.recipe, Vector):
                yield partial(self._write_vector, step, step.recipe)
            elif is_whole(step):
                source = StripReader(step, step.recipe, self.plan, self.checkpoint, self.scratch, wanted)
                for rows in source.pieces(self.columns(step)):
                    yield partial(self._write_piece, step, step.recipe, source, rows)
            else:
                source = Source(step, step.recipe, self.plan, self.checkpoint, self.scratch, self.columns(step))
                for part, run in blocks_within(step, wanted):
                    yield partial(self._write_block, step, step.recipe, source, part, run)

    def _write_block(self, step: Step, how: Matrix, source: Source, part: int, run: Run) -> None:
        out = self.scratch.tensor("target", source.dtype, run.length, how.columns.target_size)
        block = self._expanded(step, how, source, part, run, out)
        self.writer.write(step.name, run.target, block.reshape(run.length, *step.shape[1:]))
        self.tell(out.nbytes)

    def _write_piece(self, step: Step, how: Matrix, source: StripReader, rows: range) -> None:
        """Write a strip of a weight kept as (in, out), the matrix of one expert, or a table (1, positions, width)."""
        table, column = divmod(rows.start, how.rows.target_size // tables(step.shape))
        with self.whole_tensors:
            made = torch.empty(len(rows), how.columns.target_size, dtype=source.dtype)
            # A block may reach beyond: it is made for both pieces, and each takes its rows.
            for part, run in blocks_within(step, rows):
                low, high = max(run.target, rows.start), min(run.target + run.length, rows.stop)
                block = self._expanded(step, how, source, part, run)
                made[low - rows.start : high - rows.start] = block[low - run.target : high - run.target]
            result = source.as_stored(made)
            self.writer.write(step.name, table, result, column)
        self.tell(result.nbytes)

    def _expanded(
        self, step: Step, how: Matrix, source: Source, part: int, run: Run, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from lemonx.execution import noise

        rng = noise.generator(self.plan.seed, step.name, part)
        return expand_block(run, how, source.reader(further=run.copy > 0), self.plan.free, rng, out)

    def _write_vector(self, step: Step, recipe: Vector) -> None:
        from lemonx.checkpoints.safetensors_file import torch_dtype
        from lemonx.execution import noise

        result = self.checkpoint.read(step.source)
        if result.is_floating_point():
            check_finite(result, step.source, self.checkpoint)
            values = result.reshape(-1).double().numpy()
            if recipe.constant is not None:
                values = np.full_like(values, recipe.constant)
                values -= recipe.offset
            placed = _placed(values, recipe.expansion)
            if recipe.levelled:
                placed[~recipe.expansion.is_copy] = level(values) if recipe.constant is None else recipe.constant
            values = placed * recipe.factor + recipe.rest
            # The gain v + offset takes the factor: what stays has no rounding.
            values = torch.from_numpy(values + recipe.offset * (recipe.factor - 1.0))
            free = torch.from_numpy(~recipe.expansion.is_copy)
            if recipe.fill and not recipe.expansion.frame and bool(free.any()):
                zeta = torch.empty(int(free.sum()), dtype=torch.float64)
                bound = recipe.fill * self.plan.free.norm_zeta
                values[free] = noise.uniform(zeta, bound, noise.generator(self.plan.seed, step.name, 0))
            result = values.to(torch_dtype(step.dtype)).reshape(step.shape)
        self.writer.write(step.name, 0, result)
        self.tell(result.nbytes)


def _placed(values: np.ndarray, expansion: Expansion) -> np.ndarray:
    """The source entry of each target entry; those without one get an arbitrary entry, and later a factor of 0.

    Dense entries are sums.
    """
    return expansion.expand(values) if expansion.frame else values[expansion.unit]


def _check_tied(plan: Plan, checkpoint: Checkpoint, wanted: WantedRows) -> None:
    """Check that a tied weight which the file stores twice is the same both times, since only one is written."""
    for name, row in plan.tied.items():
        step = next(step for step in plan.steps if step.row == row)
        # Each process checks the rows it holds; those that a larger vocabulary adds are nobody's.
        held = wanted(step)
        rows = range(held.start, min(held.stop, plan.tensors[name].shape[0]))
        if not checkpoint.same(name, step.source, rows):
            raise BadCheckpoint(
                f"ties {name} to {step.source}, but the weights of the two differ",
                "set tie_word_embeddings to false there",
                file=checkpoint.config_file,
            )
