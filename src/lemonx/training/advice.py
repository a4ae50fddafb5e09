"""Advice on how to train an expanded model: the paper's recipe for the nearest growth.

The paper's finding (section 5): keep the maximum learning rate of training from scratch, and decay faster. It measured
how much faster for a few growths, and the advice is that of the nearest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lemonx import api
from lemonx.checkpoints.config import class_names
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadRecipe
from lemonx.planning.plan import Plan
from lemonx.training.schedule import Schedule

# Why, in the words of `lemonx recipe`.
REASONS = {
    "learning_rate": "the maximum of training from scratch: a lower one ends with a lower training loss and a worse "
    "validation accuracy (section 5.1: 1e-3 against 2e-4 and 1e-4 on ViT)",
    "min_learning_rate": "the same minimum as from scratch",
    "warmup": "as from scratch: other lengths made no great difference (footnote of section 5.1)",
}


@dataclass(frozen=True)
class ScratchTraining:
    """Training from scratch as the paper does it, by kind of model (appendix A.2)."""

    length: int
    unit: str
    warmup: int
    batch_size: int
    maximum: float
    minimum: float


SCRATCH = {
    "vision": ScratchTraining(300, "epochs", 5, 1024, 1e-3, 1e-5),
    "language": ScratchTraining(220_000, "steps", 5_000, 256, 2e-4, 2e-5),
}


@dataclass(frozen=True)
class Evidence:
    """A growth (blocks, width) of the paper, and the length of training that reached the target's own result."""

    kind: str
    source: tuple[int, int]
    target: tuple[int, int]
    length: int
    place: str

    @property
    def fraction(self) -> float:
        return self.length / SCRATCH[self.kind].length

    @property
    def share(self) -> float:
        """The source's part of the target's weights: blocks x width^2."""
        (shallow, narrow), (deep, wide) = self.source, self.target
        return shallow * narrow**2 / (deep * wide**2)

    @property
    def deepens(self) -> bool:
        return self.source[0] < self.target[0]

    def __str__(self) -> str:
        name, scratch = {"vision": "ViT", "language": "BERT"}[self.kind], SCRATCH[self.kind]
        return f"{name}{self.source} to {self.target}: {self.length} of {scratch.length} {scratch.unit} ({self.place})"


EVIDENCE = (
    Evidence("vision", (6, 384), (12, 768), 130, "section 6.1"),
    Evidence("vision", (6, 512), (12, 768), 130, "section 6.1"),
    Evidence("vision", (12, 384), (12, 768), 85, "appendix F.1"),
    Evidence("language", (6, 384), (12, 768), 165_000, "section 6.2"),
    Evidence("language", (6, 512), (12, 768), 132_000, "section 6.2"),
)


def nearest(kind: str, share: float, deepens: bool) -> Evidence:
    """The paper's growth that is most like this one. The rule for the fraction is nowhere else.

    >>> nearest("language", 0.2, deepens=True).fraction
    0.6
    """
    alike = [known for known in EVIDENCE if known.kind == kind]
    alike = [known for known in alike if known.deepens == deepens] or alike
    return min(alike, key=lambda known: abs(math.log(share / known.share)))


@dataclass(frozen=True)
class Advice:
    """How long and with what learning rate to train a target, and the evidence for it."""

    task: str
    target: Path
    share: float
    evidence: Evidence
    unit: str
    scratch: int
    length: int
    warmup: int
    batch_size: int
    maximum: float
    minimum: float

    @property
    def fraction(self) -> float:
        return self.evidence.fraction

    def schedule(self, steps_per_unit: int = 1) -> Schedule:
        return Schedule(self.maximum, self.minimum, self.warmup * steps_per_unit, self.length * steps_per_unit)


def advise(
    source: str | Path,
    target: str | Path,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    warmup: int | None = None,
    learning_rate: float | None = None,
    min_learning_rate: float | None = None,
    batch_size: int | None = None,
) -> Advice:
    """How to train the target of this growth, given how the target would be trained from scratch.

    Settings that are not given are the paper's for this kind of model.
    """
    if steps is not None and epochs is not None:
        raise BadRecipe("the length of training from scratch is not given", "give it in --steps or in --epochs")
    for rate in (learning_rate, min_learning_rate):
        if rate is not None and not math.isfinite(rate):
            raise BadRecipe(f"the learning rate {rate} is not a positive number", "use a number such as 3e-4")
    plan = api.plan(source, like=target)
    kind = plan.family.kind
    if kind not in SCRATCH:
        raise BadRecipe("the paper grew no model that reads neither texts nor images", "choose how long to train it")
    paper = SCRATCH[kind]
    unit = "steps" if steps is not None else "epochs" if epochs is not None else paper.unit
    scratch = steps or epochs or paper.length
    share = _share(plan)
    deepens = any(stack.size < plan.target_spec.stacks[name].size for name, stack in plan.source_spec.stacks.items())
    evidence = nearest(kind, share, deepens)
    length = max(1, round(evidence.fraction * scratch))
    if warmup is None:
        # The same part of training from scratch as in the paper.
        warmup = round(paper.warmup * scratch / paper.length)
    maximum = learning_rate or paper.maximum
    minimum = maximum * paper.minimum / paper.maximum if min_learning_rate is None else min_learning_rate
    return Advice(
        _task(plan), Path(target), share, evidence, unit, scratch, length, min(warmup, length - 1),
        batch_size or paper.batch_size, maximum, minimum,
    )  # fmt: skip


def _share(plan: Plan) -> float:
    """The source's part of the target's multiplications, in the blocks alone, as for the paper's growths."""
    source, target, seen = 0, 0, set()
    for step in plan.steps:
        if step.stack is not None and step.flops:
            target += step.flops
            if step.source not in seen:
                seen.add(step.source)
                source += step.flops * plan.tensors[step.source].numel // math.prod(step.shape)
    return source / target if source else 1.0


def _task(plan: Plan) -> str:
    name = next(iter(class_names(plan.target_config)), "")
    found = {"CausalLM": "causal-lm", "LMHeadModel": "causal-lm", "MaskedLM": "masked-lm", "PreTraining": "masked-lm"}
    for ending, task in found.items():
        if name.endswith(ending):
            return task
    if plan.family.kind == "vision":
        return "image-classification"
    return "sequence-classification" if name.endswith("SequenceClassification") else "masked-lm"


_DATA = {"image-classification": "images", "sequence-classification": "table"}


def as_recipe(advice: Advice) -> dict[str, JsonValue]:
    """The keys and values of a recipe for `lemonx train`; the user adds the path of the data."""
    words = _DATA.get(advice.task, "text")
    return {
        "task": advice.task,
        "source": str(advice.target),
        "data": {"kind": words, "path": "PATH"},
        advice.unit: advice.length,
        "warmup" if advice.unit == "steps" else "warmup_epochs": advice.warmup,
        "learning_rate": advice.maximum,
        "min_learning_rate": advice.minimum,
        "batch_size": advice.batch_size,
    }


def as_arguments(advice: Advice) -> dict[str, JsonValue]:
    """The same as keywords of transformers' TrainingArguments."""
    length = {"max_steps": advice.length} if advice.unit == "steps" else {"num_train_epochs": advice.length}
    # A fraction below 1 is a part of all steps: Trainer knows how many an epoch has.
    warmup = advice.warmup if advice.unit == "steps" else advice.warmup / advice.length
    return {
        **length,
        "learning_rate": advice.maximum,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": advice.minimum},
        "warmup_steps": warmup,
        "per_device_train_batch_size": advice.batch_size,
    }
