"""Twins: copies of a unit that no weight tells apart, so that they would stay equal for ever.

Two copies of a unit are twins if exchanging them leaves every tensor of their block as it is: same fan-in,
same fan-out. Then their gradients are equal too. LEMON leaves none; an even split (Net2Net) leaves all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lemonx.checkpoints import Checkpoint
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.specs.coverage import UNIT
from lemonx.specs.rows import Axis


@dataclass(frozen=True)
class Symmetry:
    """How many further copies of units the target holds, how many pairs of copies are twins, and where."""

    copies: int
    twins: int
    where: tuple[str, ...]


def find_twins(plan: Plan, target: Checkpoint) -> Symmetry:
    """Compare every further copy of every unit with the earlier ones, over all tensors that touch it."""
    equal: dict[_Scope, np.ndarray] = {}
    _compare_modules(plan, target, equal)
    for step in plan.steps:
        axes = list(_unit_axes(step, plan))
        if not axes:
            continue
        tensor = target.read(step.name)
        for piece, (scope, shape, axis, first, further) in axes:
            units = piece.of(tensor).reshape(shape).movedim(axis, 0)
            same = (units[further] == units[first]).reshape(len(further), -1).all(1).numpy()
            equal[scope] = equal.get(scope, np.ones(len(further), bool)) & same
    twins = {scope: int(same.sum()) for scope, same in equal.items() if same.any()}
    where = tuple(f"{space} in {block}" if block else space for space, block, _ in twins)
    return Symmetry(sum(len(same) for (*_, base), same in equal.items() if base == 0), sum(twins.values()), where)


def _compare_modules(plan: Plan, target: Checkpoint, equal: dict[_Scope, np.ndarray]) -> None:
    """Units that are modules with tensors of their own (experts): every tensor with that of each earlier copy."""
    named = {(step.source, step.block, step.unit): step.name for step in plan.steps if step.unit is not None}
    for step in plan.steps:
        if step.unit is None:
            continue
        space = UNIT.findall(step.row)[0]
        units = plan.types.spaces[space]
        for base in range(int(units.copies.max()) - 1):
            pairs = [(p.base + i, p.target + i) for p in units.further_copies(base) for i in range(p.length)]
            scope = (*_scope(step, plan, space), base)
            same = equal.setdefault(scope, np.ones(len(pairs), bool))
            for place, (first, further) in enumerate(pairs):
                if further == step.unit and same[place]:
                    other = target.read(named[step.source, step.block, first])
                    same[place] = bool((target.read(step.name) == other).all())


# The units, the block they are in, and the number of the earlier copy that further ones are compared with.
_Scope = tuple[str, str, int]
_UnitAxis = tuple[_Scope, tuple[int, ...], int, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor whose axes are products: along `axis`, in each of `slices`, the entries start..stop."""

    names: tuple[tuple[str, ...], ...]
    axis: int = 0
    slices: int = 1
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Any) -> Any:
        if self.stop is None:
            return tensor
        cut = tensor.unflatten(self.axis, (self.slices, -1)).narrow(self.axis + 1, self.start, self.stop - self.start)
        return cut.flatten(self.axis, self.axis + 1)


def _pieces(axes: tuple[Axis, ...], plan: Plan) -> Iterator[_Piece]:
    """The whole tensor, or the parts of the axis along which several are joined."""
    names = tuple(axis.side.axes for axis in axes)
    joined = next((i for i, axis in enumerate(axes) if len(axis.side.parts) > 1), None)
    if joined is None:
        yield _Piece(names)
        return
    side, start = axes[joined].side, 0
    slices = plan.types.spaces[side.by].target_size if side.by else 1
    for part in side.parts:
        width = math.prod(plan.target_spec.axis_size(name) or 1 for name in part) // slices
        yield _Piece((*names[:joined], part, *names[joined + 1 :]), joined, slices, start, start + width)
        start += width


def _unit_axes(step: Step, plan: Plan) -> Iterator[tuple[_Piece, _UnitAxis]]:
    """Each axis of a tensor that is a space with copies: its scope, the unfused shape, and the pairs."""
    row = plan.source_spec.rows[step.row]
    for piece in _pieces(row.tensors()[step.suffix], plan):
        shape = _unfused(piece, step.shape, plan)
        for position, name in enumerate(name for part in piece.names for name in part):
            space = plan.source_spec.spaces.get(name)
            if space is not None:
                yield from ((piece, pair) for pair in _pairs(step, plan, name, shape, position))
            if space is not None and space.under:
                # A key-value head is told from its copy by the query heads that belong to it.
                over = plan.types.spaces[space.under].target_size
                fine = (*shape[:position], over, shape[position] // over, *shape[position + 1 :])
                yield from ((piece, pair) for pair in _pairs(step, plan, space.under, fine, position))


def _pairs(step: Step, plan: Plan, name: str, shape: tuple[int, ...], position: int) -> Iterator[_UnitAxis]:
    """Every further copy with every earlier copy of its unit: a third may be the twin of the second."""
    expansion = plan.types.spaces[name]
    for base in range(int(expansion.copies.max()) - 1):
        pairs = [
            (pair.base + i, pair.target + i) for pair in expansion.further_copies(base) for i in range(pair.length)
        ]
        earlier, further = np.array(pairs).T
        yield (*_scope(step, plan, name), base), shape, position, earlier, further


def _unfused(piece: _Piece, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    return tuple(
        plan.target_spec.axis_size(name) or size
        for names, size in zip(piece.names, shape, strict=True)
        for name in names
    )


def _scope(step: Step, plan: Plan, space: str) -> tuple[str, str]:
    """Which units these are: those inside a block are others in every block, all others are one throughout.

    A norm keeps units in place, so what it reads and what it writes are the same units.
    """
    units = _joined_by_norms(plan, space)
    spec = plan.source_spec
    stacks = {spec.stack_of(name) for name in plan.rows if units & spec.rows[name].touches}
    stack = stacks.pop() if len(stacks) == 1 else None
    if stack is None or spec.stacks[stack].stream in units:
        return min(units), ""
    return min(units), f"{step.stack}.{step.block}"


def _joined_by_norms(plan: Plan, space: str) -> set[str]:
    joined, size = {space}, 0
    while len(joined) > size:
        size = len(joined)
        for row in plan.source_spec.rows.values():
            if row.in_place:
                for pair in zip(row.reads.axes, row.writes.axes, strict=True):
                    joined |= set(pair) if joined & set(pair) else set()
    return joined
