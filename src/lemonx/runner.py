"""Runs a plan over a checkpoint: block of rows by block of rows, read, expanded, written in place.

The blocks of a tensor depend on its shape alone and each has a generator of its own, so the bytes written
depend on neither threads nor shards. Memory holds a few blocks per thread, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.errors import BadCheckpoint
from lemonx.modules import Vector
from lemonx.operators import Matrix, Reader, blocks, expand_block
from lemonx.planning import Plan, Step
from lemonx.vectors import Run

if TYPE_CHECKING:
    import torch

# Target elements per block: large enough that a call's cost does not show, small enough for a cache.
BLOCK = 1 << 20

Progress = Callable[[int], None]


def run_plan(
    plan: Plan,
    checkpoint: Checkpoint,
    writer: CheckpointWriter,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write every tensor of the plan; `progress` gets counts of bytes written."""
    import torch

    tell = progress or (lambda count: None)
    _check_tied(plan, checkpoint)
    workers = threads or min(os.cpu_count() or 1, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(job) for step in plan.steps for job in _jobs(step, plan, checkpoint, writer, tell)]
            try:
                for done in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(before)
    checkpoint.check_unchanged()


def _jobs(
    step: Step, plan: Plan, checkpoint: Checkpoint, writer: CheckpointWriter, tell: Progress
) -> Iterator[Callable[[], None]]:
    """The independent pieces of work that make one tensor."""
    if isinstance(step.recipe, Vector):
        yield partial(_write_vector, step, plan, checkpoint, writer, tell)
    elif step.recipe.transposed:
        yield partial(_write_transposed, step, plan, checkpoint, writer, tell)
    else:
        source = _Source.of(step, checkpoint, plan)
        width = step.recipe.columns.target_size
        for part, run in enumerate(blocks(step.recipe.rows, max(1, BLOCK // width))):
            yield partial(_write_block, step, plan, source, writer, tell, part, run)


@dataclass(frozen=True)
class _Source:
    """The rows of a step's source tensors, as matrices in the target's dtype."""

    checkpoint: Checkpoint
    step: Step
    dtype: torch.dtype
    columns: int
    rows_per_index: float

    @classmethod
    def of(cls, step: Step, checkpoint: Checkpoint, plan: Plan) -> _Source:
        from lemonx.checkpoints.safetensors_file import torch_dtype

        assert isinstance(step.recipe, Matrix)
        first_axis = plan.tensors[step.source].shape[0]
        per_index = step.recipe.rows.size / first_axis
        return cls(checkpoint, step, torch_dtype(step.dtype), step.recipe.columns.size, per_index)

    def rows(self, start: int, stop: int, *, further: bool = False) -> torch.Tensor:
        name = self.step.appended if further and self.step.appended else self.step.source
        if self.rows_per_index == 1.0:
            return self._matrix(self.checkpoint.read(name, start, stop))
        # A table with leading axes, (1, positions, width): small, and read whole.
        return self._matrix(self.checkpoint.read(name))[start:stop]

    def _matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise BadCheckpoint(f"{self.step.source} holds NaN or Inf: the source model is broken")
        return tensor.reshape(-1, self.columns).to(self.dtype)

    def mean(self) -> torch.Tensor:
        """The mean row, summed in float64 over blocks."""
        import torch

        rows = self.step.recipe.rows.size  # type: ignore[union-attr]
        total = torch.zeros(self.columns, dtype=torch.float64)
        for start in range(0, rows, limit := max(1, BLOCK // self.columns)):
            total += self.rows(start, min(start + limit, rows)).double().sum(0)
        return (total / rows).to(self.dtype)


def _block(step: Step, plan: Plan, source: _Source, part: int, run: Run) -> torch.Tensor:
    from lemonx import noise

    assert isinstance(step.recipe, Matrix)
    read = Reader(partial(source.rows, further=run.copy > 0), source.mean)
    return expand_block(run, step.recipe, read, plan.free, noise.generator(plan.seed, step.name, part))


def _write_block(
    step: Step, plan: Plan, source: _Source, writer: CheckpointWriter, tell: Progress, part: int, run: Run
) -> None:
    block = _block(step, plan, source, part, run)
    lead = step.shape[0] if step.shape else 1
    if lead == source.step.recipe.rows.target_size:  # type: ignore[union-attr]
        writer.write(step.name, run.target, block.reshape(run.length, *step.shape[1:]))
    else:
        writer.write(step.name, 0, block.reshape(step.shape))
    tell(block.nbytes)


def _write_transposed(step: Step, plan: Plan, checkpoint: Checkpoint, writer: CheckpointWriter, tell: Progress) -> None:
    """A weight kept as (in, out): turned round, expanded as any other, and turned back."""
    import torch

    from lemonx.checkpoints.safetensors_file import torch_dtype

    assert isinstance(step.recipe, Matrix)
    turned = _Turned(checkpoint, step, torch_dtype(step.dtype), step.recipe.columns.size, 1.0)
    parts = [_block(step, plan, turned, part, run) for part, run in enumerate(blocks(step.recipe.rows, BLOCK))]
    whole = torch.cat(parts).T.contiguous()
    writer.write(step.name, 0, whole.reshape(step.shape))
    tell(whole.nbytes)


@dataclass(frozen=True)
class _Turned(_Source):
    def rows(self, start: int, stop: int, *, further: bool = False) -> torch.Tensor:
        name = self.step.appended if further and self.step.appended else self.step.source
        whole = self.checkpoint.read(name)
        return self._matrix(whole.reshape(self.columns, -1).T.contiguous())[start:stop]


def _write_vector(step: Step, plan: Plan, checkpoint: Checkpoint, writer: CheckpointWriter, tell: Progress) -> None:
    import torch

    from lemonx import noise
    from lemonx.checkpoints.safetensors_file import torch_dtype

    assert isinstance(step.recipe, Vector)
    recipe, expansion = step.recipe, step.recipe.expansion
    source = checkpoint.read(step.source)
    if source.is_floating_point() and not source.isfinite().all():
        raise BadCheckpoint(f"{step.source} holds NaN or Inf: the source model is broken")
    if not source.is_floating_point():
        result = source
    else:
        values = source.reshape(-1).double().numpy()
        if recipe.constant is not None:
            values = np.full_like(values, recipe.constant)
        values = values[np.maximum(expansion.source, 0)] * recipe.factor
        result = torch.from_numpy(values)
        free = torch.from_numpy(expansion.source < 0)
        if recipe.fill and bool(free.any()):
            zeta = torch.empty(int(free.sum()), dtype=torch.float64)
            bound = recipe.fill * plan.free.norm_zeta
            result[free] = noise.uniform(zeta, bound, noise.generator(plan.seed, step.name, 0))
        result = result.to(torch_dtype(step.dtype)).reshape(step.shape)
    writer.write(step.name, 0, result)
    tell(result.nbytes)


def _check_tied(plan: Plan, checkpoint: Checkpoint) -> None:
    """A file may repeat a tied weight; were it another weight, leaving it out would lose it."""
    for name, row in plan.tied.items():
        original = next(step.source for step in plan.steps if step.row == row)
        rows = plan.tensors[name].shape[0]
        limit = max(1, BLOCK // plan.tensors[name].shape[-1])
        for start in range(0, rows, limit):
            stop = min(start + limit, rows)
            if not checkpoint.read(name, start, stop).equal(checkpoint.read(original, start, stop)):
                raise BadCheckpoint(
                    f"config.json ties {name} to {original}, but the file holds two different weights: "
                    "set tie_word_embeddings to false in config.json, as transformers reads it"
                )
