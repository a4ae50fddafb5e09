"""A pico model as the audit sees it: the record of its run, its file, and the table that is said to describe it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import pico
from auditing.places import Places, Span, axis_of
from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.models import door
from lemonx.planning.plan import Plan
from lemonx.specs.coverage import Matched, match, settled
from lemonx.specs.signature import Side
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Dropped
from lemonx.tracing.axes import Axis, is_data, say
from lemonx.tracing.running import run_traced
from lemonx.tracing.tracer import Tracer
from lemonx.verification.blocks import modules_of, tensors_by_block
from lemonx.verification.float64 import Float64

# What a fact begins with that says why an axis is fixed.
BECAUSE = "because "


@dataclass(frozen=True)
class Difference:
    """What table and trace do not agree on. `of`: the space, the row or the block that it is about."""

    check: str
    of: str
    table: str
    trace: str

    def __str__(self) -> str:
        return f"{self.check}, {self.of}: the table says {self.table}; the trace says {self.trace}"


@dataclass(frozen=True)
class Said:
    """What a table says of one axis of a tensor in the file: `role` as rows have it."""

    hit: Matched
    number: int
    side: Side
    role: str
    parameter: str
    place: int
    axis: Axis


def run(model: Any, batch: Mapping[str, torch.Tensor]) -> list[Any]:
    """One call. What leaves the model may grow: a table's growth is judged by the first units of the outputs."""
    taken = inspect.signature(model.forward).parameters
    more = {"use_cache": False} if "use_cache" in taken else {}
    with Float64():
        model(**batch, **more)
    return []


class Reasons(Tracer):
    """The record of a run, with every reason for which an axis is fixed: a tracer keeps the first alone."""

    def fix(self, axis: Axis | None, reason: str) -> None:
        super().fix(axis, reason)
        if axis is not None and not is_data(axis):
            say(axis, BECAUSE + reason, self.why(reason))


def traced(
    model: PreTrainedModel,
    batch: Mapping[str, torch.Tensor],
    follows: Callable[[str], list[torch.Tensor]] | None = None,
) -> Tracer:
    """The record of a run of the model; `follows`: what another one decided in a module, as in Tracer."""
    tracer = Reasons(model)
    tracer.follows = follows
    return run_traced(tracer, model, lambda module: run(module, batch))


@dataclass
class Subject:
    """A model, its trace and its table."""

    model: PreTrainedModel
    batch: Mapping[str, torch.Tensor]
    tracer: Tracer
    config: dict[str, JsonValue]
    spec: Spec
    hits: list[Matched]
    tensors: dict[str, torch.Tensor]

    @cached_property
    def places(self) -> Places:
        state = self.model.state_dict(keep_vars=True)
        return Places({name: state[name].detach().double().numpy() for name in self.tracer.parameters})

    @cached_property
    def parameters(self) -> dict[str, str]:
        """The parameter that every tensor of the file is, or begins in."""
        return {name: self.places.parameter(tensor.double().numpy()) for name, tensor in self.tensors.items()}

    @cached_property
    def spans(self) -> dict[tuple[str, int], list[Span]]:
        """Where every axis of more than one entry stands, by the tensor in the file and the axis."""
        return {
            (name, axis): self.places.spans(tensor.double().numpy(), axis)
            for name, tensor in self.tensors.items()
            for axis in range(tensor.ndim)
            if tensor.shape[axis] > 1
        }

    @cached_property
    def stored(self) -> set[str]:
        """The parameters that the file holds, whole or in part."""
        inside = {span.parameter for spans in self.spans.values() for span in spans}
        return inside | set(self.parameters.values())

    @cached_property
    def said(self) -> list[Said]:
        """What the table says of every axis of more than one entry."""
        axes = {name: info.axes for name, info in self.tracer.parameters.items()}
        found = []
        for hit in self.hits:
            for number, axis in enumerate(self.spec.rows[hit.row].tensors()[hit.suffix]):
                spans = self.spans.get((hit.name, number), [])
                traced = axis_of(spans, axes)
                if traced is not None:
                    found.append(Said(hit, number, axis.side, axis.role, spans[0].parameter, spans[0].axis, traced))
        return found

    @cached_property
    def blocks(self) -> dict[tuple[str, int], str]:
        """The path of every block's module."""
        return block_paths(self.model, self.spec, [hit.name for hit in self.hits])


def block_paths(model: PreTrainedModel, spec: Spec, names: list[str]) -> dict[tuple[str, int], str]:
    """The path of every block's module in a model."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = modules_of(model, tensors_by_block(spec, names))
    return {block: paths[id(module)] for block, module in found.items()}


def subject(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], folder: Path, change: Callable[[Spec], Spec]
) -> Subject:
    """A model, traced, and saved to a folder as users save theirs; `change`: what is done to its table first."""
    _fill(model)
    tracer = traced(model, batch)
    pico.save(model, folder)
    with Checkpoint.open(folder) as checkpoint:
        config = dict(checkpoint.config)
        spec = change(architectures.find(config).spec(config))
        hits = match(spec, checkpoint.tensors)
        spec = settled(spec, hits)
        hits = [hit for hit in hits if not isinstance(spec.rows[hit.row], Dropped)]
        tensors = {hit.name: checkpoint.read(hit.name) for hit in hits}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    return Subject(model, batch, tracer, config, spec, [hit for hit in hits if hit.name in tensors], tensors)


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    """Buffers that are learned state and begin as zeros get numbers of their own too."""
    generator = torch.Generator().manual_seed(3)
    for buffer in (tensor for name, tensor in model.named_buffers() if name == "final_logits_bias"):
        buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64))


def larger(plan: Plan) -> PreTrainedModel:
    """The model that a plan leads to, with other numbers."""
    config = door.config_object(plan.target_config)
    with torch.random.fork_rng(devices=[]):
        model: Any = door.build(door.model_class(config), config).double().eval()
    pico.randomise(model, seed=5)
    return model
