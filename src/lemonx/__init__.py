"""Lossless model expansion: a trained checkpoint in, a larger one that computes the same function out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lemonx.api import expand, plan, verify
    from lemonx.errors import LemonxError

__all__ = ["expand", "plan", "verify", "LemonxError"]
_HOME = {"LemonxError": "lemonx.errors"}


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that `lemonx --help` does not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module 'lemonx' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "lemonx.api")), name)
