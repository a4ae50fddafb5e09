"""result.json: its parts as models, which check a file that comes from elsewhere.

Every value that the page computes with has exactly its type and lies within bounds. It exists for every arm that is
compared. Further keys are kept for other readers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadRecipe
from lemonx.guards.limits import MOST_STEPS

FILE = "result.json"
LEMON, SCRATCH = "lemon", "scratch"


def _drawable(value: float) -> float:
    if math.isfinite(value) and abs(value) > 1e30:
        raise ValueError("too large a number")
    return value


Bounded = Annotated[float, Field(ge=-1e30, le=1e30)]
# A run that diverged has NaN or infinity here, which charts leave out.
Measured = Annotated[float, AfterValidator(_drawable)]
Step = Annotated[int, Field(ge=0, le=4 * MOST_STEPS)]
StepCount = Annotated[int, Field(ge=1, le=4 * MOST_STEPS)]
Better = Literal["lower", "higher"]


class Part(BaseModel):
    # Strict: the page shows what the file says, not what it could be read as.
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class Figure(Part):
    """A mean with its spread over seeds (None for a single seed)."""

    mean: Bounded
    spread: Bounded | None
    by_seed: Annotated[list[Bounded], Field(min_length=1, max_length=1000)]


class FigureAt(Figure):
    """The final metric of the runs of one length."""

    steps: StepCount


class Reach(Part):
    """Steps until the mark; `bound` says whether the shortest run had already passed it, or none did.

    `short_of` is how far the best runs stay from their marks in the mean, if some seed does not reach its mark.
    """

    steps: Figure | None
    bound: str
    reached: int
    seeds: int
    short_of: Bounded | None

    @model_validator(mode="after")
    def _says_how_far(self) -> Reach:
        if self.steps is None and not self.reached and self.short_of is None:
            raise ValueError("neither the steps to the mark nor how far from it the runs stay")
        return self


class Savings(Part):
    """Parts of the baseline's cost that are saved; the last one counts the source's training too."""

    steps: Figure
    flops: Figure
    flops_with_source: Figure


class FineTuned(Figure):
    """The figures of the models of the longest runs on a downstream task."""

    metric: str


class RunResult(Part):
    """One run: where it starts and ends, where its source ended, and what both cost.

    `beside` is the loss on other examples than those that it trains on, before and after.
    """

    length: Bounded
    steps: StepCount
    seed: int
    final: Bounded
    start: Bounded | None
    source: Bounded | None
    flops: Bounded
    source_flops: Bounded
    seconds: Bounded
    key: str
    downstream: dict[str, Measured]
    beside: dict[str, Annotated[list[Measured], Field(min_length=2, max_length=2)]] = {}


class ArmResult(Part):
    """One way to the target: its runs, and the answers that follow from them."""

    label: str
    method: str
    source: str
    runs: Annotated[list[RunResult], Field(min_length=1, max_length=1000)]
    at: Annotated[list[FigureAt], Field(min_length=1, max_length=100)]
    reach: Reach
    saved: Savings | None
    downstream: dict[str, FineTuned]

    @property
    def lengths(self) -> list[int]:
        return sorted(at.steps for at in self.at)

    def after(self, steps: int) -> FigureAt:
        """The final metric of the runs of this length."""
        return next(at for at in self.at if at.steps == steps)

    def runs_of(self, steps: int) -> list[RunResult]:
        """The runs of this length, in the order of the seeds."""
        return sorted((run for run in self.runs if run.steps == steps), key=lambda run: run.seed)


class Curve(Part):
    """The course of a run, by columns."""

    arm: str
    steps: StepCount
    seed: int
    step: list[Step]
    validation_loss: list[Measured]
    train_loss: list[Measured | None]
    learning_rate: list[Measured | None]
    flops: list[Measured | None]
    seconds: list[Measured | None]

    @model_validator(mode="after")
    def _even(self) -> Curve:
        columns = (self.step, self.validation_loss, self.learning_rate, self.flops, self.seconds)
        if len(set(map(len, columns))) > 1:
            raise ValueError("a curve whose columns differ in length")
        return self


class SourceResult(Part):
    """The training of a source, over its seeds."""

    final: Figure
    flops: Bounded
    steps: StepCount


class NoSource(Part, extra="forbid"):
    """A source that no arm grows from."""


class PaperFinding(Part):
    finding: str
    recipes: list[str] = []


class Question(Part):
    """The question of the experiment; the keys are those of its TOML file."""

    name: str
    title: str
    claim: str
    cost: str
    command: str
    paper: PaperFinding
    metric: str
    better: Better
    baseline: str
    reference: str | None = None
    seeds: Annotated[list[int], Field(min_length=1)]


class SourceModel(Part):
    name: str
    model_type: str | None = None
    sha256: str
    parameters: int


class TargetModel(Part):
    parameters: int


class MeasuredOutputs(Part):
    passed: bool
    inputs: str
    difference: Measured
    tolerance: Measured
    tokens_equal: bool | None


class MeasuredSymmetry(Part):
    copies: int
    twins: int


class Measurements(Part):
    outputs: MeasuredOutputs | None
    symmetry: MeasuredSymmetry | None
    skipped: str | None


class SizeChange(Part):
    source: int
    target: int


class ShownCertificate(Part):
    """The parts of the first LEMON target's lemonx.json that the page shows."""

    lossless: bool
    notes: list[str]
    source: SourceModel
    target: TargetModel
    sizes: dict[str, SizeChange]
    exactness: dict[str, int]
    verified: Measurements
    free: dict[str, bool | int | Measured | str]
    seed: int
    arm: str = "LEMON"


