"""The moments of every tensor of a plan, as linear maps of the source's.

A gradient is a backward signal times an activation: dL/dW[o, i] = d[o] x[i], summed over positions. So the axes that a
module writes take the dual of their space, and the axes that it reads take the expansion itself:

    m* = D_out m E_in^T        v* the same with squared coefficients

A norm's gain, mu* = f mu, has the gradient share / f times the source's. The second moment of a sum is the sum of
second moments only if its terms are independent, which is the approximation in v* at entries that hold means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lemonx.algebra.expansions import Expansion, concat, identity, product
from lemonx.algebra.recipes import KEEP, Matrix, Vector
from lemonx.errors import Refused
from lemonx.optimizer_state.along import Along, Mixed, of_copies, reads
from lemonx.optimizer_state.duals import LOSSY, TINY, UNEVEN, Dual, duals, framed, untied
from lemonx.planning import depth
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.specs.coverage import UNIT
from lemonx.specs.norms import Norm, Scale
from lemonx.specs.rows import Axis, Row
from lemonx.specs.signature import Side
from lemonx.specs.spaces import Experts
from lemonx.specs.weights import WeightNormed

# How a moment of the target follows from the source's: exactly as the next gradient does; except for a part that the
# source does not know; or not at all, so that it starts at zero.
EXACT, EXPECTED, FRESH = "exact", "expected", "fresh"
ADDED = "an added block: what it reads and writes the source never saw"
ANOTHER = "a model that becomes one of another family has weights that its optimizer knows nothing of"
UNTIED = "the moments of an embedding that was the decoder too are those of both"
FRAMES = "frames mix coordinates, and what a norm makes of their gradients the source's do not tell"
SPARE = "neurons that pass one frame into the next are new"
PARTS = "the parts of an expert write more than it did, each for itself"
UNUSED = "nothing is sent to some experts yet"
REPLACED = "the parameters are replaced, not expanded"


@dataclass(frozen=True)
class Moments:
    """How one tensor's moments grow: maps along the fused parts of each axis, and how exact they are.

    `axes` is None for fresh moments. `appended`: the tensor that further copies come from, where not from `source`,
    and which indices of the first axis these are.
    """

    name: str
    source: str
    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[tuple[Along, ...], ...] | None
    why: frozenset[str]
    appended: str | None = None
    further: np.ndarray | None = None

    @property
    def status(self) -> str:
        if self.axes is None:
            return FRESH
        return EXPECTED if self.why else EXACT

    @property
    def has_sums(self) -> bool:
        """Whether some gradient of the target is a sum of several of the source's."""
        return any(factor.has_sums for axis in self.axes or () for factor in axis)

    @property
    def is_even(self) -> bool:
        """Whether the squares of all entries of the last axis, and of the one before it, grow equally in sum.

        Only then do means over these axes follow from the source's means.
        """
        left, even = [factor for axis in self.axes or () for factor in axis], list[bool]()
        for size in self.source_shape:
            own = list[Along]()
            while left and math.prod(factor.size for factor in own) < size:
                own.append(left.pop(0))
            even.append(all(factor.is_even for factor in own))
        return all(even[-2:])

    def first(self, moments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """m* from the source's m by name."""
        return self._read(moments, lambda along: along)

    def second(self, moments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """v* from the source's v by name."""
        return self._read(moments, Along.squared)

    def steps(self, moments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mean of the target's steps from the source's by name, if copies step as their units do."""
        return self._read(moments, Along.signs)

    def _read(self, moments: Mapping[str, torch.Tensor], how: Callable[[Along], Along]) -> torch.Tensor:
        own = moments[self.source]
        if self.axes is None:
            return torch.zeros(self.shape, dtype=own.dtype)
        result = self._mapped(own, how)
        if self.appended is not None and self.appended in moments:
            other = self._mapped(moments[self.appended], how)
            result[torch.from_numpy(self.further)] = other[torch.from_numpy(self.further)]
        return result

    def _mapped(self, tensor: torch.Tensor, how: Callable[[Along], Along]) -> torch.Tensor:
        assert self.axes is not None
        factors = [factor for axis in self.axes for factor in axis]
        result = tensor.reshape([factor.size for factor in factors])
        for at, factor in enumerate(factors):
            result = how(factor).apply(result, at)
        # A copy even where nothing grows: the caller may write to it.
        result = result.reshape(self.shape)
        return result.clone() if result.data_ptr() == tensor.data_ptr() else result


def moments(plan: Plan) -> dict[str, Moments]:
    """How the moments of every tensor of the target follow from the source's, by name on disk."""
    if plan.source_config["model_type"] not in plan.family.model_types:
        raise Refused(ANOTHER, "expand without --with-optimizer")
    found, left = duals(plan), _Open.of(plan)
    return {step.name: _moments(plan, found, left, step) for step in plan.steps}


@dataclass(frozen=True)
class _Open:
    """What of a plan copies do not carry: spaces in frames, rows of an embedding and the head untied from it, spaces
    that shrink because experts are split, and experts of which some are unused."""

    framed: frozenset[str]
    untied: frozenset[str]
    shrunk: frozenset[str]
    experts: frozenset[str]
    unused: frozenset[str]

    @classmethod
    def of(cls, plan: Plan) -> _Open:
        spaces, types = plan.source_spec.spaces, plan.types.spaces
        heads = {name: getattr(plan.source_spec.rows[name], "tied", None) for name in plan.rows}
        heads = {name: tied for name, tied in heads.items() if untied(plan, plan.source_spec.rows[name])}
        experts = {name for name, space in spaces.items() if isinstance(space, Experts)}
        return cls(
            framed=frozenset(framed(plan)),
            untied=frozenset({*heads, *(tied for tied in heads.values() if tied)}),
            shrunk=frozenset(n for n, space in spaces.items() if plan.target_spec.spaces[n].size < space.size),
            experts=frozenset(experts),
            unused=frozenset(name for name in experts if not types[name].is_copy.all()),
        )


def _moments(plan: Plan, found: Mapping[str, Dual], left: _Open, step: Step) -> Moments:
    row = plan.source_spec.rows[step.row]
    sizes = plan.tensors[step.source].shape
    axes_of = row.tensors()[step.suffix]
    named = {name for axis in axes_of for name in axis.side.axes} | {*UNIT.findall(step.row)}
    mixed = Mixed.of(step.recipe.columns) if isinstance(step.recipe, Matrix) and step.recipe.columns.is_dense else None
    fresh = _fresh(plan, step, row) or (FRAMES if _in_frames(plan, left, axes_of, mixed) else None)
    fresh = fresh or _unknown(left, step, named)
    if fresh is not None:
        return Moments(step.name, step.source, sizes, step.shape, None, frozenset({fresh}))
    why = {LOSSY} if not plan.policy.lossless else set[str]()
    why |= {UNUSED} if named & left.unused else set()
    why |= {SPARE} if any(plan.types.spaces[name].is_spare.any() for name in named & left.framed) else set()
    axes = []
    for axis, size in zip(axes_of, sizes, strict=False):
        if axis.role == "w":
            maps, unsure = _written(plan, found, axis.side, size, row, step)
            why |= unsure
        elif mixed is not None:
            maps = (mixed,)
        else:
            maps = tuple(reads(_expansion(plan, name, size)) for name in axis.side.axes)
        axes.append(joined(axis.side, maps, plan) if len(axis.side.parts) > 1 else maps)
    further = None
    if step.appended is not None:
        further = plan.types.of(row.writes).copy_number > 0
    return Moments(step.name, step.source, sizes, step.shape, tuple(axes), frozenset(why), step.appended, further)


def joined(side: Side, maps: Iterable[Along], plan: Plan) -> tuple[Along]:
    """The maps of axes that are concatenated in one tensor, as one map; such axes hold units, and no means."""
    left = iter(maps)
    parts = [product(*(_as_expansion(next(left)) for _ in part)) for part in side.parts]
    whole = concat(*parts, by=plan.types.by(side))
    return (reads(whole),)


def _as_expansion(along: Along) -> Expansion:
    return Expansion(along.size, along.source, along.scale)


def _fresh(plan: Plan, step: Step, row: Row) -> str | None:
    """Why this tensor's moments start at zero, or None if they follow from the source's."""
    recipe = step.recipe
    replaced = recipe.constant is not None if isinstance(recipe, Vector) else recipe.mode != KEEP
    stack = plan.source_spec.stack_of(step.row)
    if stack is not None and plan.blocks[stack][step.block].added:
        # In a Post-LN block that closes a group, the norm is the source's own, moved.
        moved = depth.in_stream(row, plan.source_spec.stacks[stack].stream) and not replaced
        return None if moved else ADDED
    return REPLACED if replaced or isinstance(row, WeightNormed) else None


def _in_frames(plan: Plan, left: _Open, axes: Sequence[Axis], mixed: Mixed | None) -> bool:
    """Whether nothing is known of a tensor because of frames.

    What reads a frame is known where its input is E x: its gradient is that of the source times E^T (`mixed`). What
    writes a frame, or scales it entry by entry, is not.
    """
    for axis in axes:
        framed = [plan.types.spaces[name] for name in axis.side.axes if name in left.framed]
        if axis.role == "w" and any(space.is_dense or not space.is_spare.any() for space in framed):
            return True
        if axis.role != "w" and framed and (len(axis.side.parts) > 1 or mixed is None):
            return True
    return False


def _unknown(left: _Open, step: Step, named: Collection[str]) -> str | None:
    """Why nothing of this tensor's moments follows from the source's, though it is made from the source's tensor.

    `named`: the spaces of its axes, and that of the experts of which it belongs to one.
    """
    if step.row in left.untied:
        return UNTIED
    if left.shrunk and (left.shrunk | left.experts).intersection(named):
        return PARTS
    copied = step.recipe.copied if isinstance(step.recipe, Matrix) else None
    return UNUSED if step.unit is not None and copied is not None and all(copied.unused) else None


def _written(
    plan: Plan, found: Mapping[str, Dual], side: Side, size: int, row: Row, step: Step
) -> tuple[tuple[Along, ...], frozenset[str]]:
    """The maps of an axis that a module writes, and why they are not exact."""
    known = [found[name] for name in side.axes if name in found]
    if isinstance(row, Norm) and step.suffix == "weight" and isinstance(step.recipe, Vector):
        # What is not a copy is at the mean, or zero: normed it is zero, so the gain there has no gradient.
        return (_gain(plan, found, side, step.recipe),), _union(dual.units for dual in known)
    if isinstance(row, Scale) and isinstance(step.recipe, Vector):
        return (_gain(plan, found, side, step.recipe),), _union(dual.units | dual.rest for dual in known)
    if (decoder := _tied_to(plan, step.row)) is not None:
        return _tied(plan, known[0], decoder)
    maps = (found[name].along if name in found else reads(_expansion(plan, name, size)) for name in side.axes)
    return tuple(maps), _union(dual.units | dual.rest for dual in known)


def _union(reasons: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*reasons)


def _gain(plan: Plan, found: Mapping[str, Dual], side: Side, recipe: Vector) -> Along:
    """mu* = f mu has share / f times the gradient of mu."""
    share = np.ones(1)
    for name in side.axes:
        part = found[name].share if name in found else np.ones(plan.source_spec.axis_size(name) or 1)
        share = np.multiply.outer(share, part).reshape(-1)
    counts = recipe.factor != 0
    return of_copies(recipe.expansion, share / np.where(counts, recipe.factor, 1.0), counts)


def _tied_to(plan: Plan, name: str) -> Row | None:
    """The decoder whose weight this row's is."""
    rows = (plan.source_spec.rows[other] for other in plan.rows)
    return next((row for row in rows if getattr(row, "tied", None) == name and not untied(plan, row)), None)


def _tied(plan: Plan, embedded: Dual, decoder: Row) -> tuple[tuple[Along, ...], frozenset[str]]:
    """The map for a tied weight, whose gradient is the sum of an embedding's and a decoder's.

    The first maps by the dual of the stream, the second by the expansion that the decoder reads.
    With an even split both are the same map. With another split the two parts would need different maps, but only
    their sum is known; the decoder's map is used.
    """
    along = reads(plan.types.spaces[decoder.reads.axes[0]])
    same = np.allclose(along.scale, embedded.along.scale, rtol=0, atol=TINY)
    return (along,), embedded.units | embedded.rest | (frozenset() if same else {UNEVEN})


def _expansion(plan: Plan, name: str, size: int) -> Expansion:
    if name in plan.types.spaces:
        return plan.types.spaces[name]
    return identity(plan.source_spec.axis_size(name) or size)
