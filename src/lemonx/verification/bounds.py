"""Bounds the memory and the work of a run on inputs that lemonx chose.

The length of an input says little about its run: attention over the pixels of a picture takes the fourth power of the
picture's side. So a run is bounded by the entries of the tensors that it makes. The size of each tensor is found on the
meta device before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lemonx.tracing.modes import Mode

# Entries of one tensor, 32 MB in float64, and of all tensors that a run makes, one after the other.
LARGEST, WORK = 2**22, 2**25
# Operations on less make no tensor of more than LARGEST entries: an outer product has the square of its inputs. Whole
# numbers among the arguments may be sizes.
_SMALL = 2**11


class TooMuch(Exception):
    """A run that would make more than was allowed."""


class Bounded(Mode):
    """A context whose operations make at most `largest` entries each and `work` in all; TooMuch if they would.

    >>> with Bounded(largest=100, work=1000):
    ...     torch.ones(20, 20)
    Traceback (most recent call last):
    ...
    lemonx.verification.bounds.TooMuch: aten::ones would make a tensor of 400 entries
    """

    def __init__(self, largest: float = LARGEST, work: float = WORK) -> None:
        super().__init__()
        self.most, self.left = largest, work
        # What was made: the entries of the largest tensor, and of all.
        self.largest, self.work = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation whose result is small enough."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        sizes = math.prod(max(1, abs(leaf)) for leaf in leaves if type(leaf) is int)
        small = 0 < given <= _SMALL and given * sizes <= LARGEST
        if not small:
            self._see(func, _on_meta(func, args, kwargs))
        made = func(*args, **kwargs)
        if small:
            self._see(func, made)
        return made

    def _see(self, func: Any, made: Any) -> None:
        size = max((leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)), default=0)
        self.largest, self.work = max(self.largest, size), self.work + size
        if size > self.most:
            raise TooMuch(f"{func._schema.name} would make a tensor of {size} entries")
        if self.work > self.left:
            raise TooMuch(f"the run would make more than {self.left} entries")


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The sizes that an operation would make; nothing where only numbers tell them."""

    def empty(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    if kwargs.get("device") is not None or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args)):
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        return func(*tree_map(empty, args), **tree_map(empty, kwargs))
    except Exception:  # an operation that looks at numbers, or that the meta device does not know
        return None
