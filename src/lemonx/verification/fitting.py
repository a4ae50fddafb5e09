"""Does config.json fit the weights, and does it build the model? Both are checked without the memory of a model.

A folder: transformers builds whatever config.json describes, and initialises at random what the files lack. A number
with a few zeros too many would take all time and memory. So the sizes are compared first.

A model in memory is expanded by its weights and its config, and by nothing else. An activation that was replaced, an
eps that was set on a norm, a hook or a patched forward are in neither, so the larger model would not have them. The
model that the config builds is made without weights and compared module by module.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.checkpoints.config import is_blocks
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, Refused
from lemonx.guards.limits import MOST_BUFFERS
from lemonx.models.attributes import OWN_HOOKS, bare_class, is_rate, plain_attributes, same
from lemonx.models.building import compute_buffers, looked_at, skeleton
from lemonx.models.foreign import foreign

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Heads and tables that a file need not hold.
_SPARE = 2**20


@names_its_folder
def require_fitting(checkpoint: Checkpoint) -> None:
    """BadCheckpoint if the model that config.json describes is far larger than the files' content."""
    tensors = checkpoint.tensors.values()
    for name, value in _blocks(checkpoint.config):
        if value > 4 * len(tensors) + 64:
            raise BadCheckpoint(
                f"says {name} = {value}, but the files hold {len(tensors)} tensors",
                "take both from the same save",
                file=CONFIG,
            )
    stored, built = sum(info.numel for info in tensors), size(looked_at(checkpoint.config))
    if built > 2 * stored + _SPARE:
        raise BadCheckpoint(
            f"makes a model of {built:,} numbers, but the files hold {stored:,}",
            "take both from the same save",
            file=CONFIG,
        )


def size(model: PreTrainedModel) -> int:
    """Count the numbers of a model; BadCheckpoint if the buffers it computes would fill the memory."""
    buffers = sum(buffer.numel() for buffer in model.buffers())
    if buffers > MOST_BUFFERS:
        raise BadCheckpoint(
            f"makes a model that keeps {buffers:,} numbers beside its weights", "check its positions", file=CONFIG
        )
    return sum(parameter.numel() for parameter in model.parameters())


