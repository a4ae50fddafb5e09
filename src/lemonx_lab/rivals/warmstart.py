"""Shrink, zero-pad, perturb: the source made smaller, set into a newly initialised target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lemonx.algebra.expansions import identity
from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.algebra.recipes import Matrix, Vector
from lemonx.checkpoints import Checkpoint
from lemonx.methods import Lessons, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy, copies, kept, stacked
from lemonx.planning.tensor_steps import Step
from lemonx_lab.rivals.copying import CIRCULAR
from lemonx_lab.rivals.scratch import fresh

if TYPE_CHECKING:
    import torch

# What is left of the source's weights: the paper's choice.
SHRINK = 0.4


def warm(plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
    """SHRINK times the source's weights, padded with zeros, plus a new model's; norms and biases are the source's.

    First copies of units are where the source's are, and blocks are stacked.
    """
    made = dict(fresh(plan, checkpoint, lessons))
    for step in plan.steps:
        if step.name in made and made[step.name].is_floating_point():
            made[step.name] = _warmed(step, made[step.name], checkpoint.read(step.source))
    return made


def _warmed(step: Step, new: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    import torch

    from lemonx.execution.shrinking import as_matrix, as_stored  # needs torch, which a list of methods does not

    how, made = step.recipe, new.clone()
    if isinstance(how, Vector):
        made.view(-1)[torch.from_numpy(how.expansion.first_copies)] = source.reshape(-1).to(made.dtype)
        return made
    assert isinstance(how, Matrix)
    rows, columns = (torch.from_numpy(axis.first_copies) for axis in (how.rows, how.columns))
    matrix = as_matrix(made, step).clone()
    same = replace(step, recipe=replace(how, rows=identity(how.rows.size), columns=identity(how.columns.size)))
    matrix[rows[:, None], columns[None, :]] += SHRINK * as_matrix(source, same).to(made.dtype)
    return as_stored(matrix, step, step.shape).contiguous()


@method("warmstart", paper="Mallik et al., Warmstarting for Scaling Language Models, 2024", make=warm)
def warmstart(change: Change, free: Free) -> GrowthPolicy:
    """The source's weights shrunk, padded with zeros, and perturbed by a new initialisation: not lossless."""
    return GrowthPolicy(
        EVEN, lossless=False, mode=kept, further=copies, arrange=stacked, kinds=CIRCULAR, made="shrunk and perturbed"
    )
