"""New models of a config, and what their tensors are called on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint
from lemonx.verification.loading import model_class, quiet

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def new_model(config: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A model of the class that a config.json names, as transformers initialises it, in float32."""
    import torch
    from transformers import AutoConfig

    from lemonx import models

    models.register()
    values = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    try:
        made = AutoConfig.for_model(config["model_type"], **values)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class(made)._from_config(made, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadCheckpoint(f"transformers cannot build a {config['model_type']!r} of these sizes: {reason}") from error
    return model


def tensors_on_disk(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What save_pretrained would write, by the names it would write."""
    with _saved(model) as written:
        return {name: written.read(name).clone() for name in written.tensors}


def names_on_disk(model: PreTrainedModel) -> dict[str, str]:
    """Name on disk -> name in the model. Found by marking every tensor: transformers renames some when it saves.

    A tensor that transformers splits or joins on its way to disk has no such name: BadCheckpoint.
    """
    import torch

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: tensor.detach().clone() for name, tensor in state.items()}
    try:
        with torch.no_grad():
            for mark, tensor in enumerate(state.values()):
                tensor.fill_(mark)
        marked = {name: tensor.flatten()[0].item() for name, tensor in tensors_on_disk(model).items()}
    finally:
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(kept[name])
    names = list(state)
    found = {name: names[int(mark)] for name, mark in marked.items()}
    if len(set(found.values())) != len(found):
        twice = next(n for n in found.values() if list(found.values()).count(n) > 1)
        raise BadCheckpoint(f"transformers keeps {twice} as several tensors on disk: this method needs them one to one")
    return found


@contextmanager
def _saved(model: PreTrainedModel) -> Iterator[Checkpoint]:
    with tempfile.TemporaryDirectory() as folder, quiet():
        model.save_pretrained(folder)
        with Checkpoint.open(Path(folder)) as written:
            yield written
