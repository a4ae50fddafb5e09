"""The plain attributes of a module: everything besides tensors and other modules that decides what it computes."""

from __future__ import annotations

import math
import types
from typing import Any

# transformers records outputs by hooks, and FSDP2 gathers parameters by them.
OWN_HOOKS = ("transformers.", "torch.distributed.fsdp.")


def plain_attributes(module: Any) -> dict[str, object]:
    """The attributes of a module that are numbers, words and lists of them; functions by their names."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            found[name] = f"{value.__module__}.{value.__qualname__}"
        elif _is_plain(value):
            found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, of which NaN is equal to NaN, and no number to a truth value."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def only_trains(module: Any) -> bool:
    """Dropout, of entries or of whole branches, which acts only in training."""
    return "Drop" in type(module).__name__


def is_rate(module: Any, attribute: str) -> bool:
    """Whether an attribute is a rate of dropout, which a run may change as it goes."""
    return only_trains(module) or "drop" in attribute


def bare_class(module: Any) -> Any:
    """The class of a module, without what FSDP2 derives from it."""
    return next(base for base in type(module).__mro__ if "FSDPModule" not in (one.__name__ for one in base.__mro__))
