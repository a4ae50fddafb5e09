"""Methods whose target is newly initialised: training from scratch, with a loss towards the source, or warm-started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lemonx.algebra.expansions import identity
from lemonx.algebra.free_parameters import Free
from lemonx.algebra.recipes import Matrix, Vector
from lemonx.checkpoints import Checkpoint
from lemonx.methods import Lessons, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx.planning.tensor_steps import Step
from lemonx.specs.spaces import EXPERTS
from lemonx_lab.rivals.copying import CIRCULAR, lossy_stacked

if TYPE_CHECKING:
    import torch

KI_PAPER = "Qin et al., Knowledge Inheritance for Pre-trained Language Models, NAACL 2022"
LET_PAPER = "Zhao et al., Late-to-Early Training: LET LLMs Learn Earlier, So Faster and Better, ICLR 2026"
# The part of the source's weights that a warm start keeps: the paper's choice.
SHRINK = 0.4


def fresh(plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
    """The tensors of a new model of the target's class, drawn with the plan's seed."""
    from lemonx.models.building import new_model, tensors_on_disk

    return tensors_on_disk(new_model(plan.target_config, plan.seed))


def unread(*notes: str) -> GrowthPolicy:
    """The rows give names and shapes, nothing else."""
    return lossy_stacked(kinds=(*CIRCULAR, (EXPERTS, "circ")), notes=notes, made="fresh")


@method("scratch", paper="no paper: the initialisation of transformers' own class", make=fresh)
def scratch(change: Change, free: Free) -> GrowthPolicy:
    """The target, newly initialised: nothing of the source is kept."""
    return unread()


@method("ki-soft", paper=KI_PAPER, make=fresh, inherits="soft")
def soft(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target that also learns the source's output distribution (KL loss) while it trains."""
    return unread(_note("soft", "KL divergence from the source's distribution"))


@method("ki-hard", paper=KI_PAPER, make=fresh, inherits="hard")
def hard(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target that also learns the source's most likely answer while it trains."""
    return unread(_note("hard", "cross-entropy to the source's argmax"))


def _note(kind: str, loss: str) -> str:
    return f"train with inheritance {kind}: (1 - a) task loss + a {loss}, a from 0.5 linearly to 0"


@method("let", paper=LET_PAPER, make=fresh, inherits="early")
def let(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target whose early hidden states follow the source's last ones while training begins."""
    return unread(
        "train with inheritance early: task loss + a (1 - cosine of an early hidden state and the source's last), a "
        "from 0.1 linearly to 0 over the first quarter of the steps"
    )


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
    return lossy_stacked(made="shrunk and perturbed")
