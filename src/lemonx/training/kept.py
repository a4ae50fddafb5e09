"""Training only what was added (`train: new`): the entries that hold the source's numbers stay as they are.

Which these are follows from the plan that made the checkpoint (planning/source_entries.py), not from names. They get no
gradient, so neither the clipping nor a moment sees them, and after every update they are put back, so that neither
weight decay nor an optimizer that mixes the rows of a matrix changes a bit. `lemonx shrink` reads the source out of the
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.errors import BadRecipe, Refused
from lemonx.execution.shrinking import mark
from lemonx.models.held import Held
from lemonx.options.declared import Table
from lemonx.planning.source_entries import source_entries
from lemonx.verification.certificate import grown_from, parse_grown
from lemonx.workflows.shrinking import recovered_plan


class SourceEntries:
    """The entries of an expanded checkpoint that hold its source's numbers, by the names of its tensors.

    `record`: what `lemonx shrink` needs to know of the growth, for the run.json of a run that keeps them; a run that
    goes on has it there already.
    """

    def __init__(self, folder: Path, record: Mapping[str, JsonValue] | None = None) -> None:
        with Checkpoint.open(folder) as large:
            grown = grown_from(large) if record is None else parse_grown(record, folder, trained=True)
            with recovered_plan(large, grown, Table()) as (plan, _):
                found = source_entries(plan, sums=False)
        self.marks = {held.step.name: mark(held) for held in found.values()}
        self.dtypes = {held.step.name: torch_dtype(held.step.dtype) for held in found.values()}
        self.record: Mapping[str, JsonValue] = grown.record


class KeepSource(TrainerCallback):
    """Keeps the source's numbers in a model while everything else of it is trained.

    `folder`: what `lemonx expand --free inside` wrote. Make it before the optimizer, and give it to Trainer, or call
    `put_back` after every update of a loop of your own.

        keep = KeepSource(model, "large")
        trainer = Trainer(model, args, train_dataset=..., callbacks=[keep])
    """

    def __init__(self, model: PreTrainedModel, folder: str | Path | SourceEntries) -> None:
        entries = folder if isinstance(folder, SourceEntries) else SourceEntries(Path(folder))
        self._kept: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []
        for parameter, marks in _matched(model, entries):
            if bool(marks.all()):
                parameter.requires_grad_(False)
            elif bool(marks.any()):
                parameter.register_hook(
                    lambda gradient, marks=marks: gradient.masked_fill(marks.to(gradient.device), 0)
                )
            self._kept.append((parameter, marks, parameter.detach()[marks].clone()))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise BadRecipe("nothing was added that could be trained", "expand it first, or leave `train: new` out")

    @property
    def entries(self) -> int:
        """How many numbers stay as they are."""
        return sum(values.numel() for _, _, values in self._kept)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """After the update, before anything looks at the model."""
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """For a loop of your own: call it after every update."""
        for parameter, marks, values in self._kept:
            if parameter.requires_grad:
                parameter[marks] = values.to(parameter.device)


def _matched(model: PreTrainedModel, entries: SourceEntries) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """The parameters of a model with what is marked of each."""
    held, parameters = Held(model), dict(model.named_parameters())
    buffers = {name for name, _ in model.named_buffers()}
    for disk, marked in entries.marks.items():
        name = held.holder(disk, marked.shape)
        if name is None and disk in buffers:
            raise Refused(f"{disk} is a statistic, which changes without a gradient", "train all of it")
        if name is None:
            raise BadRecipe(f"the model has no {disk[:80]} of this shape", "train the checkpoint that was expanded")
        trained, stored = parameters[name].dtype, entries.dtypes[disk]
        if torch.promote_types(trained, stored) != trained:
            raise Refused(
                f"{disk[:80]} is stored as {_name(stored)} and trained as {_name(trained)}, which rounds the source's "
                "numbers",
                f"load the model as {_name(stored)}, or store it in float32 before it is expanded",
            )
    return [(parameters[name], marks.to(parameters[name].device)) for name, marks in held.laid_out(entries.marks)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
