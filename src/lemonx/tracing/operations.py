"""What a run records of single operations, and the rules for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lemonx.tracing.axes import Axis
from lemonx.tracing.values import Info

if TYPE_CHECKING:
    from lemonx.tracing.tracer import Tracer


def tensors_in(*given: Any) -> list[torch.Tensor]:
    """The tensors among what an ATen operation was given, or made."""
    return [leaf for leaf in _leaves(given) if isinstance(leaf, torch.Tensor)]


def _leaves(tree: Any) -> list[Any]:
    """What stands in lists, tuples and dicts, which is all that such operations know; torch's own way is far slower."""
    found: list[Any] = []
    for leaf in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(leaf, list | tuple | dict):
            found += _leaves(leaf)
        else:
            found.append(leaf)
    return found


def outputs_of(tree: Any) -> list[Any]:
    """What a module gives, one by one: from tuples, lists, dicts, whatever torch knows as a tree, and dataclasses."""
    found: list[Any] = []
    for leaf in tree_leaves(tree):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            found += outputs_of([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            found.append(leaf)
    return found


@dataclass
class Op:
    """One call of an ATen operation."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    func: Any
    in_place: bool

    def arg(self, place: int, name: str = "", default: Any = None) -> Any:
        """An argument by place or by name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(self.args, self.kwargs)

    @property
    def is_empty(self) -> bool:
        """Whether it made tensors without a number, and nothing else."""
        made = tensors_in(self.out)
        return bool(made) and not any(tensor.numel() for tensor in made)


@dataclass(frozen=True)
class Constant:
    """What tells a constant from others: its shape, and a number made of all of its own; `whole`: it is an index."""

    shape: tuple[int, ...]
    digest: float
    whole: bool = False

    def differs(self, other: Constant) -> bool:
        """Whether two constants hold other numbers. What is whole may be for a router to decide."""
        return not self.whole and self.is_another(other)

    def is_another(self, other: Constant) -> bool:
        """The same, whole or not. Of what is on meta nobody knows."""
        known = not math.isnan(self.digest + other.digest)
        return known and not math.isclose(self.digest, other.digest, rel_tol=1e-9, abs_tol=1e-9)


@dataclass(frozen=True)
class Call:
    """An operation of a module as two runs are compared by: its name, its numbers, and digests of its constants."""

    op: str
    numbers: tuple[float, ...]
    constants: tuple[Constant, ...]


@dataclass
class BlockRun:
    """A call of a module of a list: the tensors that went in, and what came out, `behind` how many operations."""

    path: str
    given: list[Info]
    made: list[Info] = field(default_factory=list)
    behind: int = 0


@dataclass(frozen=True)
class Scalar:
    """A multiplication by a number that the sizes decide: `reads` times it is `writes`."""

    reads: Axis
    writes: Axis
    number: float
    place: str
    path: str


Rule = Callable[["Tracer", Op], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


# In place these change the axes of a tensor, and none of its numbers.
TURNED = frozenset(("t", "transpose", "swapaxes", "squeeze", "unsqueeze", "movedim"))

# Numbers of these operations are sizes, which structures are compared by.
_SIZES = frozenset(
    ("view", "_unsafe_view", "reshape", "expand", "slice", "split", "split_with_sizes", "unsafe_split", "narrow",
     "unsafe_split_with_sizes", "_reshape_alias", "unflatten", "repeat", "chunk", "unsafe_chunk", "as_strided",
     "_to_copy", "clone", "native_layer_norm", "native_group_norm", "empty_like", "zeros_like", "new_zeros",
     "new_empty", "_adaptive_avg_pool2d", "constant_pad_nd")
)  # fmt: skip


def numbers(op: Op) -> tuple[float, ...]:
    """The numbers that an operation was given, as far as they are not sizes."""
    if op.name in _SIZES:
        return ()
    return tuple(float(leaf) for leaf in _leaves((op.args, op.kwargs)) if isinstance(leaf, bool | int | float))


# Operations that choose entries by their size, with the place of the argument that names the axis.
DECISIONS = {"topk": 2, "sort": 1, "argsort": 1, "argmax": 1, "argmin": 1, "max": 1, "min": 1, "kthvalue": 2}

# Operations that make a tensor for others to write to: it holds nothing yet, or zeros.
BLANK = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "zeros", "new_zeros", "zeros_like"))
# Operations that torch, or a model, puts in between as sizes ask for it, and that change no number.
MOVES = frozenset(("clone", "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "alias", "detach"))


def paths(module: torch.nn.Module) -> dict[int, list[str]]:
    """All names of every module: one that several have, an activation say, is called by the one that is running."""
    found: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        found.setdefault(id(child), []).append(name)
    return found
