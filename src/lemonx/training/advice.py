"""Advice on how to train an expanded model, in terms of how its user would train it from scratch.

The paper's finding (section 5): keep the maximum learning rate of training from scratch, and decay faster. It measured
how much faster for a few growths. The nearest one gives a fraction; every other number is the user's own.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lemonx import api
from lemonx.checkpoints.config import class_names
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadRecipe
from lemonx.planning.plan import Plan
from lemonx.training.schedule import Schedule, fitting_warmup
from lemonx.verification.certificate import certificate_in

# Why, in the words of `lemonx recipe`.
REASONS = {
    "learning_rate": "your maximum of training from scratch. A fifth or a tenth of it ended with a lower training loss "
    "and a worse validation accuracy in the paper (section 5.1)",
    "warmup": "other lengths made no great difference in the paper (footnote of section 5.1)",
    "lossless": "without one, lossless starts ended lower or level in `lemonx compare start-vit`, `start-bert`, "
    "`start-widths` and `free-parameters`",
    "ramp": "the target was expanded with a ramp. In `lemonx compare growth-inside` a tenth of the run was as long; "
    "`RampCallback` is for a Trainer of your own",
    "silent": "On Llamas layers that came in by a ramp ended lower (`lemonx compare baselines-large`, "
    "`growth-inside-long-ramp`): expand with --free '{placement: stacked, ramp: true}'",
    "wsd": "the paper decays by a cosine. Grown models and models from scratch both ended lower like this in `lemonx "
    "compare bert` and `vit-best-rate`",
}
# The part of a grown model's run over which wsd decays in these comparisons; from scratch it is COOLDOWN.
COOLDOWN_OF_GROWN = 0.4
# The part over which a ramp opens added blocks in `growth-inside` and, nearly, in `start`.
RAMP_OF_GROWN = 0.1


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
        name = {"vision": "ViT", "language": "BERT"}[self.kind]
        return f"{name}{self.source} to {self.target}, {self.fraction:.0%} as long ({self.place})"


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
class Growth:
    """A growth from source to target: the source's share of the target's weights, and what the paper knows of it.

    `lossy`: the method that made the target, if it does not keep the source's function. `opens`: its added blocks come
    in by a ramp; `silent`: they are those of a decoder, and write nothing at first.
    """

    task: str
    kind: str
    target: Path
    share: float
    evidence: Evidence
    lossy: str | None = None
    opens: bool = False
    silent: bool = False

    @property
    def fraction(self) -> float:
        """How long to train the target, in terms of training it from scratch."""
        return self.evidence.fraction

    @property
    def warms_up(self) -> bool:
        """True if the warm-up of training from scratch stays. The rule is nowhere else (docs/training.md)."""
        return self.lossy is not None


@dataclass(frozen=True)
class OwnTraining:
    """How the user would train the target from scratch; `length` is the tokens of an example."""

    steps: int | None = None
    epochs: int | None = None
    tokens: int | None = None
    length: int | None = None
    batch_size: int | None = None
    warmup: int | None = None
    learning_rate: float | None = None
    min_learning_rate: float | None = None

    def __post_init__(self) -> None:
        if [self.steps, self.epochs, self.tokens].count(None) < 2:
            raise BadRecipe(
                "the length of training from scratch is given twice", "give one of --steps, --epochs, --tokens"
            )
        for rate in (self.learning_rate, self.min_learning_rate):
            if rate is not None and not math.isfinite(rate):
                raise BadRecipe(f"the learning rate {rate} is not a positive number", "use a number such as 3e-4")
        if self.min_learning_rate and self.learning_rate and self.min_learning_rate > self.learning_rate:
            raise BadRecipe("the minimum learning rate is above the maximum", "exchange them")
        length, _ = self.total
        if self.warmup and length and self.warmup >= length:
            raise BadRecipe(f"a warm-up of {self.warmup} leaves nothing of {length}", "give a shorter --warmup")

    @property
    def lacking(self) -> list[str]:
        """The options without which there is no complete recipe."""
        found = [] if self.steps or self.epochs or self.tokens else ["--steps (or --epochs, or --tokens)"]
        found += ["--learning-rate"] if self.learning_rate is None else []
        found += ["--batch-size"] if self.batch_size is None else []
        return found + (["--length (tokens of an example)"] if self.tokens and self.length is None else [])

    @property
    def total(self) -> tuple[int, str]:
        """How long it takes, and in what unit."""
        if self.tokens and self.length and self.batch_size:
            return max(1, round(self.tokens / (self.length * self.batch_size))), "steps"
        return (self.steps, "steps") if self.steps else (self.epochs or 0, "epochs")


@dataclass(frozen=True)
class Advice:
    """How long and with what learning rate to train a target, given how it would be trained from scratch."""

    growth: Growth
    unit: str
    scratch: int
    length: int
    warmup: int
    batch_size: int
    maximum: float
    minimum: float
    decay: Literal["cosine", "wsd"] = "cosine"

    @property
    def cooldown(self) -> float:
        """The part of the run over which the rate falls after a stable phase."""
        return COOLDOWN_OF_GROWN if self.decay == "wsd" else 0.0

    @property
    def ramp(self) -> int:
        """The steps over which added blocks open, where they do; those of an epoch are not known."""
        return max(1, round(RAMP_OF_GROWN * self.length)) if self.growth.opens and self.unit == "steps" else 0

    def schedule(self, steps_per_unit: int = 1) -> Schedule:
        total = self.length * steps_per_unit
        cooldown = math.ceil(self.cooldown * total)
        return Schedule(self.maximum, self.minimum, self.warmup * steps_per_unit, total, self.decay, cooldown)


def growth(source: str | Path, target: str | Path) -> Growth:
    """What the paper's nearest growth says about this one, in terms of training the target from scratch."""
    given, real = Path(target), Path(os.path.realpath(target))
    folder = given.parent if given.is_file() else given
    said = certificate_in(real.parent if real.is_file() else real)
    made = {"method": said.method, "free": said.free} if said else {}
    plan = api.plan(source, like=target, **made)
    kind = plan.family.kind
    if kind not in SCRATCH:
        raise BadRecipe("the paper grew no model that reads neither texts nor images", "choose how long to train it")
    share = _share(plan)
    deepens = any(stack.size < plan.target_spec.stacks[name].size for name, stack in plan.source_spec.stacks.items())
    lossy = None if plan.policy.lossless else plan.policy.method
    found = nearest(kind, share, deepens)
    opens = said is not None and said.free.ramp
    task = _task(plan)
    silent = deepens and not opens and lossy is None and task == "causal-lm"
    return Growth(task, kind, folder, share, found, lossy, opens, silent)


