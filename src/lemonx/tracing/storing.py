"""A module's tensors as a checkpoint, under the names and in the layout of an inferred table, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.safetensors_file import dtype_name
from lemonx.errors import NotVerified, Refused
from lemonx.tracing.blocks import LARGE, SMALL, starred, to_list, to_stack
from lemonx.tracing.table import Held, Table

# All in one file: these folders are gone again when the module is filled.
ONE_SHARD = 1 << 40


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that a state dict holds, once, by its first name."""
    found = {}
    for name, first, tensor in _named(module):
        if name == first:
            found[name] = tensor.detach()
    return found


def _named(module: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every name of a tensor in a state dict, with its first one."""
    seen: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            yield name, seen.setdefault(id(tensor), name), tensor


def require_own(module: torch.nn.Module, table: Table) -> None:
    """Raise Refused if blocks of a list that is to be longer share a tensor: those that are added cannot differ."""
    longer = {name for name, stack in table.small.stacks.items() if stack.size != table.large.stacks[name].size}
    for name, first, _ in _named(module):
        one, two = (_general(table, to_stack(each, table.stacks, SMALL)) for each in (name, first))
        if one != two and one[0] == two[0] and any(one[0].startswith(f"{stack}.*") for stack in longer):
            raise Refused(
                f"{name} and {first} are one tensor, and blocks that are added need their own",
                "keep the depth, or give every block its own",
            )


def floating(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of them that are learned."""
    return {name: tensor for name, tensor in tensors(module).items() if tensor.is_floating_point() and tensor.numel()}


def held_by(table: Table, name: str, side: int = LARGE) -> tuple[str, Held]:
    """The parameter of the larger model behind a tensor of the table, or of the smaller, and how it lies there."""
    general, number = _general(table, name)
    held = table.held[general]
    return to_list(held.parameter.replace("*", number, 1), table.stacks, side), held


def save(module: torch.nn.Module, table: Table, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the learned tensors of a module as a checkpoint."""
    places: dict[str, list[tuple[str, Held]]] = {}
    for key, held in table.held.items():
        places.setdefault(held.parameter, []).append((key, held))
    entries: dict[str, torch.Tensor] = {}
    for name, tensor in floating(module).items():
        general, number = _general(table, to_stack(name, table.stacks, SMALL))
        for key, held in places.get(general, ()):
            made = _view(tensor, held)
            entries[key.replace("*", number, 1)] = made.reshape(_shape(made, held)).cpu().contiguous()
    infos = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in entries.items()]
    with CheckpointWriter(folder, infos, max_shard_size=ONE_SHARD) as writer:
        for name, tensor in entries.items():
            writer.write(name, 0, tensor)
        writer.add_text("config.json", json.dumps(dict(config)))


def filled(module: torch.nn.Module, table: Table, names: Iterable[str], target: Checkpoint) -> torch.nn.Module:
    """A module, now with these tensors of a checkpoint, which must be all that it learned."""
    places = floating(module)
    missing = set(places)
    with torch.no_grad():
        for tensor in names:
            name, held = held_by(table, tensor)
            place = _view(places[name], held)
            place.copy_(target.read(tensor).reshape(place.shape))
            missing.discard(name)
    if missing:
        raise NotVerified(f"{min(missing)} of the larger module was not filled", "please report this module")
    return module


def _general(table: Table, name: str) -> tuple[str, str]:
    return starred(name, {stack: blocks.pinned for stack, blocks in table.small.stacks.items()})


def _view(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    """A parameter with its axes in the order of the table."""
    return tensor.permute(held.order) if held.order else tensor


def _shape(tensor: torch.Tensor, held: Held) -> tuple[int, ...]:
    """The shape of a parameter in the table: where it reads several axes, or writes them, a matrix."""
    if not held.columns:
        return tuple(tensor.shape)
    rows = tensor.dim() - held.columns
    return math.prod(tensor.shape[:rows]), math.prod(tensor.shape[rows:])
