"""Signatures `reads -> writes`: which axes of activations a module reads and which it writes.

A side is one axis, or a product of axes in parentheses, first axis outermost, as it lies on disk:

    >>> parse("normed -> (3 heads head_dim)")
    (Side(axes=('normed',)), Side(axes=('3', 'heads', 'head_dim')))

An axis is the name of a space or of a fixed size, a number, or `_` for a size that nothing else knows
(the number of labels, say).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIDE = re.compile(r"\((\w+(?: \w+)*)\)|(\w+)")


@dataclass(frozen=True)
class Side:
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return self.axes[0] if len(self.axes) == 1 else f"({' '.join(self.axes)})"


def side(text: str) -> Side:
    """One side of a signature."""
    match = _SIDE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a side of a signature: {text!r} (want `a` or `(a b)`)")
    return Side(tuple((match[1] or match[2]).split()))


def parse(text: str) -> tuple[Side, Side]:
    """Both sides of a signature."""
    parts = text.split("->")
    if len(parts) != 2:
        raise ValueError(f"not a signature: {text!r} (want `reads -> writes`)")
    return side(parts[0]), side(parts[1])
