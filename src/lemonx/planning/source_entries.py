"""Where the source's own numbers stand in the target, so that they can be read back, or kept while others are trained.

A weight W becomes W* with W* E_in = E_out W. The row of a unit's first copy is amp times W's row, split over the copies
of every input. W can be read back bit for bit, entry by entry,

    as it stands   if the copy that keeps the rest keeps all: every input has one copy, or split = phi = 0, or rest:
                   inside. Only these entries must stay; all others may be trained, and W is still there.
    as a sum       in bf16 and fp16, whose splits add up exactly: until the first step of training.

In float32 with noise the sum over copies is W up to rounding only, and W cannot be read back. Scales must be powers of
two: what is multiplied by anything else is rounded. A tensor that is stored in fewer bits than the source's is not the
source's any more, and neither is a mean, a frame, or a weight that a method makes itself. Added blocks hold nothing
that their origins do not, but for the last norm of a group of Post-LN blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.free_parameters import Free
from lemonx.algebra.recipes import KEEP, Matrix, Vector
from lemonx.errors import Refused
from lemonx.planning.exactness import BITS, SMALLEST, powers_of_two
from lemonx.planning.plan import RECOMPUTED, Plan
from lemonx.planning.tensor_steps import Step

Indices = NDArray[np.int64]
_KEPT = "expand with --free inside"
_EVEN = "grow the depth alone, or try another factor of the width: 2 and 4 suit most models"
_ROUNDS = "its scale rounds"


@dataclass(frozen=True)
class Held:
    """A tensor of the source in one of the target's, seen as a matrix (a vector is a single row).

    Row i is at `rows[i]` times `row_scale[i]`; column j at `columns[j]` times `column_scale[j]`, or if `summed`, it is
    the sum over all columns of which it is the unit.
    """

    source: str
    step: Step
    rows: Indices
    columns: Indices
    row_scale: NDArray[np.float64]
    column_scale: NDArray[np.float64]
    summed: bool = False


def source_entries(plan: Plan, *, sums: bool) -> Mapping[str, Held]:
    """Where every tensor of the source stands that is written; Refused, with the reason, if one cannot be read back.

    `sums`: also where it is a sum over copies, which training would change.
    """
    if plan.policy.made:
        raise Refused(f"{plan.policy.method} makes its tensors anew, so the source is not in them", _KEPT)
    found: dict[str, Held] = {}
    for name in plan.tensors:
        if name in plan.dropped:
            if plan.dropped[name] == RECOMPUTED:
                raise Refused(f"{name} of the source is not written, because a model computes it", "keep the source")
            continue
        steps = sorted((step for step in plan.steps if step.source == name), key=lambda step: is_added(plan, step))
        tried = [_held(step, plan, sums=sums) for step in steps]
        held = next((one for one in tried if isinstance(one, Held)), None)
        if held is None:
            why = next((one for one in tried if isinstance(one, str)), "nothing is made from it")
            remedy = _EVEN if why == _ROUNDS else _KEPT
            raise Refused(f"{name} of the source cannot be read back bit for bit: {why}", remedy)
        found[name] = held
    return found


def is_added(plan: Plan, step: Step) -> bool:
    """Whether a tensor belongs to a block that the source has not."""
    stack = plan.source_spec.stack_of(step.row)
    return stack is not None and plan.blocks[stack][step.block].added


def _held(step: Step, plan: Plan, *, sums: bool) -> Held | str:
    """Where a tensor's source stands in it, or why it does not."""
    stored = plan.tensors[step.source].dtype
    if BITS.get(step.dtype, 64) < BITS.get(stored, 64) or SMALLEST.get(step.dtype, 0) > SMALLEST.get(stored, 0):
        return f"it was {stored} and is {step.dtype}"
    if isinstance(step.recipe, Vector):
        return _held_vector(step, step.recipe)
    return _held_matrix(step, step.recipe, plan.free, sums=sums)


def _held_vector(step: Step, how: Vector) -> Held | str:
    where = _first(how.expansion)
    if where is None or how.constant is not None:
        return "it is not among the target's numbers"
    factor = np.broadcast_to(how.factor, (how.expansion.target_size,))[where]
    rest = np.broadcast_to(np.asarray(how.rest), (how.expansion.target_size,))[where]
    if rest.any() or not powers_of_two(factor) or (how.offset and (factor != 1).any()):
        return _ROUNDS
    return Held(step.source, step, np.zeros(1, np.int64), where, np.ones(1), factor)


def _held_matrix(step: Step, how: Matrix, free: Free, *, sums: bool) -> Held | str:
    rows, columns = _first(how.rows), _first(how.columns)
    if how.mode != KEEP or rows is None or columns is None or how.spare or how.as_if:
        return "it is not among the target's numbers"
    if how.copied is not None and free.phi and max(how.copied.copies) > 1:
        return "copies of experts differ from it by noise"
    row_scale = how.rows.amp[rows] * how.rows.gain
    column_scale = how.columns.amp[columns] * how.columns.gain
    column_scale = 1.0 / column_scale if how.consumes else column_scale
    if not (powers_of_two(row_scale) and powers_of_two(column_scale)):
        return _ROUNDS
    split = how.consumes and how.columns.copies.max() > 1
    if not split or free.is_inside or (free.phi == 0 and free.split == 0):
        return Held(step.source, step, rows, columns, row_scale, column_scale)
    if not sums:
        return "copies of units share it, and training would change their sum"
    if step.dtype not in ("BF16", "F16") or not powers_of_two(how.columns.amp * how.columns.gain):
        return f"copies of units share it, and in {step.dtype} their sum is rounded"
    return Held(step.source, step, rows, columns, row_scale, column_scale, summed=True)


def _first(expansion: Expansion) -> Indices | None:
    """The first copy of every unit; None unless every unit has one."""
    if expansion.is_dense or not expansion.copies.all():
        return None
    return expansion.first_copies
