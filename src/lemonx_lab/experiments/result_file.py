"""result.json: its parts by name and type, and the check of a file that comes from elsewhere.

The page shows a number with its place in the file, so that a result stays the JSON it is: its parts are typed dicts.
Every value that the page computes with is of its very type, within bounds, and there for every arm that is compared;
a file of another kind is refused by name and not by a traceback. Further keys are for other readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadRecipe
from lemonx.guards.limits import MOST_STEPS

FILE = "result.json"


def _drawable(value: float) -> float:
    if math.isfinite(value) and abs(value) > 1e30:
        raise ValueError("too large a number")
    return value


Bounded = Annotated[float, Field(ge=-1e30, le=1e30)]
# A run that diverged has others, which are not drawn.
Measured = Annotated[float, AfterValidator(_drawable)]
StepCount = Annotated[int, Field(ge=1, le=4 * MOST_STEPS)]
Better = Literal["lower", "higher"]


class Figure(TypedDict):
    """A mean with its spread over seeds (None for a single seed)."""

    mean: Bounded
    spread: Bounded | None
    by_seed: Annotated[list[Bounded], Field(min_length=1, max_length=1000)]


class FigureAt(Figure):
    """The final metric of the runs of one length."""

    steps: StepCount


class Reach(TypedDict):
    """Steps until the mark; `bound` says whether the shortest run had already passed it, or none did.

    `short_of`: how far the best runs stay from their marks in the mean, where not every seed reaches its own.
    """

    steps: Figure | None
    bound: str
    reached: int
    seeds: int
    short_of: Bounded | None


def _says_how_far(reach: Reach) -> Reach:
    if reach["steps"] is None and not reach["reached"] and reach["short_of"] is None:
        raise ValueError("neither the steps to the mark nor how far from it the runs stay")
    return reach


class Savings(TypedDict):
    """Parts of the baseline's cost that are saved; the last counts the source's training too."""

    steps: Figure
    flops: Figure
    flops_with_source: Figure


class FineTuned(Figure):
    """What the models of the longest runs reach on a downstream task."""

    metric: str


class RunResult(TypedDict):
    """One run: where it starts and ends, where its source ended, and what both cost."""

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
    # The loss on other examples than those it trains on, before and after.
    beside: NotRequired[dict[str, Annotated[list[Measured], Field(min_length=2, max_length=2)]]]


class ArmResult(TypedDict):
    """One way to the target: its runs, and the answers that follow from them."""

    label: str
    method: str
    source: str
    runs: Annotated[list[RunResult], Field(min_length=1, max_length=1000)]
    at: Annotated[list[FigureAt], Field(min_length=1, max_length=100)]
    reach: Annotated[Reach, AfterValidator(_says_how_far)]
    saved: Savings | None
    downstream: dict[str, FineTuned]


class Curve(TypedDict):
    """The course of a run, by columns."""

    arm: str
    steps: StepCount
    seed: int
    step: list[Measured]
    validation_loss: list[Measured]
    train_loss: list[Measured | None]
    learning_rate: list[Measured | None]
    flops: list[Measured | None]
    seconds: list[Measured | None]


def _even(curve: Curve) -> Curve:
    columns: tuple[Sequence[float | None], ...] = (
        curve["step"], curve["validation_loss"], curve["learning_rate"], curve["flops"], curve["seconds"]
    )  # fmt: skip
    if len({len(column) for column in columns}) > 1:
        raise ValueError("a curve whose columns differ in length")
    return curve


class SourceResult(TypedDict):
    """The training of a source, over its seeds."""

    final: Figure
    flops: Bounded
    steps: StepCount


@with_config(ConfigDict(extra="forbid"))
class NoSource(TypedDict):
    """A source that no arm grows from."""


class PaperFinding(TypedDict):
    finding: str
    recipes: NotRequired[list[str]]


class Question(TypedDict):
    """What the experiment asks; the keys are those of its TOML file."""

    name: str
    title: str
    claim: str
    cost: str
    command: str
    paper: PaperFinding
    metric: str
    better: Better
    baseline: str
    reference: NotRequired[str | None]
    seeds: Annotated[list[int], Field(min_length=1)]


class SourceModel(TypedDict):
    name: str
    model_type: NotRequired[str | None]
    sha256: str
    parameters: int


class TargetModel(TypedDict):
    parameters: int


class MeasuredOutputs(TypedDict):
    passed: bool
    inputs: str
    difference: Measured
    tolerance: Measured
    tokens_equal: bool | None


class MeasuredSymmetry(TypedDict):
    copies: int
    twins: int


class Measurements(TypedDict):
    outputs: MeasuredOutputs | None
    symmetry: MeasuredSymmetry | None
    skipped: str | None


class SizeChange(TypedDict):
    source: int
    target: int


class ShownCertificate(TypedDict):
    """What the page shows of the lemonx.json of the first LEMON target."""

    lossless: bool
    notes: list[str]
    source: SourceModel
    target: TargetModel
    sizes: dict[str, SizeChange]
    exactness: dict[str, int]
    verified: Measurements
    free: dict[str, bool | int | Measured | str]
    seed: int
    arm: NotRequired[str]


class PlanLine(TypedDict):
    """Tensors that differ by the number of their block alone, counted together."""

    tensor: str
    rule: str
    exactness: str
    count: int


def _names_lemonx(versions: dict[str, str]) -> dict[str, str]:
    if "lemonx" not in versions:
        raise ValueError("the version of lemonx is missing")
    return versions


class Result(TypedDict):
    """All of it: what was asked, what was measured, and the answer."""

    experiment: Question
    recipe: dict[str, JsonValue]
    quick: bool
    versions: Annotated[dict[str, str], AfterValidator(_names_lemonx)]
    steps: StepCount
    mark: Figure
    sources: dict[str, SourceResult | NoSource]
    arms: Annotated[list[ArmResult], Field(max_length=64)]
    curves: Annotated[list[Annotated[Curve, AfterValidator(_even)]], Field(max_length=1000)]
    certificate: ShownCertificate | None
    plan: NotRequired[list[PlanLine]]


def _has_its_baseline(result: Result) -> Result:
    labels = [arm["label"] for arm in result["arms"]]
    if result["experiment"]["baseline"] not in labels:
        raise ValueError(f"no arm is called {result['experiment']['baseline']!r}, the baseline")
    if len(set(labels)) < len(labels):
        raise ValueError("two arms have one label")
    return result


def _can_be_compared(result: Result) -> Result:
    """Arms are compared seed by seed, and task by task."""
    arms, seeds = result["arms"], len(result["mark"]["by_seed"])
    tasks = {task for arm in arms for task in arm["downstream"]}
    for arm in arms:
        tuned = arm["downstream"]
        if len({run["seed"] for run in arm["runs"]}) != seeds or any(len(at["by_seed"]) != seeds for at in arm["at"]):
            raise ValueError(f"arm {arm['label']!r} does not have one run of each length for each seed of the mark")
        if tuned.keys() != tasks or len({len(task["by_seed"]) for task in tuned.values()}) > 1:
            raise ValueError(f"arm {arm['label']!r} was not fine-tuned on what the others were")
    for task in tasks:
        if len({len(arm["downstream"][task]["by_seed"]) for arm in arms}) > 1:
            raise ValueError(f"arms were fine-tuned on {task!r} with different seeds")
    return result


_RESULT: TypeAdapter[Result] = TypeAdapter(
    Annotated[Result, AfterValidator(_has_its_baseline), AfterValidator(_can_be_compared)]
)


def check(content: Any, file: Path) -> Result:
    """The content itself, if it is a result."""
    try:
        # Strict: what is shown is what the file says, not what it could be read as.
        _RESULT.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        found = f"is not a result ({where + ': ' if where else ''}{what})"
        raise BadRecipe(found, "`lemonx compare` writes one", file=file) from None
    return content
