"""Models of a config that no file holds: with weights, or with names and shapes alone; and their names on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, Refused
from lemonx.verification.loading import model_class, quiet

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def new_model(config: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A model of the class that a config.json names, as transformers initialises it, in float32."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _built(config, "cpu")


def skeleton(config: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a config.json without weights: its parameters have names, shapes and an order, and no memory."""
    return _built(config, "meta")


def config_object(config: Mapping[str, Any]) -> Any:
    """A config.json as transformers' own object, with the defaults of its class."""
    from transformers import CONFIG_MAPPING

    from lemonx import models

    models.register()
    if "model_type" not in config:
        config = dict(architectures.find(config).config(config))
    values = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    read = CONFIG_MAPPING[config["model_type"]]
    return read.from_dict(read._decode_special_floats(values))  # JSON has no infinity: transformers spells it


def _built(config: Mapping[str, Any], device: str) -> PreTrainedModel:
    import torch

    try:
        made = config_object(config)
        build = model_class(made)
        with torch.device(device):
            return build.from_config(made) if build.__name__.startswith("Auto") else build(made)
    except (KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadCheckpoint(f"transformers cannot build the model of config.json ({reason}): save it again") from error


def tensors_on_disk(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What save_pretrained would write, by the names it would write."""
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            model.save_pretrained(folder)
        with Checkpoint.open(Path(folder)) as written:
            return {name: written.read(name) for name in written.tensors}


def disk_names(model: PreTrainedModel, *, buffers: bool = False) -> dict[str, str]:
    """Module name -> name on disk of every parameter, in the model's order; tied parameters stand once.

    transformers renames as it saves; it is asked with a marker in each parameter's place. `buffers`: those that are
    saved, too.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    names = [name for name, _ in model.named_parameters()]
    if buffers:
        names += [name for name, _ in model.named_buffers() if name in model.state_dict()]
    # A head that stands before the embedding gives a tied parameter its name in the model, but not on disk.
    tied: dict[str, str] = model.all_tied_weights_keys or {}
    saved = [tied[name] if tied.get(name, name) not in names else name for name in names]
    try:
        marked = revert_weight_conversion(model, {name: torch.tensor(i) for i, name in enumerate(saved)})
        found = {names[int(marker)]: name for name, marker in marked.items()}
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
        found = {}
    if sorted(found) != sorted(names):
        raise Refused(
            f"{type(model).__name__} keeps parameters on disk in other shapes than in memory, and neither optimizer "
            "state nor a method that learns can follow: expand without --with-optimizer, by another --method"
        )
    return {name: found[name] for name in names}
