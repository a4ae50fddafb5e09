"""What the page needs of a result.json, so that a file of another kind is refused by name and not by a traceback.

Every value that the page computes with is of its very type, within bounds, and there for every arm that is compared.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lemonx.errors import BadRecipe
from lemonx.guards.limits import MOST_STEPS


class _Part(BaseModel):
    # Further keys are for other readers. Strict: what is shown is what the file says, not what it could be read as.
    model_config = ConfigDict(extra="ignore", strict=True)


def _drawable(value: float) -> float:
    if math.isfinite(value) and abs(value) > 1e30:
        raise ValueError("too large a number")
    return value


Number = Annotated[float, Field(ge=-1e30, le=1e30)]
# A run that diverged has others, which are not drawn.
Measured = Annotated[float, AfterValidator(_drawable)]
Steps = Annotated[int, Field(ge=1, le=4 * MOST_STEPS)]
Seeds = Annotated[list[Number], Field(min_length=1, max_length=1000)]


class _Figure(_Part):
    mean: Number
    spread: Number | None
    by_seed: Seeds


class _At(_Figure):
    steps: Steps


class _Reach(_Part):
    steps: _Figure | None
    bound: str
    reached: int
    seeds: int
    short_of: Number | None

    @model_validator(mode="after")
    def _says_how_far(self) -> _Reach:
        if self.steps is None and not self.reached and self.short_of is None:
            raise ValueError("neither the steps to the mark nor how far from it the runs stay")
        return self


class _Saved(_Part):
    steps: _Figure
    flops: _Figure
    flops_with_source: _Figure


class _Task(_Figure):
    metric: str


class _Run(_Part):
    steps: Steps
    seed: int
    final: Number
    start: Number | None
    source: Number | None
    flops: Number
    seconds: Number


class _Arm(_Part):
    label: str
    method: str
    source: str
    runs: list[_Run] = Field(min_length=1, max_length=1000)
    at: list[_At] = Field(min_length=1, max_length=100)
    reach: _Reach
    saved: _Saved | None
    downstream: dict[str, _Task]


class _Curve(_Part):
    arm: str
    steps: Steps
    seed: int
    step: list[Measured]
    validation_loss: list[Measured]
    learning_rate: list[Measured | None]
    flops: list[Measured | None]
    seconds: list[Measured | None]

    @model_validator(mode="after")
    def _even(self) -> _Curve:
        columns = (self.step, self.validation_loss, self.learning_rate, self.flops, self.seconds)
        if len({len(column) for column in columns}) > 1:
            raise ValueError("a curve whose columns differ in length")
        return self


class _Source(_Part):
    final: _Figure
    flops: Number
    steps: Steps


class _Paper(_Part):
    finding: str
    recipes: list[str] = Field(default_factory=list)


class _Experiment(_Part):
    name: str
    title: str
    claim: str
    cost: str
    command: str
    paper: _Paper
    metric: str
    better: Literal["lower", "higher"]
    baseline: str
    reference: str | None = None
    seeds: list[int] = Field(min_length=1)


class _Versions(_Part):
    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, str] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    lemonx: str


class _Origin(_Part):
    name: str
    model_type: str | None = None
    sha256: str
    parameters: int


class _Parameters(_Part):
    parameters: int


class _Outputs(_Part):
    passed: bool
    inputs: str
    difference: Measured
    tolerance: Measured
    tokens_equal: bool | None


class _Symmetry(_Part):
    copies: int
    twins: int


class _Verified(_Part):
    outputs: _Outputs | None
    symmetry: _Symmetry | None
    skipped: str | None


class _Sizes(_Part):
    source: int
    target: int


class _Certificate(_Part):
    lossless: bool
    notes: list[str]
    source: _Origin
    target: _Parameters
    sizes: dict[str, _Sizes]
    exactness: dict[str, int]
    verified: _Verified
    free: dict[str, bool | int | Measured | str]
    seed: int
    arm: str = ""


class _Line(_Part):
    tensor: str
    rule: str
    exactness: str
    count: int


class _Result(_Part):
    experiment: _Experiment
    recipe: dict[str, Any]
    quick: bool
    versions: _Versions
    steps: Steps
    mark: _Figure
    sources: dict[str, _Source | Annotated[dict[str, Any], Field(max_length=0)]]
    arms: list[_Arm] = Field(max_length=64)
    curves: list[_Curve] = Field(max_length=1000)
    certificate: _Certificate | None
    plan: list[_Line] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_its_baseline(self) -> _Result:
        labels = [arm.label for arm in self.arms]
        if self.experiment.baseline not in labels:
            raise ValueError(f"no arm is called {self.experiment.baseline!r}, the baseline")
        if len(set(labels)) < len(labels):
            raise ValueError("two arms have one label")
        return self

    @model_validator(mode="after")
    def _can_be_compared(self) -> _Result:
        """Arms are compared seed by seed, and task by task."""
        seeds, tasks = len(self.mark.by_seed), {task for arm in self.arms for task in arm.downstream}
        for arm in self.arms:
            if len({run.seed for run in arm.runs}) != seeds or any(len(at.by_seed) != seeds for at in arm.at):
                raise ValueError(f"arm {arm.label!r} does not have one run of each length for each seed of the mark")
            if arm.downstream.keys() != tasks or len({len(task.by_seed) for task in arm.downstream.values()}) > 1:
                raise ValueError(f"arm {arm.label!r} was not fine-tuned on what the others were")
        for task in tasks:
            if len({len(arm.downstream[task].by_seed) for arm in self.arms}) > 1:
                raise ValueError(f"arms were fine-tuned on {task!r} with different seeds")
        return self


def check(content: Any, file: Path) -> dict[str, Any]:
    """The content itself, if it is a result."""
    try:
        _Result.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        raise BadRecipe(
            f"{file} is not a result: {where + ': ' if where else ''}{what}; `lemonx compare` writes one"
        ) from None
    return content
