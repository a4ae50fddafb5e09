"""The file beside a checkpoint with what its silent blocks are to write with: ramp.safetensors.

An added block of type 1 writes nothing: its writers are zero on disk. In a full copy of the block they would be those
of its origin, expanded as all others. The file holds the difference between the two, by the names of the tensors, so
that training can add it with a weight from 0 to 1 (training/ramp.py). With the weight 1 the block is a full copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lemonx.algebra.recipes import Vector
from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.folder import RAMP, WEIGHTS
from lemonx.checkpoints.opening import file_inside
from lemonx.checkpoints.temporary import Temporary
from lemonx.execution.runner import Sink, run_plan
from lemonx.planning.plan import Plan

# Larger than any file: a ramp is one file.
_ONE_FILE = 1 << 62


def write_ramp(plan: Plan, checkpoint: Checkpoint, writer: CheckpointWriter, *, threads: int | None = None) -> None:
    """Add the file to a checkpoint that is being written."""
    silent = _Held()
    opened = {step.name for step in plan.ramp}
    # A norm's gain that is silent need not be 0 on disk: some files keep it less 1.
    vectors = tuple(step for step in plan.steps if step.name in opened and isinstance(step.recipe, Vector))
    if vectors:
        run_plan(replace(plan, steps=vectors, tied={}), checkpoint, silent, threads=1)
    entries = [(step.name, step.dtype, step.shape) for step in plan.ramp]
    with Temporary() as folder:
        with CheckpointWriter(folder / "ramp", entries, max_shard_size=_ONE_FILE, kept=False) as aside:
            run_plan(replace(plan, steps=plan.ramp, tied={}), checkpoint, _Less(aside, silent.tensors), threads=threads)
        with file_inside(folder / "ramp", WEIGHTS) as file:
            writer.add_file(file, RAMP)


class _Held:
    """Keeps small tensors, which are written whole, in memory."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        self.tensors[name] = values.clone()


class _Less:
    """Passes tensors on, less what is there already."""

    def __init__(self, sink: Sink, there: dict[str, torch.Tensor]) -> None:
        self._sink, self._there = sink, there

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        there = self._there.get(name)
        self._sink.write(name, start, values if there is None else values - there, column)
