"""Upcycling: a dense MLP in every expert, or more copies of trained experts.

Drop-Upcycling copies the MLP of a dense model into every expert, and redraws another part of its units in each expert.

Expert upcycling makes more copies of trained experts, and the router goes on picking as many as before. So a token
costs as much as before. But a router that picks several picks both of two copies with equal scores, and leaves out an
expert that it picked before. No choice of linear scores avoids that for all inputs while every copy is in use. Where
the copies of the best expert change places their scores are equal, so next to that place both are picked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.methods import Lessons, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx.planning.tensor_steps import Step
from lemonx.specs.spaces import EXPERTS, Experts, ExpertUnits
from lemonx.specs.weights import Router
from lemonx_lab.rivals.copying import lossy
from lemonx_lab.rivals.new_targets import fresh

if TYPE_CHECKING:
    import torch

# The part of an expert's units that is redrawn: the paper's choice.
DROPPED = 0.5
DROP_PAPER = (
    "Nakamura et al., Drop-Upcycling: Training Sparse Mixture of Experts with Partial Re-initialization, ICLR 2025"
)
EXPERT_PAPER = "Dwivedi et al., Expert Upcycling: Shifting the Compute-Efficient Frontier of Mixture-of-Experts, 2026"
# The noise by which scores of copies differ, as a share of the spread of the router's weights (the paper: of biases).
NOISE = 0.01
# The size of a group's direction, as such a share: at most tokens, scores of groups differ more than of experts.
APART = 30.0


def _drawn(like: torch.Tensor, share: float, step: Step, plan: Plan, part: int, *shape: int) -> torch.Tensor:
    """Normal numbers of this share of the spread of `like`, in its shape or another."""
    import torch

    from lemonx.execution.noise import generator, normal

    out = torch.empty(shape or like.shape, dtype=like.dtype)
    return normal(out, share * float(like.double().std()), generator(plan.seed, step.name, part))


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
    """The weight with the entries of dropped units drawn from a normal of their mean and spread."""
    import torch

    from lemonx.execution.noise import generator

    row, spaces, found = plan.source_spec.rows[step.row], plan.source_spec.spaces, weight.clone()
    for axis, side in enumerate((row.writes, row.reads)):
        space = spaces.get(side.axes[0]) if side.axes else None
        if isinstance(space, ExpertUnits):
            # One choice for all matrices of an expert, which is the same unit in each.
            chosen = generator(plan.seed, f"{step.stack}.{step.block}.{step.unit}", 0).permutation(space.size)
            units = torch.from_numpy(chosen[: round(DROPPED * space.size)])
            old = weight.index_select(axis, units)
            found.index_copy_(axis, units, _drawn(old, 1.0, step, plan, 1) + old.double().mean().to(old.dtype))
    return found


@method("drop-upcycling", paper=DROP_PAPER, grows=("width",), make=dropped)
def drop_upcycling(change: Change, free: Free) -> GrowthPolicy:
    """A dense model's MLP in every expert, half of its units redrawn in each: not lossless."""
    spaces = change.source.spaces
    grown = {name for name, space in spaces.items() if change.target.spaces[name].size != space.size}
    if not grown or not all(isinstance(spaces[name], Experts) and spaces[name].size == 1 for name in grown):
        raise Refused(
            "drop-upcycling only turns the MLPs of a dense model into experts",
            "give --set model_type and a number of experts, and no other size",
        )
    return lossy(made="copied, half redrawn")


# Changes the scores of a router, given the number of the copy that each score belongs to.
Tell = Callable[["torch.Tensor", "torch.Tensor", Step, Plan], None]


def _upcycled(tell: Tell, plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
    """The target with plain copies of experts and of their scores, after `tell` has made the scores differ."""
    import torch

    from lemonx.checkpoints.safetensors_file import torch_dtype
    from lemonx.execution.held import HeldSink
    from lemonx.execution.runner import run_plan

    made = {step.name: torch.empty(step.shape, dtype=torch_dtype(step.dtype)) for step in plan.steps}
    run_plan(plan, checkpoint, HeldSink.whole(made), threads=1)
    for step in plan.steps:
        row = plan.source_spec.rows[step.row]
        if isinstance(row, Router) and step.suffix == "weight":
            (axis,) = row.writes.axes
            tell(made[step.name], torch.from_numpy(plan.types.spaces[axis].copy_number), step, plan)
    return made


def _noise(weight: torch.Tensor, numbers: torch.Tensor, step: Step, plan: Plan) -> None:
    weight += _drawn(weight, NOISE, step, plan, 0) * (numbers > 0).to(weight.dtype)[:, None]


def _groups(weight: torch.Tensor, numbers: torch.Tensor, step: Step, plan: Plan) -> None:
    directions = _drawn(weight, APART, step, plan, 0, int(numbers.max()) + 1, weight.shape[1])
    weight += (directions - directions.mean(0))[numbers]


def _more_experts(change: Change, name: str, made: str) -> GrowthPolicy:
    spaces, target = change.source.spaces, change.target.spaces
    grown = {axis for axis, space in spaces.items() if target[axis].size != space.size}
    chosen = {axis: (space.chosen, target[axis]) for axis, space in spaces.items() if isinstance(space, Experts)}
    picks = all(isinstance(after, Experts) and after.chosen == before for before, after in chosen.values())
    if not grown or not grown <= chosen.keys() or not picks or any(spaces[axis].size == 1 for axis in grown):
        raise Refused(
            f"{name} only adds experts to a model that has several, and goes on picking as many of them",
            "give a larger number of experts, and no other size",
        )
    return lossy(kinds=((EXPERTS, "circ"),), made=made)


@method("expert-upcycling", paper=EXPERT_PAPER, grows=("width",), make=partial(_upcycled, _noise))
def expert_upcycling(change: Change, free: Free) -> GrowthPolicy:
    """Copies of experts and of their scores with a little noise, as many picked as before: not lossless.

    The paper can also copy useful experts more often, which needs gradients; here all are copied in turn.
    """
    return _more_experts(change, "expert-upcycling", "copied, with noise in the router")


@method("expert-groups", paper="no paper: expert upcycling without the loss at most tokens", grows=("width",),
        make=partial(_upcycled, _groups))  # fmt: skip
def expert_groups(change: Change, free: Free) -> GrowthPolicy:
    """Copies of experts in groups, of which a direction of the input picks one: lossless but between groups.

    Scores of a group are the old ones and a number that all of them share, so within it the same experts are picked,
    with the same weights. Tokens at which two groups score alike pick from both.
    """
    return _more_experts(change, "expert-groups", "copied, in groups")
