"""Where the numbers of a file stand in a model: parameters are found by what they hold, whatever they are called.

transformers renames tensors when it saves them, joins some and divides others (experts). All parameters of a pico model
are random, so a number says where it is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lemonx.tracing.axes import Axis, joined, part


@dataclass(frozen=True)
class Span:
    """The entries from `start` to `stop` of an axis of a parameter."""

    parameter: str
    axis: int
    start: int
    stop: int


class Places:
    """The numbers of all parameters of a model, in order."""

    def __init__(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._parameters = parameters
        self._names = list(parameters)
        flat = [values.ravel() for values in parameters.values()]
        self._starts = np.cumsum([0, *(len(values) for values in flat)])
        numbers = np.concatenate(flat)
        self._order = np.argsort(numbers, kind="stable")
        self._sorted = numbers[self._order]

    def _place(self, number: float) -> tuple[str, tuple[int, ...]]:
        at = int(np.searchsorted(self._sorted, number))
        if at == len(self._sorted) or self._sorted[at] != number:
            raise LookupError(f"no parameter holds {number}")
        flat = int(self._order[at])
        which = int(np.searchsorted(self._starts, flat, "right")) - 1
        name = self._names[which]
        place = np.unravel_index(flat - self._starts[which], self._parameters[name].shape)
        return name, tuple(int(number) for number in place)

    def parameter(self, values: np.ndarray) -> str:
        """The parameter that a tensor of the file is, or its first part."""
        return self._place(values[(0,) * values.ndim])[0]

    def spans(self, values: np.ndarray, axis: int) -> list[Span]:
        """What an axis of a tensor is made of: one piece of one parameter's axis, or several, one after the other."""
        line = [self._place(values[tuple(i if a == axis else 0 for a in range(values.ndim))])
                for i in range(values.shape[axis])]  # fmt: skip
        found, start = list[Span](), 0
        while start < len(line):
            stop = start + 1
            while (
                stop < len(line)
                and line[stop][0] == line[start][0]
                and _step(line[start][1], line[stop][1], stop - start)
            ):
                stop += 1
            name, first = line[start]
            moved = [at for at, (a, b) in enumerate(zip(first, line[stop - 1][1], strict=True)) if a != b]
            if len(moved) != 1:
                raise LookupError(f"axis {axis} is no axis of {name}")
            found.append(Span(name, moved[0], first[moved[0]], first[moved[0]] + stop - start))
            start = stop
        return found


def _step(first: tuple[int, ...], other: tuple[int, ...], by: int) -> bool:
    """Whether a place is so many further along one axis."""
    moved = [b - a for a, b in zip(first, other, strict=True) if a != b]
    return moved == [by]


def axis_of(spans: list[Span], axes: Mapping[str, list[Axis | None]]) -> Axis | None:
    """The axis that was traced for an axis of the file."""
    pieces = [part(axis, span.start, span.stop) for span in spans if (axis := axes[span.parameter][span.axis])]
    present = [piece for piece in pieces if piece is not None]
    return joined(*present) if present else None
