"""Expert upcycling: more copies of trained experts, of which a router goes on picking as many as before.

A token costs what it cost. But of two copies with equal scores a router that picks several picks both, and leaves out
an expert that it picked before. No choice of linear scores avoids that for all inputs while every copy is in use: where
the copies of the best expert change places their scores are equal, so next to that place both are picked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.methods import Lessons, Make, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy, copies, kept
from lemonx.planning.tensor_steps import Step
from lemonx.specs.spaces import EXPERTS, Experts
from lemonx.specs.weights import Router

if TYPE_CHECKING:
    import numpy as np
    import torch

PAPER = "Dwivedi et al., Expert Upcycling: Shifting the Compute-Efficient Frontier of Mixture-of-Experts, 2026"
# The noise that tells the scores of copies apart, of the spread of the router's weights: the paper's, on its biases.
NOISE = 0.01
# The size of a group's direction, of the same: scores of experts differ less than those of groups at most tokens.
APART = 30.0


def _upcycled(plan: Plan, checkpoint: Checkpoint, told: Callable[[Step, torch.Tensor, Plan], None]) -> _Sink:
    """The target with plain copies of experts and of their scores, after `told` has told the scores apart."""
    from lemonx.execution.runner import run_plan

    sink = _Sink(plan)
    run_plan(plan, checkpoint, sink, threads=1)
    for step in plan.steps:
        if isinstance(plan.source_spec.rows[step.row], Router) and step.suffix == "weight":
            told(step, sink[step.name], plan)
    return sink


class _Sink(dict[str, "torch.Tensor"]):
    """Tensors by name, in memory."""

    def __init__(self, plan: Plan) -> None:
        import torch

        from lemonx.checkpoints.safetensors_file import torch_dtype

        super().__init__({step.name: torch.empty(step.shape, dtype=torch_dtype(step.dtype)) for step in plan.steps})

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        whole = self[name]
        if values.dim() < 2:
            whole.view(-1)[start : start + values.numel()] = values.view(-1)
        else:
            whole[start : start + len(values), ..., column : column + values.shape[-1]] = values


def _copy_numbers(step: Step, plan: Plan) -> np.ndarray:
    """Which copy of its expert every score belongs to."""
    (axis,) = plan.source_spec.rows[step.row].writes.axes
    return plan.types.spaces[axis].copy_number


def _noise(step: Step, weight: torch.Tensor, plan: Plan) -> None:
    import torch

    from lemonx.execution.noise import generator, normal

    drawn = torch.empty_like(weight)
    normal(drawn, NOISE * float(weight.double().std()), generator(plan.seed, step.name, 0))
    weight += drawn * torch.from_numpy(_copy_numbers(step, plan) > 0).to(weight.dtype)[:, None]


def _groups(step: Step, weight: torch.Tensor, plan: Plan) -> None:
    import torch

    from lemonx.execution.noise import generator, normal

    numbers = torch.from_numpy(_copy_numbers(step, plan))
    directions = torch.empty(int(numbers.max()) + 1, weight.shape[1], dtype=weight.dtype)
    normal(directions, APART * float(weight.double().std()), generator(plan.seed, step.name, 0))
    weight += (directions - directions.mean(0))[numbers]


def _making(told: Callable[[Step, torch.Tensor, Plan], None]) -> Make:
    def make(plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
        return _upcycled(plan, checkpoint, told)

    return make


def _policy(change: Change, name: str, made: str) -> GrowthPolicy:
    spaces, target = change.source.spaces, change.target.spaces
    grown = {axis for axis, space in spaces.items() if target[axis].size != space.size}
    chosen = {axis: (space.chosen, target[axis]) for axis, space in spaces.items() if isinstance(space, Experts)}
    picks = all(isinstance(after, Experts) and after.chosen == before for before, after in chosen.values())
    if not grown or not grown <= chosen.keys() or not picks or any(spaces[axis].size == 1 for axis in grown):
        raise Refused(
            f"{name} only adds experts to a model that has several, and goes on picking as many of them",
            "give a larger number of experts, and no other size",
        )
    return GrowthPolicy(
        EVEN, lossless=False, mode=kept, further=copies, kinds=((EXPERTS, "circ"),), made=made
    )  # fmt: skip


@method("expert-upcycling", paper=PAPER, grows=("width",), make=_making(_noise))
def expert_upcycling(change: Change, free: Free) -> GrowthPolicy:
    """Copies of experts and of their scores with a little noise, as many picked as before: not lossless.

    The paper can also copy useful experts more often, which needs gradients; here all are copied in turn.
    """
    return _policy(change, "expert-upcycling", "copied, with noise in the router")


@method("expert-groups", paper="no paper: expert upcycling without the loss at most tokens", grows=("width",),
        make=_making(_groups))  # fmt: skip
def expert_groups(change: Change, free: Free) -> GrowthPolicy:
    """Copies of experts in groups, of which a direction of the input picks one: lossless but between groups.

    Scores of a group are the old ones and a number that all of them share, so within it the same experts are picked,
    with the same weights. Tokens at which two groups score alike pick from both.
    """
    return _policy(change, "expert-groups", "copied, in groups")