def _blocks(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers of blocks that a config states, also in its nested parts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _blocks(value)
        elif is_blocks(name) and isinstance(value, int):
            yield name, value


# ----------------------------------------------------------------- a model in memory

# What a run or a loader leaves behind in a module, and switches of training.
_PASSING = frozenset({"gradient_checkpointing", "loss_type", "max_seq_len_cached", "name_or_path"})
# Kept by most classes and read by few: a new token for padding, or more tokens, are said in the config alone.
_KEPT = frozenset({"padding_idx", "vocab_size"})
# Rotary positions of these kinds write the frequencies of the last text over the first ones, and restore them.
_CHANGING = ("dynamic", "longrope")
# How far functions like powers may differ between devices in float32, as a part of their value.
_DEVICES = 1e-6


def require_as_built(model: PreTrainedModel, config: Mapping[str, JsonValue]) -> None:
    """Refused if the model computes anything that its weights and its config, as it is saved, do not say."""
    with foreign("build the model of its config", "make save_pretrained work first"):
        built = skeleton(config)
    for found in _differences(model, built):
        raise Refused(
            f"{found}, and the larger model is built from the config",
            "undo it, or set it in model.config; or use lemonx.grow, which takes a module as it is",
        )


def _differences(model: PreTrainedModel, built: PreTrainedModel) -> Iterator[str]:
    here, there = dict(model.named_modules()), dict(built.named_modules())
    for path, module in here.items():
        name, like = path or type(model).__name__, there.get(path)
        # The model itself may be of a class derived from the one that is built.
        if like is None or not (bare_class(module) is type(like) or (not path and isinstance(module, type(like)))):
            made = "nothing" if like is None else type(like).__name__
            yield f"{name} is {type(module).__name__}, where its config makes {made}"
            continue
        yield from _patches(name, module)
        yield from _attributes(name, module, like)
        yield from _tensors(name, module, like)
    for path in there:
        if path not in here:
            yield f"there is no {path}, which its config makes"
    yield from _unsaved(model, built)


def _patches(name: str, module: torch.nn.Module) -> Iterator[str]:
    """Name the hooks and replaced forwards of a module; hooks of libraries may stay."""
    if "forward" in vars(module) and not _is_autocast(vars(module)["forward"]):
        yield f"{name} has a forward of its own, which was set after it was built"
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not (getattr(hook, "__module__", None) or "").startswith(OWN_HOOKS):
            called = getattr(hook, "__name__", type(hook).__name__)
            yield f"{name} has the hook {called}, which may change what it computes"


def _is_autocast(forward: Any) -> bool:
    """Check that a forward is wrapped only by accelerate's mixed precision, as Trainer does it."""
    wrapped = getattr(getattr(forward, "__func__", forward), "__wrapped__", None)
    return type(wrapped).__name__ == "ConvertOutputsToFp32" and type(wrapped).__module__.startswith("accelerate.")


def _attributes(name: str, module: Any, like: Any) -> Iterator[str]:
    values, others = plain_attributes(module), plain_attributes(like)
    for key, made in others.items():
        if same(values.get(key), made) or key in _PASSING or is_rate(module, key):
            continue
        if key not in _KEPT or _reads(type(like), key):
            yield f"{name} has {key} = {values.get(key)!r}, where its config makes it {made!r}"


def _reads(kind: type, attribute: str) -> bool:
    """Check whether a class's own code names an attribute. Its constructor and common base classes do not count."""
    from transformers import PreTrainedModel

    common = {*PreTrainedModel.__mro__, torch.nn.Embedding}
    written = [vars(base) for base in kind.__mro__ if base not in common]
    functions = [value for names in written for name, value in names.items() if name != "__init__"]
    return any(attribute in names for function in functions for names in _names(inspect.unwrap(function)))


def _names(function: Any) -> Iterator[tuple[str, ...]]:
    code = [getattr(getattr(function, "__func__", function), "__code__", None)]
    while code:
        if (part := code.pop()) is not None:
            yield part.co_names
            code += [inner for inner in part.co_consts if isinstance(inner, types.CodeType)]


def _tensors(name: str, module: torch.nn.Module, like: torch.nn.Module) -> Iterator[str]:
    """Parameters and buffers of the module itself that are not there, are of another shape, or are too many."""
    here, there = ({**m._parameters, **m._buffers} for m in (module, like))
    for key in sorted(here.keys() | there.keys()):
        found, made = (_shape(tensors.get(key)) for tensors in (here, there))
        if found != made:
            yield f"{name}.{key} is {found}, where its config makes it {made}"


def _shape(tensor: torch.Tensor | None) -> str:
    return "no tensor" if tensor is None else f"a tensor of shape {list(tensor.shape)}"


def _unsaved(model: PreTrainedModel, built: PreTrainedModel) -> Iterator[str]:
    """Buffers that are in no file, and that are not what transformers computes for them."""
    names = [name for name, _ in built.named_buffers() if name not in built.state_dict()]
    if not names:
        return
    for name in names:
        path, _, key = name.rpartition(".")
        built.get_submodule(path)._buffers[key] = torch.empty_like(built.get_buffer(name), device="cpu")
    compute_buffers(built)
    for name in names:
        path, _, key = name.rpartition(".")
        kind = str(getattr(built.get_submodule(path), "rope_type", ""))
        if any(word in kind for word in _CHANGING) and not key.startswith("original"):
            continue
        if not _near(model.get_buffer(name).detach().cpu(), built.get_buffer(name)):
            yield f"{name} holds other numbers than its config makes"


def _near(here: torch.Tensor, made: torch.Tensor) -> bool:
    """Check that two tensors are equal in the dtype of the first, or as close as two devices compute them."""
    if not made.is_floating_point():
        return torch.equal(here, made)
    low, high = (made.double() + sign * _DEVICES * made.double().abs() for sign in (-1, 1))
    return bool(((low.to(here.dtype) <= here) & (here <= high.to(here.dtype))).all())
