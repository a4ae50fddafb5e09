"""What the page needs of a result.json, so that a file of another kind is refused by name and not by a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lemonx.errors import BadRecipe


class _Part(BaseModel):
    # Further keys are for other readers.
    model_config = ConfigDict(extra="ignore")


class _Figure(_Part):
    mean: float
    spread: float | None
    by_seed: list[float] = Field(min_length=1)


class _At(_Figure):
    steps: int


class _Reach(_Part):
    steps: _Figure | None
    bound: str
    reached: int
    seeds: int
    short_of: float | None


class _Saved(_Part):
    steps: _Figure
    flops: _Figure
    flops_with_source: _Figure


class _Task(_Figure):
    metric: str


class _Run(_Part):
    steps: int
    seed: int
    final: float
    start: float | None
    source: float | None
    flops: float
    seconds: float


class _Arm(_Part):
    label: str
    method: str
    source: str
    runs: list[_Run] = Field(min_length=1)
    at: list[_At] = Field(min_length=1)
    reach: _Reach
    saved: _Saved | None
    downstream: dict[str, _Task] = Field(default_factory=dict)


class _Curve(_Part):
    arm: str
    steps: int
    seed: int
    step: list[float]
    validation_loss: list[float]
    learning_rate: list[float | None]
    flops: list[float | None]
    seconds: list[float | None]


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
    seeds: list[int] = Field(min_length=1)


class _Result(_Part):
    experiment: _Experiment
    recipe: dict[str, Any]
    quick: bool
    versions: dict[str, str]
    steps: int
    mark: _Figure
    sources: dict[str, dict[str, Any]]
    arms: list[_Arm]
    curves: list[_Curve]
    certificate: dict[str, Any] | None

    @model_validator(mode="after")
    def _has_its_baseline(self) -> _Result:
        if self.experiment.baseline not in [arm.label for arm in self.arms]:
            raise ValueError(f"no arm is called {self.experiment.baseline!r}, the baseline")
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
