"""Builds models from a config, with or without weights, and finds the names of their tensors on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, BadTarget, Refused
from lemonx.models import door
from lemonx.models.foreign import foreign, quiet, reason
from lemonx.planning.plan import Plan
from lemonx.planning.summary import bytes_on_disk
from lemonx.specs.config import flat_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Bytes of output that take longer to write than transformers takes to import.
_LONG = 1 << 30


def new_model(config: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A model of the class that a config.json names, as transformers initialises it, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _built(config, "cpu")


def skeleton(config: Mapping[str, Any], kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """The model of a config.json without weights: its parameters have names, shapes and an order, but no memory.

    `kind`: its class, if it is derived from the one that the config names.
    """
    return _built(config, "meta", kind)


def looked_at(config: Mapping[str, Any]) -> PreTrainedModel:
    """`skeleton` for those who only look at it: an expansion asks for the same few again and again."""
    return _kept(json.dumps(dict(config)))


@lru_cache(maxsize=4)
def _kept(config: str) -> PreTrainedModel:
    return skeleton(json.loads(config))


def compute_buffers(model: PreTrainedModel) -> None:
    """Fill the buffers that no file holds (rotary frequencies, masks), as from_pretrained does."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    model.initialize_weights()


def config_fields(config: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Every field of a config.json as transformers reads it, defaults and all."""
    with foreign("read config.json", "save the model again"):
        return flat_fields(door.config_object(config).to_dict())


def _built(config: Mapping[str, Any], device: str, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    with foreign("build the model of config.json", "save it again"):
        made = door.config_object(config)
        return door.build(kind or door.model_class(made), made, device)


def check_builds(plan: Plan, source: Checkpoint, *, verified: bool) -> None:
    """BadTarget if transformers can build the source's config.json but not the target's; checked hours before it must.

    `verified`: the source will be loaded and run too, so everything that this needs is checked. What is not, and is
    written in seconds, does not wait for the import of transformers.
    """
    if not verified and "transformers" not in sys.modules and bytes_on_disk(plan)[1] < _LONG:
        return
    with quiet():
        try:
            looked_at(dict(sorted(plan.target_config.items())))  # as it will be written
        except BadCheckpoint as error:
            try:
                looked_at(plan.source_config)
            except BadCheckpoint as first:
                if verified:
                    remedy = f"{first.remedy}, or expand with --no-verify"
                    raise BadCheckpoint(first.found, remedy, file=first.file) from None
                return
            why = reason(error.__cause__ or error)
            raise BadTarget(f"transformers cannot build a model of these sizes ({why})", "choose other sizes") from None
        if verified:
            door.generation_config(source)  # settings that transformers rejects would have it reject the model


def tensors_on_disk(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What save_pretrained would write, by the names it would write."""
    with Temporary() as folder:
        with quiet():
            model.save_pretrained(folder)
        with Checkpoint.open(folder) as written:
            return {name: written.read(name) for name in written.tensors}


def disk_names(model: PreTrainedModel, *, buffers: bool = False) -> dict[str, str]:
    """Module name -> name on disk of every parameter, in the model's order; tied parameters stand once.

    transformers renames tensors when it saves; a marker in place of each parameter shows how. `buffers`: include the
    buffers that are saved.
    """
    names = [name for name, _ in model.named_parameters()]
    if buffers:
        names += [name for name, _ in model.named_buffers() if name in model.state_dict()]
    try:
        marked = _reverted(model, names, [torch.tensor(i) for i in range(len(names))])
        found = {names[int(marker)]: name for name, marker in marked.items()}
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
        found = {}
    if sorted(found) != sorted(names):
        raise Refused(
            f"{type(model).__name__} stores parameters in other shapes than it computes with, which neither "
            "optimizer state nor a method that learns can follow",
            "expand without --with-optimizer and with another --method",
        )
    return {name: found[name] for name in names}


def held_in(model: PreTrainedModel) -> dict[str, list[str]]:
    """Module name of every parameter -> the names of the tensors on disk that hold it: several, for fused experts.

    A stand-in for each parameter has its shape, repeats its number and takes no memory.
    """
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for _, parameter in model.named_parameters()]
    marked = [torch.tensor(i).expand(shape) for i, shape in enumerate(shapes)]
    found: dict[str, list[str]] = {name: [] for name in names}
    for disk, marker in _reverted(model, names, marked).items():
        same = marker.numel() == 1 or not any(marker.stride())
        numbers = [int(marker.flatten()[0])] if same else torch.bincount(marker.flatten()).nonzero().flatten().tolist()
        for number in numbers:
            found[names[number]].append(disk)
    return found


def stored_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that save_pretrained would write, by the name it would write."""
    named = dict(model.named_parameters())
    tensors = [torch.zeros((), dtype=torch.bool).expand(parameter.shape) for parameter in named.values()]
    return {name: tuple(tensor.shape) for name, tensor in _reverted(model, list(named), tensors).items()}


def stored_as(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What save_pretrained would write for one parameter: several tensors, for fused experts."""
    return _reverted(model, [name], [tensor])


def _reverted(model: PreTrainedModel, names: list[str], tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by module name, renamed, split and joined as transformers does when it saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    # A head that stands before the embedding gives a tied parameter its name in the model, but not on disk.
    tied: dict[str, str] = model.all_tied_weights_keys or {}
    saved = [tied[name] if tied.get(name, name) not in names else name for name in names]
    return revert_weight_conversion(model, dict(zip(saved, tensors, strict=True)))
