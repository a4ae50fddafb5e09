"""Expands a checkpoint straight into a model that many processes share: none of them reads, or holds, the whole.

A process holds some rows, and perhaps only some columns, of every tensor. It makes the blocks of rows that these lie
in, from the source rows of these blocks and from the columns that are needed, by the code that writes folders; a
block's noise belongs to its tensor and number. So the model is, bit for bit, what `lemonx expand` would have written,
and nothing is sent from one process to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lemonx import methods
from lemonx.algebra.recipes import SILENT, Vector
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.errors import BadTarget, Refused
from lemonx.execution.held import Held, HeldSink, held_of
from lemonx.execution.row_readers import (
    blocks_within,
    is_whole,
    needed_columns,
    sampled_rows,
    source_rows,
    takes_spread,
)
from lemonx.execution.runner import everything, run_plan
from lemonx.models.building import compute_buffers
from lemonx.models.module_views import traced
from lemonx.models.sources import open_source
from lemonx.options.declared import PathLike, Planning
from lemonx.options.keywords import keywords
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.specs.config import flat_fields
from lemonx.workflows.planning import plan_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@keywords(Planning)
def load_expanded(
    model: PreTrainedModel, source: PathLike, *, threads: int | None = None, stage: bool = False, options: Planning
) -> PreTrainedModel:
    """Fill a model of the target's sizes, sharded or not, with the expansion of a checkpoint; every rank calls it.

    Parameters may be cut along any axes and copied, over meshes of any number of dimensions: FSDP2, tensor parallelism
    (`parallelize_module`), or both. `stage`: this process has only a part of the model's modules, under their own
    names, as a stage of a pipeline has. `options` are those of `lemonx.expand`, without those that say how to write; a
    model may hold what is made in bfloat16 as float32. Build it from `plan(source, **options).target_config` on the
    meta device, and call `to_empty` after `fully_shard`.
    """
    return fill(model, source, replace(options, solve=True), threads=threads, stage=stage)


def fill(
    model: PreTrainedModel, source: PathLike, options: Planning, *, threads: int | None = None, stage: bool = False
) -> PreTrainedModel:
    """Fill a model with the expansion of a checkpoint: `load_expanded`, its options as one object."""
    plan = plan_source(source, options)
    if methods.find(plan.policy.method).make is not None:
        raise Refused(f"{plan.policy.method} makes its model whole", "write it with lemonx expand, and load that")
    _check_config(model, plan)
    held = held_tensors(model)
    _check_tensors(held, plan, stage)
    nothing = Held((), torch.float32, ())
    with open_source(Path(source), config=options.config) as checkpoint:
        run_plan(
            plan,
            checkpoint,
            HeldSink(held),
            wanted=lambda step: held.get(step.name, nothing).rows,
            columns=lambda step: held[step.name].columns,
            threads=threads,
        )
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


def held_tensors(model: PreTrainedModel) -> dict[str, Held]:
    """What this process holds of every tensor that `save_pretrained` would write, by name on disk; tied ones once."""
    own = model.state_dict(keep_vars=True)
    return {name: held_of(name, part, own[part.key]) for name, (part,) in traced(model).items()}


def tensors_on_disk(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The same tensors themselves; Refused where a parameter holds more than one of them."""
    own, found = model.state_dict(keep_vars=True), {}
    for name, (part,) in traced(model).items():
        found[name] = own[part.key]
        if tuple(found[name].shape) != tuple(part.sizes[axis] for axis in part.axes):
            raise Refused(
                f"{type(model).__name__} stores {name} in another form than its file does",
                "write the target with lemonx expand, and load that",
            )
    return found


def _check_tensors(held: Mapping[str, Held], plan: Plan, stage: bool) -> None:
    steps = {step.name: step for step in plan.steps}
    for name in sorted(held.keys() - steps.keys() if stage else steps.keys() ^ held.keys()):
        where = "the expansion" if name in steps else "the model"
        raise BadTarget(f"only {where} has {name}", "build the class that the source's config.json names")
    for name, step in ((name, steps[name]) for name in held):
        if held[name].shape != step.shape:
            raise BadTarget(
                f"{name} is {held[name].shape} in the model and {step.shape} in the expansion",
                "build it from the target's config",
            )
        kept, made_in = held[name].dtype, torch_dtype(step.dtype)
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


def bytes_read(plan: Plan, step: Step, rows: range, columns: range | None = None) -> int:
    """What the runner reads of the source for these rows, and these columns, of a target tensor."""
    if not rows:
        return 0
    return _rows_read(plan, step, rows, columns) + bytes_sampled(plan, step, rows)


def bytes_sampled(plan: Plan, step: Step, rows: range) -> int:
    """What a process with these rows of a target tensor reads of its source for the size of the noise."""
    info = plan.tensors[step.source]
    if not takes_spread(step, plan.free, rows):
        return 0
    return sum(map(len, sampled_rows(info.shape))) * (info.nbytes // info.shape[0])


def _rows_read(plan: Plan, step: Step, rows: range, columns: range | None) -> int:
    info, how = plan.tensors[step.source], step.recipe
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
    if columns is not None and (needed := needed_columns(step, info.shape, columns)) is not None:
        row_bytes = sum(map(len, needed)) * torch_dtype(info.dtype).itemsize
    return (copied + mean) * row_bytes