def advise(grown: Growth, own: OwnTraining, decay: Literal["cosine", "wsd"] = "cosine") -> Advice:
    """The user's own training from scratch, shortened; what the paper has in proportion is taken in proportion."""
    if own.lacking or own.learning_rate is None or own.batch_size is None:
        raise BadRecipe("training from scratch is not described", f"add {', '.join(own.lacking)}")
    paper, (scratch, unit) = SCRATCH[grown.kind], own.total
    length, warmup = max(1, round(grown.fraction * scratch)), own.warmup
    if warmup is None:
        warmup = round(paper.warmup * scratch / paper.length) if grown.warms_up else 0
    minimum = own.min_learning_rate
    if minimum is None and decay == "wsd":
        minimum = 0.0
    elif minimum is None:
        # Six digits, as people write rates: the quotient of the paper's two is not one of binary numbers.
        minimum = float(f"{own.learning_rate * paper.minimum / paper.maximum:.6g}")
    found = Advice(grown, unit, scratch, length, warmup, own.batch_size, own.learning_rate, minimum, decay)
    return replace(found, warmup=fitting_warmup(warmup, length, found.schedule().cooldown))


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
    words = _DATA.get(advice.growth.task, "text")
    return {
        "task": advice.growth.task,
        "source": str(advice.growth.target),
        "data": {"kind": words, "path": "PATH"},
        advice.unit: advice.length,
        "warmup" if advice.unit == "steps" else "warmup_epochs": advice.warmup,
        "learning_rate": advice.maximum,
        "min_learning_rate": advice.minimum,
        **({"decay": advice.decay, "cooldown": advice.cooldown} if advice.decay == "wsd" else {}),
        "batch_size": advice.batch_size,
        **({"ramp": advice.ramp} if advice.ramp else {}),
    }


def as_arguments(advice: Advice) -> dict[str, JsonValue]:
    """The same as keywords of transformers' TrainingArguments, whose wsd warms up from the minimum, not from 0."""
    length = {"max_steps": advice.length} if advice.unit == "steps" else {"num_train_epochs": advice.length}
    # A fraction below 1 is a part of all steps: Trainer knows how many an epoch has.
    warmup = advice.warmup if advice.unit == "steps" else advice.warmup / advice.length
    schedule: dict[str, JsonValue] = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": advice.minimum},
    }
    if advice.decay == "wsd":
        if advice.unit != "steps":
            raise BadRecipe("TrainingArguments count wsd in steps, and those of an epoch are not known", "give --steps")
        schedule = {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {
                "num_decay_steps": advice.schedule().cooldown,
                "decay_type": "linear",
                "min_lr_ratio": advice.minimum / advice.maximum,
            },
        }
    return {
        **length,
        "learning_rate": advice.maximum,
        **schedule,
        "warmup_steps": warmup,
        "per_device_train_batch_size": advice.batch_size,
    }
