"""Training from scratch: the target as transformers initialises it. Every method is measured against this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.checkpoints import Checkpoint
from lemonx.methods import Lessons, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy, copies, kept, stacked
from lemonx.specs.spaces import EXPERTS
from lemonx_lab.rivals.copying import CIRCULAR

if TYPE_CHECKING:
    import torch


def fresh(plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
    """The tensors of a new model of the target's class, drawn with the plan's seed."""
    from lemonx.models.building import new_model, tensors_on_disk

    return tensors_on_disk(new_model(plan.target_config, plan.seed))


def unread(*notes: str) -> GrowthPolicy:
    """The rows give names and shapes, nothing else."""
    kinds = (*CIRCULAR, (EXPERTS, "circ"))
    return GrowthPolicy(
        EVEN, lossless=False, mode=kept, further=copies, arrange=stacked, kinds=kinds, notes=notes, made="fresh"
    )


@method("scratch", paper="no paper: the initialisation of transformers' own class", make=fresh)
def scratch(change: Change, free: Free) -> GrowthPolicy:
    """The target, newly initialised: nothing of the source is kept."""
    return unread()
