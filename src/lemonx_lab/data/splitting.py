"""Chooses the part of the data that is for validation: by name or by position, never at random."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

FRACTION = 0.05
# With fewer files than this, whole files are too coarse a share.
FILES = 20

T = TypeVar("T")


def held_out(name: str, fraction: float = FRACTION) -> bool:
    """Whether the item of this name is for validation; this depends only on the name.

    >>> sum(held_out(f"module_{i}.py") for i in range(2000))
    104
    """
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") < fraction * 2**64


def split(names: Sequence[str], things: Sequence[T], fraction: float = FRACTION) -> tuple[list[T], list[T]]:
    """Training and validation items, by the hash of their names; both lists can be empty."""
    sides = [held_out(name, fraction) for name in names]
    return (
        [thing for thing, out in zip(things, sides, strict=True) if not out],
        [thing for thing, out in zip(things, sides, strict=True) if out],
    )


def spread(count: int, limit: int | None) -> np.ndarray:
    """At most `limit` of `count` indices, evenly spread.

    >>> spread(10, 3).tolist()
    [0, 3, 6]
    """
    if limit is None or limit >= count:
        return np.arange(count)
    return np.arange(limit) * count // limit
