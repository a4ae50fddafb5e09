"""A module's tensors as a checkpoint, under the names and in the layout of an inferred table, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.store import InMemory
from lemonx.errors import NotVerified, Refused
from lemonx.tracing.blocks import LARGE, SMALL, starred, to_list, to_stack
from lemonx.tracing.table import Held, Table

# What errors name as the place of a module's tensors.
_NOWHERE = Path("module")


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


def opened(module: torch.nn.Module, table: Table, config: Mapping[str, Any]) -> Checkpoint:
    """Return the learned tensors of a module as a checkpoint in memory."""
    places: dict[str, list[tuple[str, Held]]] = {}
    for key, held in table.held.items():
        places.setdefault(held.parameter, []).append((key, held))
    entries: dict[str, torch.Tensor] = {}
    for name, tensor in floating(module).items():
        general, number = _general(table, to_stack(name, table.stacks, SMALL))
        for key, held in places.get(general, ()):
            made = _view(tensor, held)
            entries[key.replace("*", number, 1)] = made.reshape(_shape(made, held)).cpu().contiguous()
    return in_memory(entries, config)


def in_memory(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Checkpoint:
    """Return tensors as a checkpoint, which no folder holds."""
    return Checkpoint(InMemory(config, weights, _NOWHERE), _NOWHERE)


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
