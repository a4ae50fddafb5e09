"""Depth type 3: which units of an added block are silenced where they are written, and which where they are read.

A branch ends in a weight that writes the stream and reads units. If one of the weights that write these units is a
factor of what is read, a unit is silent if either its row there or its column here is zero. Of every two neighbouring
entries the first has a zero column and the second a zero row, so both weights have a gradient at the first step, and
half of the output weights stay what they were in the block that was copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lemonx.algebra.recipes import HALF, KEEP, MUTED, Matrix
from lemonx.algebra.runs import Fill
from lemonx.specs.rows import Row
from lemonx.specs.signature import Side
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Linear


def halved(spec: Spec) -> frozenset[str]:
    """The axes whose units can be silenced on either side: wherever they are read, a factor of them is written.

    Nothing but weights may touch such an axis, and every weight that reads it writes the stream of its stack.
    """
    wanted = {axis for row in spec.rows.values() if (axis := factor_axis(spec, row)) is not None}
    for stack in spec.stacks:
        rows = {name: row for name, row in spec.rows.items() if name.startswith(f"{stack}.*.")}
        stream = spec.stacks[stack].stream
        wanted -= {axis for axis in wanted if not _is_paired(spec, rows, axis, stream)}
    return frozenset(wanted)


def _is_paired(spec: Spec, rows: Mapping[str, Row], axis: str, stream: str) -> bool:
    """Whether each of a block's weights that read the axis has a factor of its own among those that write it."""
    touching = {name: row for name, row in rows.items() if axis in row.touches}
    if not all(isinstance(row, Linear) and row.each is None and "{" not in name for name, row in touching.items()):
        return False
    readers = {name: row for name, row in touching.items() if axis in row.reads.axes}
    if not all(row.reads.parts[0][-1] == axis and stream in row.writes.axes for row in readers.values()):
        return False
    factors = [name for name, row in touching.items() if factor_axis(spec, row) == axis]
    # In one branch stand the modules whose names have the most in common.
    nearest = {max(factors, key=lambda other: _in_common(name, other), default=None) for name in readers}
    return None not in nearest and len(nearest) == len(readers) == len(factors)


def _in_common(name: str, other: str) -> int:
    """With how many of the same parts two names begin."""
    pairs = list(zip(name.split("."), other.split("."), strict=False))
    return next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))


def factor_axis(spec: Spec, row: Row) -> str | None:
    """The last axis of that part of what a row writes which is a factor of what is read."""
    part = _factor(spec, row)
    return None if part is None else row.writes.parts[part][-1]


def _factor(spec: Spec, row: Row) -> int | None:
    if not isinstance(row, Linear) or row.factor is not None:
        return row.factor if isinstance(row, Linear) else None
    spaces = [spec.spaces.get(part[-1]) for part in row.writes.parts]
    averaged = [i for i, space in enumerate(spaces) if space is not None and space.is_averaged]
    return averaged[0] if len(averaged) == 1 else None


def half_silent(recipe: Matrix, row: Row, mode: str, target: Spec) -> Matrix:
    """The recipe of a tensor of a branch that is silenced by halves."""
    if mode == MUTED:
        odd = _odd(row.writes, _factor(target, row), target) & recipe.rows.is_copy
        rows = replace(recipe.rows, source=np.where(odd, Fill.ZERO, recipe.rows.source))
        return replace(recipe, rows=rows, mode=MUTED)
    if recipe.mode != HALF:  # a bias
        return recipe
    # Seen from here, units with a zero row are zeros, and what all the others hold must not be read.
    odd = _odd(row.reads, 0, target) & recipe.columns.is_copy
    return replace(
        recipe, columns=replace(recipe.columns, source=np.where(odd, Fill.ZERO, Fill.RAND)), as_if=recipe.columns
    )


def _odd(side: Side, which: int | None, spec: Spec) -> NDArray[np.bool_]:
    """At each entry of a side, whether it is in this part and an odd one along the part's last axis."""
    masks = []
    for number, part in enumerate(side.parts):
        sizes = [spec.axis_size(name) or 1 for name in part]
        odd = np.arange(int(np.prod(sizes))) % sizes[-1] % 2 == 1
        masks.append(odd if number == which else np.zeros_like(odd))
    return np.concatenate([mask.reshape(spec.slices(side), -1) for mask in masks], 1).reshape(-1)


def mode(spec: Spec, axes: frozenset[str], row: Row, writes_stream: bool, otherwise: str) -> str:
    """What becomes of a row in an added block, if the units of these axes are silenced on either side."""
    if writes_stream:
        return HALF if isinstance(row, Linear) and row.reads.parts[0][-1] in axes else otherwise
    return MUTED if factor_axis(spec, row) in axes else KEEP
