"""Knowledge inheritance: (1 - alpha) task loss + alpha loss against a teacher (the paper's baseline, appendix A.3)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a position without a loss, everywhere in transformers


def alpha_at(step: int, total: int, alpha: float) -> float:
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
