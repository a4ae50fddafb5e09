"""A recipe: everything that decides a training run, checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import dtype_in_full
from lemonx.errors import BadRecipe
from lemonx.guards.limits import LARGEST, LARGEST_RUN_SEED, MOST_AT_ONCE, MOST_STEPS
from lemonx.training.growth_file import Expand
from lemonx.training.recipe_file import load_yaml, with_changes
from lemonx.training.schedule import COOLDOWN, Decay, Schedule, fitting_warmup
from lemonx.training.strict import Strict, first_problem
from lemonx_lab.data import TASKS
from lemonx_lab.training.shipped import found

Task = Literal["causal-lm", "masked-lm", "image-classification", "sequence-classification"]
assert get_args(Task) == TASKS
Steps = Annotated[int, Field(gt=0, le=MOST_STEPS)]
ExampleCount = Annotated[int, Field(gt=0, le=MOST_AT_ONCE)]


class Optimizer(Strict):
    """AdamW, or Muon for the matrices between embedding and head, with AdamW for all else.

    Weight decay is not applied to biases and norms, which is Trainer's own rule. Muon's updates are scaled to the size
    of AdamW's, so that one learning rate serves both.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    momentum: float = Field(default=0.95, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _in_range(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas lie in [0, 1)")
        return self


class Inheritance(Strict):
    """The loss also follows a teacher, with a weight that falls linearly from alpha to 0 over a part of the run.

    soft, hard: towards its predictions (knowledge inheritance). early: what an early block writes, towards what the
    teacher's last one does (late-to-early training).
    """

    kind: Literal["soft", "hard", "early"] = "soft"
    alpha: float | None = Field(None, gt=0, le=1)
    until: float | None = Field(None, gt=0, le=1)
    teacher: str | None = None

    @property
    def weight(self) -> float:
        """The teacher's first weight, unless said the one of each method's paper."""
        return self.alpha or (0.1 if self.kind == "early" else 0.5)

    @property
    def part(self) -> float:
        """Of the run, what has a teacher; the early kind is for early steps, a quarter by a choice made here."""
        return self.until or (0.25 if self.kind == "early" else 1.0)


class Lora(Strict):
    """Adapters of this rank on every linear map but the head (peft), trained alone and merged at the end."""

    rank: int = Field(8, gt=0, le=LARGEST)
    alpha: float = Field(16.0, gt=0)


class Stage(Strict):
    """Steps at one size, after an `expand`; Adam's moments grow with the weights (`grown`) or start at 0 (`anew`).

    `ramp`: over how many steps the copied output weights of added blocks come in.
    """

    steps: Steps
    expand: Expand | None = None
    ramp: Steps | None = None
    moments: Literal["grown", "anew"] = "grown"


