"""Signatures `reads -> writes`: which axes of activations a module reads and which it writes.

A side is one axis, or a product of axes in parentheses, first axis outermost, as it lies on disk:

    >>> parse("normed -> (3 heads head_dim)")
    (Side('normed'), Side('(3 heads head_dim)'))

Several sides that lie one after the other in one tensor are joined by `+`. If they alternate, a slice of each for
every unit of some space (all queries of a key-value head, then its key, then its value) or of several that are one
inside the other, that is named:

    >>> side("hidden + hidden").axes
    ('hidden', 'hidden')
    >>> side("(heads head_dim) + (kv_heads head_dim) by kv_heads").by
    ('kv_heads',)
    >>> side("(kv_heads group query) + (kv_heads group gate) by (kv_heads group)").by
    ('kv_heads', 'group')

An axis is the name of a space or of a fixed size, a number, or `_` for a size that nothing else knows
(the number of labels, say).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

_PART = re.compile(r"\((\w+(?: \w+)*)\)|(\w+)")


@dataclass(frozen=True, repr=False)
class Side:
    """Parts that lie one after the other, each a product of axes; `by`: they alternate, a slice for every unit."""

    parts: tuple[tuple[str, ...], ...]
    by: tuple[str, ...] = ()

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis, in order."""
        return tuple(axis for part in self.parts for axis in part)

    @property
    def is_fused(self) -> bool:
        return len(self.axes) > 1

    @cached_property
    def repeats(self) -> tuple[int, str] | None:
        """How often it is one axis over and what axis, (4, "stage") of `(4 stage)`; None of any other product or sum.

        >>> [side(text).repeats for text in ("stage", "(4 stage)", "stage + stage", "(heads value)")]
        [(1, 'stage'), (4, 'stage'), (2, 'stage'), None]
        """
        *times, axis = self.parts[0]
        if len(set(self.parts)) > 1 or self.by or not all(number.isdigit() for number in times):
            return None
        return len(self.parts) * math.prod(map(int, times)), axis

    def __str__(self) -> str:
        return " + ".join(map(_written, self.parts)) + (f" by {_written(self.by)}" if self.by else "")

    def __repr__(self) -> str:
        return f"Side({str(self)!r})"


def _written(axes: tuple[str, ...]) -> str:
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


def side(text: str) -> Side:
    """One side of a signature."""
    joined, _, by = text.partition(" by ")
    found = [_PART.fullmatch(part.strip()) for part in (*joined.split("+"), *([by] if by else []))]
    parts = tuple(tuple((match[1] or match[2]).split()) for match in found if match)
    if len(parts) != len(found):
        raise ValueError(f"not a side of a signature: {text!r} (want `a`, `(a b)`, `a + b` or `a + b by c`)")
    return Side(parts[:-1], parts[-1]) if by else Side(parts)


def parse(text: str) -> tuple[Side, Side]:
    """Both sides of a signature."""
    parts = text.split("->")
    if len(parts) != 2:
        raise ValueError(f"not a signature: {text!r} (want `reads -> writes`)")
    return side(parts[0]), side(parts[1])
