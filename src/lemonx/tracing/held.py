"""What a module holds when its run begins: a forward may change buffers, and even parameters, and a trace must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def storage(tensor: torch.Tensor) -> int:
    """What tells the memory of a tensor from any other that is in use."""
    return tensor.untyped_storage()._cdata


class Held:
    """The parameters and buffers of a module, and the numbers of those that were changed, from before."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._own = {storage(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._before: dict[int, torch.Tensor] = {}

    def keep(self, arguments: Sequence[Any], args: tuple[Any, ...]) -> None:
        """Keep the numbers of what an operation is about to change."""
        for argument, tensor in zip(arguments, args, strict=False):
            if isinstance(tensor, torch.Tensor) and argument.alias_info and argument.alias_info.is_write:
                key = storage(tensor)
                if key in self._own and key not in self._before:
                    with _disable_current_modes():
                        self._before[key] = self._own[key].detach().clone()

    def put_back(self) -> None:
        """Undo all changes."""
        with torch.no_grad():
            for key, before in self._before.items():
                self._own[key].copy_(before)
        self._before.clear()