class Recipe(Strict):
    """The whole of a training run; the field names are the keys of the YAML file."""

    called = "a recipe"

    task: Task
    source: str | None = None
    config: dict[str, JsonValue] | None = None
    expand: Expand | None = None
    data: dict[str, JsonValue]
    steps: Steps | None = None
    epochs: float | None = Field(None, gt=0, le=MOST_STEPS)
    stages: tuple[Stage, ...] = ()
    ramp: Steps | None = None
    batch_size: ExampleCount
    gradient_accumulation: ExampleCount = 1
    eval_batch_size: ExampleCount | None = None
    learning_rate: float = Field(gt=0)
    min_learning_rate: float = Field(0.0, ge=0)
    warmup: int | None = Field(None, ge=0, le=MOST_STEPS)
    warmup_epochs: float | None = Field(None, ge=0, le=MOST_STEPS)
    decay: Decay = "cosine"
    cooldown: float | None = Field(None, gt=0, le=1)
    optimizer: Optimizer = Optimizer()
    clip: float = Field(1.0, ge=0)
    precision: Annotated[Literal["float32", "bfloat16"], BeforeValidator(dtype_in_full)] = "float32"
    loop: Literal["trainer", "lean"] | None = Field(None, exclude=True)  # of older recipes; it has no effect
    train: Literal["all", "new"] = "all"
    lora: Lora | None = None
    beside: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    rehearse: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    inheritance: Inheritance | None = None
    seed: int = Field(0, ge=0, le=LARGEST_RUN_SEED)
    eval_every: Steps | None = None
    save_every: int | None = Field(None, ge=0, le=MOST_STEPS)
    report_to: tuple[Literal["tensorboard", "trackio", "wandb", "mlflow"], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _one_tracker(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("report_to"), str):
            return {**given, "report_to": [given["report_to"]]}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for message in self._contradictions():
            raise ValueError(message)
        return self

    def _contradictions(self) -> Iterator[str]:
        if (self.source is None) == (self.config is None):
            yield "give one of source (a checkpoint) and config (sizes, to train from scratch)"
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            yield "config needs a model_type, such as llama, vit or pre-ln-bert"
        if self.config is not None and self.expand is not None:
            yield "expand needs a source; give stages to expand a model that is trained from scratch"
        if [self.steps, self.epochs, self.stages or None].count(None) != 2:
            yield "give one of steps, epochs and stages"
        if self.stages and self.expand is not None:
            yield "give expand in the first of the stages, not beside them"
        if self.config is not None and self.stages and self.stages[0].expand is not None:
            yield "the first of the stages trains the config from scratch: it cannot expand"
        if any(stage.expand is None for stage in self.stages[1:]):
            yield "every stage after the first needs an expand"
        if self.ramp is not None and (self.stages or self.source is None):
            yield "ramp belongs to a source, expanded with a ramp or here; in stages, give it in the one that expands"
        if any(stage.ramp is not None and stage.expand is None for stage in self.stages):
            yield "the ramp of a stage needs an expand that adds layers"
        if self.warmup is not None and self.warmup_epochs is not None:
            yield "give one of warmup (steps) and warmup_epochs"
        if self.min_learning_rate > self.learning_rate:
            yield "min_learning_rate is above learning_rate"
        if self.cooldown is not None and self.decay != "wsd":
            yield "cooldown is the part of a run over which decay: wsd decays; give that decay, or leave it out"
        if self.min_learning_rate and self.decay == "constant":
            yield "a constant rate never falls to min_learning_rate; leave it out"
        if self.batch_size % self.gradient_accumulation:
            yield "batch_size, the examples of one step, is not a multiple of gradient_accumulation"
        if self.inheritance is not None and self.inheritance.teacher is None and self.source is None:
            yield "inheritance needs a teacher, a checkpoint"
        if self.train == "new" and (self.source is None or self.stages):
            yield "train: new belongs to one growth of a source, before training or by `expand`; leave it out"
        if self.lora is not None and (self.stages or self.save_every or self.train == "new" or self.source is None):
            yield "lora adapts a source, and saves nothing before the end; leave out train: new, stages and save_every"
        if any(not name.isidentifier() or name in ("loss", "validation", "train") for name in self.beside):
            yield "beside maps names of your choice, made of letters, to sections such as data's"
        if self.rehearse:
            yield from self._of_rehearsal()
        if self.optimizer.kind == "muon" and any(stage.expand and stage.moments == "grown" for stage in self.stages):
            yield "the moments of muon do not grow; give the stages that expand moments: anew"
        if self.inheritance is not None and self.stages:
            yield "inheritance and stages cannot be combined: the teacher's weight falls over one run"

    def _of_rehearsal(self) -> Iterator[str]:
        if unknown := sorted(self.rehearse.keys() - self.beside.keys()):
            yield f"rehearse: {unknown[0]!r} is not among the sections of beside; add it there"
        if self.epochs is not None:
            yield "with rehearse a run is as long as its steps; give these instead of epochs"
        if 0 in self.rehearsed().values() or sum(self.rehearsed().values()) >= self.batch_size:
            yield "rehearse: every batch needs examples of the data and of each section; change a share or batch_size"

    def rehearsed(self) -> dict[str, int]:
        """The examples of every batch that come from each section beside the data."""
        return {name: round(share * self.batch_size) for name, share in self.rehearse.items()}

    def total_steps(self, examples: int) -> int:
        """Updates of the weights, given the number of training examples."""
        if self.steps is not None:
            return self.steps
        epochs = self.epochs
        total = sum(s.steps for s in self.stages) if epochs is None else self._in_steps(epochs, examples)
        if total > MOST_STEPS:
            raise BadRecipe(f"this recipe has {total} steps in all", f"use at most {MOST_STEPS}")
        return total

    def warmup_steps(self, examples: int) -> int:
        if self.warmup_epochs:
            return self._in_steps(self.warmup_epochs, examples)
        return self.warmup or 0

    def schedule(self, examples: int) -> Schedule:
        """The learning rate of the whole run, given the number of training examples."""
        total, warmup = self.total_steps(examples), self.warmup_steps(examples)
        cooldown = math.ceil((self.cooldown or COOLDOWN) * total) if self.decay == "wsd" else 0
        warmup = fitting_warmup(warmup, total, cooldown)
        return Schedule(self.learning_rate, self.min_learning_rate, warmup, total, self.decay, cooldown)

    def _in_steps(self, epochs: float, examples: int) -> int:
        # Batches go on across the end of an epoch, so that every step sees as many examples.
        return round(epochs * examples / self.batch_size) or 1

    def as_dict(self) -> dict[str, JsonValue]:
        """The recipe as a YAML file would state it, without defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def parse_recipe(given: Mapping[str, Any], name: str = "recipe") -> Recipe:
    """The recipe with these keys and values; a BadRecipe names the first key that is wrong."""
    try:
        return Recipe.model_validate(dict(given))
    except ValidationError as error:
        raise BadRecipe(*first_problem(error, Recipe)).about(name) from None


def read_recipe(path: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a YAML file, after `changes` (dotted key to value)."""
    return parse_recipe(with_changes(load_yaml(found(Path(path))), changes or {}), str(path))
