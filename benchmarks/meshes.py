"""What each of many processes reads, sends and holds in a growth: from the plan, and counted on some of them.

A process holds some rows of every tensor and, under tensor parallelism, only some columns of those that write into the
stream. Counting runs the real expansion of one process over a sparse file with the real header, and keeps nothing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lemonx.planning.plan import Plan
    from lemonx.planning.tensor_steps import Step

# Rows of a weight that tensor parallelism cuts along its last axis: they write what is summed over processes.
BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Mesh:
    """FSDP over `data` processes, times tensor parallelism over `tensor`."""

    data: int
    tensor: int = 1

    @property
    def processes(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"{self.data} FSDP" if self.tensor == 1 else f"{self.data} FSDP x {self.tensor} TP"

    def part(self, step: Step, process: int) -> tuple[range, range]:
        """The rows and the columns of a tensor that a process holds, as torch cuts them."""
        from lemonx.execution.runner import every_column, everything
        from lemonx.fsdp import sliced

        data, tensor = divmod(process, self.tensor)
        rows, columns = everything(step), every_column(step)
        if len(step.shape) < 2:
            columns = range(1) if not step.shape else columns
        elif any(name in step.name for name in BY_COLUMNS):
            columns = sliced(columns, self.tensor, tensor)
        else:
            rows = sliced(rows, self.tensor, tensor)
        return sliced(rows, self.data, data), columns


def on_paper(plan: Plan, mesh: Mesh, process: int) -> tuple[int, int]:
    """Bytes that a process reads, and bytes of the target that it holds."""
    read = held = 0
    for step in plan.steps:
        rows, columns = mesh.part(step, process)
        read += _read(plan, step, rows, columns)
        width = len(columns) if len(step.shape) > 1 else 1
        held += len(rows) * math.prod(step.shape[1:-1]) * width * _size(step.dtype)
    return read, held


def _read(plan: Plan, step: Step, rows: range, columns: range) -> int:
    """As lemonx counts it; blocks of a stack that have the same recipe count the same."""
    from lemonx.fsdp import bytes_read

    info = plan.tensors[step.source]
    recipe: Any = step.recipe
    key = (step.row, id(getattr(recipe, "rows", recipe)), getattr(recipe, "mode", None), step.shape, info.shape)
    known = _known.setdefault(id(plan), {})
    if (key, rows, columns) not in known:
        known[key, rows, columns] = bytes_read(plan, step, rows, columns)
    return known[key, rows, columns]


_known: dict[int, dict[Any, int]] = {}


@cache
def _size(dtype: str) -> int:
    from lemonx.checkpoints.safetensors_file import item_size

    return item_size(dtype)


class _Dropped:
    """A sink that counts the bytes that are made, and keeps none."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, name: str, start: int, values: Any, column: int = 0, /) -> None:
        self.bytes += values.nbytes


def counted(plan: Plan, folder: Path, mesh: Mesh, process: int) -> int:
    """Bytes that the expansion of one process reads, counted at the system call."""
    from lemonx.checkpoints import Checkpoint
    from lemonx.execution.runner import run_plan

    total, real = 0, os.preadv

    def reading(*arguments: Any) -> int:
        nonlocal total
        count = real(*arguments)
        total += count
        return count

    with Checkpoint.open(folder) as checkpoint:
        os.preadv = reading
        try:
            run_plan(
                plan, checkpoint, _Dropped(), threads=1,
                wanted=lambda step: mesh.part(step, process)[0], columns=lambda step: mesh.part(step, process)[1],
            )  # fmt: skip
        finally:
            os.preadv = real
    return total
