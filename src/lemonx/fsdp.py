"""Expands a checkpoint straight into a model that many processes share: none of them reads, or holds, the whole.

A model under FSDP2 (`fully_shard`) keeps a slice of the first axis of every tensor in each process. A process makes
the blocks that its slices lie in, from the source rows of these blocks, by the code that writes folders; a block's
noise belongs to its tensor and number. So the model is, bit for bit, what `lemonx expand` would have written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lemonx import api, methods
from lemonx.algebra.recipes import SILENT, Vector
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.errors import BadTarget, Refused
from lemonx.execution.row_readers import blocks_within, is_whole, source_rows
from lemonx.execution.runner import everything, run_plan
from lemonx.models.building import compute_buffers
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.specs.config import flat_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_expanded(
    model: PreTrainedModel, source: str | Path, *, threads: int | None = None, **options: Any
) -> PreTrainedModel:
    """Fill a model of the target's sizes, sharded or not, with the expansion of a checkpoint; every rank calls it.

    `options` are those of `lemonx.expand`, without those that say how to write; a model may hold what is made in
    bfloat16 as float32. Build it from `plan(source, **options).target_config` on the meta device, and call `to_empty`
    after `fully_shard`.
    """
    plan = api.plan(source, solve=True, **options)
    if methods.find(plan.policy.method).make is not None:
        raise Refused(f"{plan.policy.method} makes its model whole", "write it with lemonx expand, and load that")
    _check_config(model, plan)
    held = {name: _part(name, tensor) for name, tensor in tensors_on_disk(model).items()}
    _check_tensors(held, plan)
    with Checkpoint.open(source) as checkpoint:
        run_plan(plan, checkpoint, _Shards(held), wanted=lambda step: held[step.name].rows, threads=threads)
    compute_buffers(model)
    return model


def _check_config(model: PreTrainedModel, plan: Plan) -> None:
    """The model has the sizes and the eps that the plan gives the target: tensors alone do not show the eps."""
    old = flat_fields(plan.source_config)
    for field, value in flat_fields(plan.target_config).items():
        mine = reduce(lambda config, part: getattr(config, part, None), field.split("."), model.config)
        if value != old.get(field) and field not in ("dtype", "torch_dtype") and mine != value:
            raise BadTarget(
                f"the model has {field} = {mine}, but the expansion has {value}", "build it from the target's config"
            )


@dataclass(frozen=True)
class _Part:
    """What this process holds of a tensor: some rows of its first axis, and where they are kept."""

    shape: tuple[int, ...]
    rows: range
    local: torch.Tensor


@dataclass(frozen=True)
class _Shards:
    """Takes rows of whole tensors and keeps those that this process holds."""

    held: Mapping[str, _Part]

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        part = self.held[name]
        values, local = (values, part.local) if part.shape else (values.reshape(1), part.local.reshape(1))
        low, high = max(start, part.rows.start), min(start + len(values), part.rows.stop)
        if low < high:
            local = local[low - part.rows.start : high - part.rows.start]
            local[..., column : column + values.shape[-1]].copy_(values[low - start : high - start])


def _part(name: str, tensor: torch.Tensor) -> _Part:
    shape = tuple(tensor.shape)
    if tensor.is_meta:
        raise BadTarget(f"{name} is on the meta device", "call model.to_empty(device=...) first")
    if not isinstance(tensor, DTensor):
        return _Part(shape, range(shape[0] if shape else 1), tensor.detach())
    # Exact types: a strided shard (FSDP over tensor parallelism) is a subclass, and its rows are not one slice.
    if any(type(p) is not Replicate and not (type(p) is Shard and p.dim == 0) for p in tensor.placements):
        raise Refused(
            f"{name} is placed as {list(tensor.placements)}, and lemonx can only fill slices of the first axis",
            "shard with FSDP2 and without tensor parallelism",
        )
    return _Part(shape, local_rows(tensor), tensor.to_local().detach())


def local_rows(tensor: torch.Tensor) -> range:
    """The rows of a DTensor's first axis that this process holds."""

    assert isinstance(tensor, DTensor)
    local, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return range(offset[0], offset[0] + local[0])


def tensors_on_disk(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every tensor that `save_pretrained` would write, by its name on disk; tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    seen, mine = set[int](), dict[str, torch.Tensor]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            mine[name] = tensor
    # Empty stand-ins go through transformers' renaming: what is renamed comes out as the same object.
    standing = {name: torch.empty(tensor.shape, device="meta") for name, tensor in mine.items()}
    original = {id(empty): name for name, empty in standing.items()}
    result = {}
    for name, empty in revert_weight_conversion(model, dict(standing)).items():
        if id(empty) not in original:
            raise Refused(
                f"{type(model).__name__} stores {name} in another form than its file does",
                "write the target with lemonx expand, and load that",
            )
        result[name] = mine[original[id(empty)]]
    return result


def _check_tensors(held: Mapping[str, _Part], plan: Plan) -> None:
    steps = {step.name: step for step in plan.steps}
    for name in sorted(steps.keys() ^ held.keys()):
        where = "the expansion" if name in steps else "the model"
        raise BadTarget(f"only {where} has {name}", "build the class that the source's config.json names")
    for name, step in steps.items():
        if held[name].shape != step.shape:
            raise BadTarget(
                f"{name} is {held[name].shape} in the model and {step.shape} in the expansion",
                "build it from the target's config",
            )
        kept, made_in = held[name].local.dtype, torch_dtype(step.dtype)
        if torch.promote_types(kept, made_in) != kept:
            raise BadTarget(f"{name} is {kept} in the model and {made_in} in the expansion", "give another dtype")


# ----------------------------------------------------------------- on paper


@dataclass(frozen=True)
class Share:
    """What one of several processes reads from the source, and what it then holds, in bytes."""

    read: int
    held: int


def shares(plan: Plan, processes: int) -> list[Share]:
    """The share of every process in an expansion under FSDP2, from the plan alone."""
    result = []
    for rank in range(processes):
        parts = [(step, sliced(everything(step), processes, rank)) for step in plan.steps]
        read = sum(bytes_read(plan, step, rows) for step, rows in parts)
        result.append(Share(read, sum(len(rows) * _row_bytes(step) for step, rows in parts)))
    return result


def sliced(rows: range, processes: int, rank: int) -> range:
    """As FSDP2 cuts: slices of equal size, the last ones shorter or empty.

    >>> [sliced(range(9), 4, rank) for rank in range(4)]
    [range(0, 3), range(3, 6), range(6, 9), range(9, 9)]
    """
    size = -(-len(rows) // processes)
    return rows[rank * size : (rank + 1) * size]


def _row_bytes(step: Step) -> int:
    return int(np.prod(step.shape[1:], dtype=np.int64)) * torch_dtype(step.dtype).itemsize


def bytes_read(plan: Plan, step: Step, rows: range) -> int:
    """What the runner reads of the source for these rows of a target tensor."""
    info, how = plan.tensors[step.source], step.recipe
    if not rows:
        return 0
    if isinstance(how, Vector):
        return info.nbytes
    if how.mode == SILENT:
        return 0
    count = info.shape[0] if info.shape else 1
    row_bytes = info.nbytes // count
    if is_whole(step):
        needed = sum(stop - start for start, stop in source_rows(step, count, rows))
        return needed * row_bytes * (2 if step.appended not in (None, step.source) else 1)
    blocks = [run for _, run in blocks_within(step, rows)]
    copied = sum(run.length for run in blocks if run.is_copy)
    mean = count if any(run.needs_every_unit for run in blocks) else 0
    return (copied + mean) * row_bytes
