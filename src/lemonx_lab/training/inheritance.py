"""The part of an update's loss that comes from a teacher.

Knowledge inheritance (the paper's baseline, appendix A.3): (1 - alpha) task loss + alpha loss against the teacher's
predictions. Late-to-early training: task loss + alpha distance of an early hidden state from the teacher's last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lemonx.errors import BadRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lemonx_lab.training.recipe import Recipe

IGNORED = -100  # the label of a position without a loss, everywhere in transformers
EARLY = "early"
# The early block is the last of the first quarter, a choice made here.
_PLACE = 4


class Teaching:
    """A teacher, and the fall of its weight over the `total` steps of a run."""

    def __init__(self, recipe: Recipe, teacher: PreTrainedModel, total: int, device: torch.device) -> None:
        assert recipe.inheritance is not None
        self.teacher: Any = teacher
        self.teacher.to(device).eval().requires_grad_(False)
        self._asked, self._shifted = recipe.inheritance, recipe.task == "causal-lm"
        self._until = self._asked.part * total

    @property
    def more(self) -> dict[str, Any]:
        """The keywords that ask the trained model for more than its predictions."""
        return {"output_hidden_states": True} if self._asked.kind == EARLY else {}

    def weight(self, step: int) -> float:
        return alpha_at(step, self._until, self._asked.weight)

    def active(self, step: int) -> PreTrainedModel | None:
        """The teacher, as long as it is asked."""
        return self.teacher if self.weight(step) > 0 else None

    def loss(self, task: Tensor, outputs: Any, inputs: Mapping[str, Any], step: int, share: float | None = None) -> Any:
        """The loss of an update; `share` is the part of the update's positions that these inputs hold."""
        if self.active(step) is None:
            return task
        known = {name: value for name, value in inputs.items() if name not in ("labels", *self.more)}
        with torch.no_grad():
            taught = self.teacher(**known, **self.more)
        alpha, part = self.weight(step), 1.0 if share is None else share
        if self._asked.kind == EARLY:
            return task + alpha * part * early_distance(outputs.hidden_states, taught.hidden_states)
        labels = inputs["labels"]
        losses = inheritance_loss(self._asked.kind, outputs.logits, taught.logits, labels, shifted=self._shifted)
        return (1 - alpha) * task + alpha * part * losses.mean()

    def positions(self, inputs: Mapping[str, Any]) -> Tensor:
        """The number of positions that have a task loss."""
        labels = inputs["labels"][:, 1:] if self._shifted else inputs["labels"]
        return (labels != IGNORED).sum()


def alpha_at(step: int, total: float, alpha: float) -> float:
    """The teacher's weight, linear from `alpha` to 0.

    >>> [alpha_at(step, 100, 0.5) for step in (0, 50, 100)]
    [0.5, 0.25, 0.0]
    """
    return alpha * max(0.0, 1 - step / total)


def inheritance_loss(kind: str, student: Tensor, teacher: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    """The loss against the teacher at every position that has a task loss, one entry per position.

    soft: KL(teacher || student); hard: cross-entropy to the teacher's argmax. The paper writes the arguments the
    other way round, which for the hard kind would be infinite. `shifted`: position i is judged by label i + 1.
    """
    if shifted:
        student, teacher, labels = student[:, :-1], teacher[:, :-1], labels[:, 1:]
    used = labels != IGNORED
    student, teacher = student[used].float(), teacher[used].float()
    if kind == "hard":
        return F.cross_entropy(student, teacher.argmax(-1), reduction="none")
    logs = F.log_softmax(teacher, -1)
    return F.kl_div(F.log_softmax(student, -1), logs, reduction="none", log_target=True).sum(-1)


def early_distance(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """1 - cosine between what an early block of the student writes and what the teacher's last does, over positions.

    The teacher's entries are interpolated to the student's width, which needs no weights of its own.
    """
    blocks = len(student) - 1
    early, last = student[max(1, blocks // _PLACE)].float(), teacher[-1].float()
    if early.dim() != 3 or early.shape[:2] != last.shape[:2]:
        raise BadRecipe(
            "inheritance early compares hidden states position by position, which these two models do not have in "
            "common",
            "use kind soft or hard",
        )
    if early.shape[-1] != last.shape[-1]:
        last = F.interpolate(last, size=early.shape[-1], mode="linear", align_corners=True)
    return (1 - F.cosine_similarity(early, last, dim=-1)).mean()
