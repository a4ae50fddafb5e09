"""Models whose parameters have no memory, and that run all the same.

Parameters are on the meta device, everything that a model computes without them (masks, positions, angles) is real. So
code that looks at such numbers takes the way that it takes in the real model, at the real sizes, and a model of any
size is built and run in seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint
from lemonx.tracing.modes import Mode
from lemonx.tracing.operations import tensors_in

# Functions whose numbers are drawn, or not yet there: whatever they make is a weight.
_WEIGHTS: frozenset[Callable[..., Any]] = frozenset((torch.empty, torch.rand, torch.randn, torch.normal))


class _NoWeights(TorchFunctionMode):
    """What is made to hold weights takes no memory."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _WEIGHTS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def bodiless(most: int) -> Generator[None]:
    """A context in which modules are built with parameters on the meta device; BadCheckpoint if they are too many."""
    before, count = torch.nn.Module.register_parameter, 0

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise BadCheckpoint(f"asks for more than {most} parameters", "correct its sizes", file=CONFIG)
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        before(self, name, param)

    torch.nn.Module.register_parameter = register
    try:
        with _NoWeights():
            yield
    finally:
        torch.nn.Module.register_parameter = before


class Mixed(Mode):
    """Runs operations on tensors with and without memory: what a weight has a part in has none, all else is real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        without = [tensor.is_meta for tensor in tensors_in(args, kwargs)]
        if not any(without) and _on_meta(kwargs.get("device")):
            # A constant that is made, or moved, to where the hidden states are.
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        if any(without) and not all(without):
            args, kwargs = tree_map(_emptied, (_numbered(func, args), kwargs))
        return func(*args, **kwargs)


def _on_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _emptied(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _numbered(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the places that a mask selects in place of the mask, as how many they are is then known."""
    if not func._schema.name.startswith(("aten::index", "aten::_unsafe_index")) or len(args) < 2:
        return args
    if not isinstance(args[1], list | tuple):
        return args
    places: list[Any] = []
    for index in args[1]:
        known = isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.is_meta
        places += index.nonzero(as_tuple=True) if known else [index]
    return (args[0], places, *args[2:])
