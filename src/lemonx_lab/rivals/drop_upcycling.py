"""Drop-Upcycling: a dense MLP in every expert, with a part of its units drawn anew, another one in each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.methods import Lessons, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy, copies, kept
from lemonx.planning.tensor_steps import Step
from lemonx.specs.spaces import Experts, ExpertUnits
from lemonx.specs.weights import Router
from lemonx_lab.rivals.scratch import fresh

if TYPE_CHECKING:
    import torch

# The part of an expert's units that is drawn anew: the paper's choice.
DROPPED = 0.5
PAPER = "Nakamura et al., Drop-Upcycling: Training Sparse Mixture of Experts with Partial Re-initialization, ICLR 2025"


def dropped(plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
    """The source's tensors, a new router, and experts that each lost and redrew other units of the source's MLP."""
    rows, made = plan.source_spec.rows, dict[str, "torch.Tensor"]()
    routers = {step.name for step in plan.steps if isinstance(rows[step.row], Router)}
    new = fresh(plan, checkpoint, lessons) if routers else {}
    for step in plan.steps:
        if step.name in routers:
            made[step.name] = new[step.name]
        else:
            tensor = checkpoint.read(step.source)
            made[step.name] = tensor if step.unit is None else _redrawn(tensor, step, plan)
    return made


def _redrawn(weight: torch.Tensor, step: Step, plan: Plan) -> torch.Tensor:
    """The same with the entries of dropped units drawn from a normal of the mean and spread that these had."""
    import torch

    from lemonx.execution.noise import generator, normal

    row, spaces, found = plan.source_spec.rows[step.row], plan.source_spec.spaces, weight.clone()
    for axis, side in enumerate((row.writes, row.reads)):
        space = spaces.get(side.axes[0]) if side.axes else None
        if isinstance(space, ExpertUnits):
            # One choice for all matrices of an expert, which is the same unit in each.
            chosen = generator(plan.seed, f"{step.stack}.{step.block}.{step.unit}", 0).permutation(space.size)
            units = torch.from_numpy(chosen[: round(DROPPED * space.size)])
            old = weight.index_select(axis, units)
            drawn = torch.empty_like(old)
            normal(drawn, float(old.double().std()), generator(plan.seed, step.name, 1))
            found.index_copy_(axis, units, drawn + old.double().mean().to(old.dtype))
    return found


@method("drop-upcycling", paper=PAPER, grows=("width",), make=dropped)
def drop_upcycling(change: Change, free: Free) -> GrowthPolicy:
    """A dense model's MLP in every expert, half of its units drawn anew in each: not lossless."""
    spaces = change.source.spaces
    grown = {name for name, space in spaces.items() if change.target.spaces[name].size != space.size}
    if not grown or not all(isinstance(spaces[name], Experts) and spaces[name].size == 1 for name in grown):
        raise Refused(
            "drop-upcycling only turns the MLPs of a dense model into experts",
            "give --set model_type and a number of experts, and no other size",
        )
    return GrowthPolicy(EVEN, lossless=False, mode=kept, further=copies, made="copied, half redrawn")
