"""Finds twins: copies of a unit with identical weights, which would stay equal forever.

Two copies of a unit are twins if exchanging them changes no tensor of their block: same incoming and same outgoing
weights. Then their gradients are equal too. LEMON leaves no twins; with an even split (Net2Net) all copies are twins.
Where every row keeps the weight of its own copy, whole networks of copies could be twins although no two units are:
then exchanging all copies at once changes no tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.recipes import SILENT, Matrix
from lemonx.checkpoints import Checkpoint
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.specs.coverage import UNIT
from lemonx.specs.rows import Axis
from lemonx.specs.spaces import Grouped

if TYPE_CHECKING:
    import torch


# Entries along each axis that are looked at first, and numbers that are compared at a time.
FEW, MANY = 8, 1 << 22


@dataclass(frozen=True)
class Symmetry:
    """The number of extra copies of units in the target, the number of pairs that are twins, and their places."""

    copies: int
    twins: int
    where: tuple[str, ...]


def find_twins(plan: Plan, target: Checkpoint) -> Symmetry:
    """Compare every extra copy of every unit with the earlier ones, over all tensors that touch it."""
    equal: dict[_Scope, np.ndarray] = {}
    _compare_modules(plan, target, equal)
    axes = {step.name: list(_unit_axes(step, plan)) for step in plan.steps if not _comes_in(step, plan)}
    for scope, _, _, _, further in (pair for pairs in axes.values() for _, pair in pairs):
        equal.setdefault(scope, np.ones(len(further), bool))
    # The first rows of every tensor tell most units apart. Then small tensors come first: a pair that one tensor tells
    # apart need not be looked for in a larger one.
    for rows in (FEW, None):
        for name in sorted(axes, key=lambda name: target.tensors[name].nbytes):
            _look(target, name, rows, axes[name], equal)
    twins = {scope: int(same.sum()) for scope, same in equal.items() if same.any()}
    where = tuple(f"{space} in {block}" if block else space for space, block, _ in twins)
    copies = sum(len(same) for (*_, base), same in equal.items() if base == 0)
    if not twins and plan.has_own_copies and _are_twin_networks(plan, target):
        return Symmetry(copies, copies, ("all units, exchanged together",))
    return Symmetry(copies, sum(twins.values()), where)


def _look(
    target: Checkpoint, name: str, rows: int | None, axes: list[tuple[_Fragment, _UnitAxis]], equal: dict[_Scope, Any]
) -> None:
    """Compare the pairs that are still equal in a tensor, or in its first rows if the units are not along these."""
    tensor = None
    for piece, (scope, shape, axis, first, further) in axes:
        left, lead = np.flatnonzero(equal[scope]), len(piece.names[0])
        if not len(left) or (rows is not None and (axis < lead or any(cut.axis == 0 for cut in piece.cuts))):
            continue
        if tensor is None:
            tensor = (
                target.read(name) if rows is None else target.read(name, 0, min(rows, target.tensors[name].shape[0]))
            )
        if rows is not None:
            shape, axis = (len(tensor), *shape[lead:]), axis - lead + 1
        units = piece.of(tensor).reshape(shape).movedim(axis, 0)
        equal[scope][left] = _same(units, first[left], further[left])


def _comes_in(step: Step, plan: Plan) -> bool:
    """Check whether a tensor is in an added block of a ramp, whose output weights come later and differ by unit."""
    stack = plan.source_spec.stack_of(step.row)
    return plan.free.ramp and stack is not None and plan.blocks[stack][step.block].added


def _are_twin_networks(plan: Plan, target: Checkpoint) -> bool:
    """Check that no weight changes if every copy of every unit becomes the next copy."""
    hows = {step.name: step.recipe for step in plan.steps}
    for name in sorted(hows, key=lambda name: target.tensors[name].nbytes):
        how = hows[name]
        if not isinstance(how, Matrix) or not how.consumes or how.mode == SILENT:
            continue
        tensor = target.read(name)
        weight = (tensor.transpose(-1, -2) if how.transposed else tensor).reshape(how.rows.target_size, -1)
        rows, columns = _next_copies(how.rows), _next_copies(how.columns)
        step = max(1, MANY // max(1, weight.shape[1]))
        for start in range(0, len(weight), step):
            here = slice(start, start + step)
            if (weight[rows[here]][:, columns] != weight[here]).any():
                return False
    return True


def _next_copies(units: Expansion) -> np.ndarray:
    """For every copy the place of the next copy of its unit, and of the first for the last; all else stays."""
    place, index = np.arange(units.target_size), np.flatnonzero(units.is_copy)
    ordered = index[np.lexsort((units.copy_number[index], units.source[index]))]
    begins = units.copy_number[ordered] == 0
    first = ordered[begins][np.cumsum(begins) - 1]
    place[ordered] = np.where(np.roll(begins, -1), first, np.roll(ordered, -1))
    return place


def _same(units: torch.Tensor, first: np.ndarray, further: np.ndarray) -> np.ndarray:
    """Mask of the pairs of units that are equal in every entry. Most unequal pairs differ in the first few entries."""
    few = units[(slice(None), *(slice(FEW) for _ in units.shape[1:]))]
    same = _all_equal(few, first, further)
    left, step = np.flatnonzero(same), max(1, MANY // max(1, units[:1].numel()))
    for start in range(0, len(left), step):
        some = left[start : start + step]
        same[some] = _all_equal(units, first[some], further[some])
    return same


def _all_equal(units: torch.Tensor, first: np.ndarray, further: np.ndarray) -> np.ndarray:
    return (units[further] == units[first]).reshape(len(further), -1).all(1).numpy()


def _compare_modules(plan: Plan, target: Checkpoint, equal: dict[_Scope, np.ndarray]) -> None:
    """For units that are whole modules (experts): compare every tensor with that of each earlier copy."""
    named = {(step.source, step.block, step.unit): step.name for step in plan.steps if step.unit is not None}
    for step in plan.steps:
        if step.unit is None or _comes_in(step, plan):
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
class _Cut:
    """A part of an axis that several are joined along: in each of so many slices, the entries start..stop."""

    axis: int
    slices: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Fragment:
    """A part of a tensor whose axes are products, cut out along every axis that is a sum."""

    names: tuple[tuple[str, ...], ...]
    cuts: tuple[_Cut, ...] = ()

    def of(self, tensor: Any) -> Any:
        for cut in self.cuts:
            parts = tensor.unflatten(cut.axis, (cut.slices, -1)).narrow(cut.axis + 1, cut.start, cut.stop - cut.start)
            tensor = parts.flatten(cut.axis, cut.axis + 1)
        return tensor


def _pieces(axes: tuple[Axis, ...], plan: Plan) -> Iterator[_Fragment]:
    """The whole tensor, or the parts of the axes along which several are joined."""
    whole = _Fragment(tuple(axis.side.axes for axis in axes))
    choices = [list(_cuts(place, axis, plan)) for place, axis in enumerate(axes) if len(axis.side.parts) > 1]
    for chosen in itertools.product(*choices):
        names = list(whole.names)
        for part, cut in chosen:
            names[cut.axis] = part
        yield _Fragment(tuple(names), tuple(cut for _, cut in chosen))


def _cuts(place: int, axis: Axis, plan: Plan) -> Iterator[tuple[tuple[str, ...], _Cut]]:
    """The parts of one axis and where they lie in it."""
    start, slices = 0, plan.target_spec.slices(axis.side)
    for part in axis.side.parts:
        width = math.prod(plan.target_spec.axis_size(name) or 1 for name in part) // slices
        yield part, _Cut(place, slices, start, start + width)
        start += width


def _unit_axes(step: Step, plan: Plan) -> Iterator[tuple[_Fragment, _UnitAxis]]:
    """Each axis of a tensor that is a space with copies: its scope, the unfused shape, and the pairs."""
    row = plan.source_spec.rows[step.row]
    for piece in _pieces(row.tensors()[step.suffix], plan):
        shape = _unfused(piece, step.shape, plan)
        for position, name in enumerate(name for part in piece.names for name in part):
            space = plan.source_spec.spaces.get(name)
            if space is not None:
                yield from ((piece, pair) for pair in _pairs(step, plan, name, shape, position))
            if isinstance(space, Grouped):
                # A key-value head is told from its copy by the query heads that belong to it.
                over = plan.types.spaces[space.under].target_size
                fine = (*shape[:position], over, shape[position] // over, *shape[position + 1 :])
                yield from ((piece, pair) for pair in _pairs(step, plan, space.under, fine, position))


def _pairs(step: Step, plan: Plan, name: str, shape: tuple[int, ...], position: int) -> Iterator[_UnitAxis]:
    """Pairs of every extra copy with every earlier copy of its unit; the third may be a twin of the second."""
    expansion = plan.types.spaces[name]
    for base in range(int(expansion.copies.max()) - 1):
        pairs = [
            (pair.base + i, pair.target + i) for pair in expansion.further_copies(base) for i in range(pair.length)
        ]
        earlier, further = np.array(pairs).T
        yield (*_scope(step, plan, name), base), shape, position, earlier, further


def _unfused(piece: _Fragment, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    return tuple(
        plan.target_spec.axis_size(name) or size
        for names, size in zip(piece.names, shape, strict=True)
        for name in names
    )


def _scope(step: Step, plan: Plan, space: str) -> tuple[str, str]:
    """The name of the units of a space: each block has its own inner units; all blocks share all other units.

    A norm keeps units in place, so its input and its output are the same units.
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
