"""A ramp: the copied output weights of added blocks come in over the first steps of training.

`lemonx expand --free '{ramp: true}'` leaves them in ramp.safetensors, and zeros in the checkpoint. A weight w of an
added block is then w + g(s) c after s steps, with c from the file and g from 0 to 1: the first step sees the source's
function, and after the ramp the block is a full copy, whatever it has learned besides. Before each step the model gets
the part of c by which g grew, so that its weights are always those that it computes with: a checkpoint needs no other
file than this one to go on, a run that is killed inside the ramp continues as if it had not been, and at the end
nothing is left to fold in. (In a model that is itself in bfloat16 or float16 a checkpoint lacks what rounding has left
out so far, less than a unit in the last place of every weight.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lemonx.checkpoints.folder import RAMP
from lemonx.checkpoints.opening import file_inside
from lemonx.errors import BadCheckpoint, BadRecipe
from lemonx.models.held import Held

AGAIN = "expand with --free '{ramp: true}'"


def weight_at(step: int, steps: int) -> float:
    """The weight of the copied writers in the update after `step` updates.

    >>> [weight_at(step, 4) for step in (-1, 0, 1, 4, 9)]
    [0.0, 0.0, 0.25, 1.0, 1.0]
    """
    return min(1.0, max(0.0, step / steps))


@dataclass
class _Part:
    """A parameter, and what is to be added to it in small steps.

    In bfloat16 and float16 a step is often less than what separates two numbers there, and would be lost. What rounding
    has left out is carried to the next step, so that the whole arrives.
    """

    parameter: torch.nn.Parameter
    copied: torch.Tensor
    carried: torch.Tensor | None

    def add(self, share: float) -> None:
        if self.carried is None:
            self.parameter.add_(self.copied, alpha=share)
            return
        whole = self.carried.add_(self.copied, alpha=share).add_(self.parameter)
        self.parameter.copy_(whole)
        whole.sub_(self.parameter)


class RampCallback(TrainerCallback):
    """Opens the added blocks of a model over `steps` steps of transformers' Trainer, from step `start` on.

    `folder`: an expansion with a ramp, or its ramp.safetensors. The ramp is added to the weights of the model that is
    trained, so load that model from the same folder. When you resume inside the ramp, load the model from the
    checkpoint and give the callback again: of some experts Trainer itself does not restore what a checkpoint holds.

        trainer = Trainer(model, args, train_dataset=..., callbacks=[RampCallback("large", steps=100)])
    """

    def __init__(self, folder: str | os.PathLike[str], steps: int, *, start: int = 0) -> None:
        if steps < 1 or start < 0:
            raise ValueError("a ramp has at least one step, and starts at step 0 or later")
        self.file, self.steps, self.start = _file(Path(folder)), steps, start
        self._parts: list[_Part] = []
        self._model: PreTrainedModel | None = None
        self._opened: PreTrainedModel | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Find the parameters that the file is for."""
        if self._opened is model and state.global_step <= self.start:
            raise BadRecipe("the ramp of this model is open already", "leave the callback out of its next training")
        self.begin(model)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add what the weight has grown by since the step before."""
        self.before(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._parts = []

    def begin(self, model: PreTrainedModel) -> None:
        """For a loop of your own: find the parameters of the model that the file is for."""
        self._model, self._parts = model, _matched(model, _read(self.file), self.file)

    @torch.no_grad()
    def before(self, step: int) -> None:
        """For a loop of your own: call it before the update after `step` updates."""
        here = step - self.start
        grown = weight_at(here, self.steps) - weight_at(here - 1, self.steps)
        for part in self._parts if grown else ():
            part.add(grown)
            self._opened = self._model


def _file(path: Path) -> Path:
    found = path / RAMP if path.is_dir() else path
    if not found.is_file():
        raise BadCheckpoint(f"has no {RAMP}", AGAIN, file=path)
    return found


def _read(file: Path) -> Mapping[str, torch.Tensor]:
    with file_inside(file.parent.resolve(), file.name) as opened:
        try:
            return load(opened.read())
        except SafetensorError as error:
            raise BadCheckpoint(f"is not a file of tensors ({error})", AGAIN, file=file) from None


def _matched(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], file: Path) -> list[_Part]:
    """The parameters of a model and what is to be added to each."""
    held, parameters, found = Held(model), dict(model.named_parameters()), []
    for disk, copied in tensors.items():
        if held.holder(disk, copied.shape) is None:
            raise BadCheckpoint(f"holds {disk[:80]}, which the model has not, or not in this shape",
                                "train the checkpoint that the file came with", file=file)  # fmt: skip
        if not bool(copied.isfinite().all()):
            raise BadCheckpoint(f"{disk[:80]} holds NaN or Inf", AGAIN, file=file)
    for name, copied in held.laid_out(tensors):
        parameter = parameters[name]
        is_short = parameter.dtype.itemsize < torch.float32.itemsize
        added = copied.to(parameter.device, torch.float32 if is_short else parameter.dtype)
        found.append(_Part(parameter, added, torch.zeros_like(added) if is_short else None))
    return found