class PlanLine(Part):
    """Tensors that differ by the number of their block alone, counted together."""

    tensor: str
    rule: str
    exactness: str
    count: int


class Result(Part):
    """All of it: what was asked, what was measured, and the answer."""

    experiment: Question
    recipe: dict[str, JsonValue]
    quick: bool
    versions: dict[str, str]
    steps: StepCount
    mark: Figure
    sources: dict[str, SourceResult | NoSource]
    arms: Annotated[list[ArmResult], Field(max_length=64)]
    curves: Annotated[list[Curve], Field(max_length=1000)]
    certificate: ShownCertificate | None
    plan: list[PlanLine] = []

    def is_baseline(self, arm: ArmResult) -> bool:
        return arm.label == self.experiment.baseline

    @property
    def lengths(self) -> list[int]:
        """The lengths of all runs."""
        return sorted({length for arm in self.arms for length in arm.lengths})

    @property
    def scratch(self) -> list[ArmResult]:
        return [arm for arm in self.arms if arm.method == SCRATCH]

    def best(self, arms: list[ArmResult], steps: int) -> ArmResult:
        """The arm that ends best after this number of steps."""
        best = min if self.experiment.better == "lower" else max
        return best(arms, key=lambda arm: arm.after(steps).mean)

    def as_json(self) -> Any:
        """The content of the file."""
        return self.model_dump(exclude_unset=True)

    @model_validator(mode="after")
    def _can_be_compared(self) -> Result:
        """Arms are compared seed by seed, and task by task."""
        if "lemonx" not in self.versions:
            raise ValueError("the version of lemonx is missing")
        labels = [arm.label for arm in self.arms]
        if self.experiment.baseline not in labels:
            raise ValueError(f"no arm is called {self.experiment.baseline!r}, the baseline")
        if len(set(labels)) < len(labels):
            raise ValueError("two arms have one label")
        seeds, tasks = len(self.mark.by_seed), {task for arm in self.arms for task in arm.downstream}
        for arm in self.arms:
            tuned = {len(task.by_seed) for task in arm.downstream.values()}
            if len({run.seed for run in arm.runs}) != seeds or any(len(at.by_seed) != seeds for at in arm.at):
                raise ValueError(f"arm {arm.label!r} does not have one run of each length for each seed of the mark")
            if arm.downstream.keys() != tasks or len(tuned) > 1:
                raise ValueError(f"arm {arm.label!r} was not fine-tuned on what the others were")
        for task in tasks:
            if len({len(arm.downstream[task].by_seed) for arm in self.arms}) > 1:
                raise ValueError(f"arms were fine-tuned on {task!r} with different seeds")
        return self


def parse(content: Any, file: Path) -> Result:
    """The result that a file holds."""
    try:
        return Result.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        found = f"is not a result ({where + ': ' if where else ''}{what})"
        raise BadRecipe(found, "`lemonx compare` writes one", file=file) from None
