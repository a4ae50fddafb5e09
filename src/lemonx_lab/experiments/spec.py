"""An experiment: a source, a target, and the methods that lead from one to the other."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lemonx.checkpoints.opening import MAX_TEXT, read_given
from lemonx.checkpoints.plain import JsonValue, require_plain
from lemonx.errors import BadCheckpoint, BadRecipe
from lemonx.guards.shown import one_line

FILE = "experiment.toml"
# The method of an arm that does not grow: its source is trained on as it is.
AS_IT_IS = "none"
# The key of a source that is itself grown: `from` which other source, and the options of `lemonx expand`.
GROWN_FROM = "grown"


Seeds = Annotated[tuple[int, ...], Field(min_length=1)]
# Fractions of the target's steps.
Lengths = Annotated[tuple[Annotated[float, Field(gt=0, le=4)], ...], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Paper(_Strict):
    """The finding of the paper, and its recipes at full scale, by the names of `lemonx train --list`."""

    finding: str
    recipes: tuple[str, ...] = ()


class Arm(_Strict):
    """One way to the target: a method from a source, trained for several lengths.

    `expand` (options of `lemonx expand`) and `train` (keys of a recipe) go beyond the experiment's own. The method
    "none" trains the source on as it is. `lengths` are fractions of the target's steps, each a run with its schedule.
    """

    label: str
    method: str = "lemon"
    source: str = "source"
    expand: dict[str, JsonValue] = Field(default_factory=dict)
    train: dict[str, JsonValue] = Field(default_factory=dict)
    lengths: Lengths | None = None


class Goal(_Strict):
    """The target: its sizes, and what its recipe says beyond the experiment's."""

    expand: dict[str, JsonValue]
    train: dict[str, JsonValue]


class Downstream(_Strict):
    """A task that every trained model is fine-tuned on; the recipe without its source."""

    name: str
    metric: str
    train: dict[str, JsonValue]


class Quick(_Strict):
    """The parts that `--quick` runs."""

    seeds: Seeds
    lengths: Lengths | None = None
    arms: tuple[str, ...] | None = None


class Experiment(_Strict):
    """`claim`, `cost` and `command` open the file; `better` says which way the metric goes."""

    # Also the name of a folder, which must lie where it is meant to.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    title: str
    claim: str
    cost: str
    command: str
    paper: Paper
    metric: str = "validation_loss"
    better: Literal["lower", "higher"] = "lower"
    # The arm whose longest run sets the mark that the others are to reach.
    baseline: str = "scratch"
    # The LEMON arm that its variants are compared with; by default the first of each source.
    reference: str | None = None
    seeds: Seeds = (0, 1, 2)
    lengths: Lengths
    train: dict[str, JsonValue]
    sources: dict[str, dict[str, JsonValue]]
    target: Goal
    arms: tuple[Arm, ...]
    downstream: tuple[Downstream, ...] = ()
    quick: Quick | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        labels = [arm.label for arm in self.arms]
        if len(set(labels)) != len(labels):
            raise ValueError("two arms have one label")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("a seed stands twice, which would make the spread smaller than it is")
        for role, label in (("baseline", self.baseline), ("reference", self.reference)):
            if label is not None and label not in labels:
                raise ValueError(f"{role} {label!r} is not an arm")
        for arm in self.arms:
            if "steps" in arm.train:
                raise ValueError(
                    f"arm {arm.label!r} has steps, which are not used; its lengths are parts of the target's steps"
                )
            if arm.source not in self.sources:
                raise ValueError(f"arm {arm.label!r} grows from {arm.source!r}, which is not among the sources")
        for name, source in self.sources.items():
            self._check_origin(name, source.get(GROWN_FROM))
            if "steps" not in {**self.train, **source}:
                raise ValueError(f"source {name!r} needs steps: its cost is counted by them")
        tasks = [task.name for task in self.downstream]
        if len(set(tasks)) != len(tasks):
            raise ValueError("two downstream tasks have one name")
        steps = self.target.train.get("steps")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError("target.train needs steps, the length of training from scratch")
        for arm in self.arms:
            counts = [self.steps_of(length) for length in self.lengths_of(arm)]
            if len(set(counts)) != len(counts):
                raise ValueError(
                    f"arm {arm.label!r} has two lengths of equal steps, which would make the spread smaller than it is"
                )
        if self.quick is not None and self.quick.arms is not None:
            if odd := next((label for label in self.quick.arms if label not in labels), None):
                raise ValueError(f"quick has {odd!r}, which is not an arm")
            if self.baseline not in self.quick.arms:
                raise ValueError(f"quick leaves out {self.baseline!r}, which sets the mark")
        return self

    def _check_origin(self, name: str, grown: JsonValue) -> None:
        """A source that is grown comes from one that stands before it, so that there is a first."""
        before = list(self.sources)[: list(self.sources).index(name)]
        if grown is not None and (not isinstance(grown, dict) or grown.get("from") not in before):
            raise ValueError(f"source {name!r} is grown `from` none of the sources before it")

    @property
    def steps(self) -> int:
        """The length of training from scratch."""
        steps = self.target.train["steps"]
        assert isinstance(steps, int)
        return steps

    def steps_of(self, length: float) -> int:
        """The steps of a run of this part of the target's."""
        return max(1, round(self.steps * length))

    def lengths_of(self, arm: Arm) -> tuple[float, ...]:
        return arm.lengths or self.lengths

    def shortened(self) -> Experiment:
        """The quick version; BadRecipe if there is none."""
        if self.quick is None:
            raise BadRecipe(f"the experiment {self.name!r} has no quick version", "leave out --quick, or write [quick]")
        quick = self.quick
        arms = tuple(
            arm.model_copy(update={"lengths": _common(arm.lengths, quick.lengths)})
            for arm in self.arms
            if quick.arms is None or arm.label in quick.arms
        )
        lengths = quick.lengths or self.lengths
        return self.model_copy(update={"seeds": quick.seeds, "lengths": lengths, "arms": arms})


def _common(own: tuple[float, ...] | None, wanted: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if own is None or wanted is None:
        return own
    return tuple(length for length in own if length in wanted) or own[-1:]


# What `like` may bring along from other experiments.
SHARED = ("train", "sources", "target", "lengths", "arms", "quick")


def read(folder: Path) -> Experiment:
    """The experiment in a file, or in the file experiment.toml of a folder.

    `like = ["bert"]`: sections that the file does not state come from the first of these neighbours that states them.
    """
    path = folder / FILE if folder.is_dir() else folder
    content = _content(folder)
    others = content.pop("like", [])
    if not isinstance(others, list):
        raise BadRecipe("has a `like` that is not a list", 'want a list of experiments, such as ["bert"]', file=path)
    for name in others:
        other = _content(_beside(path.resolve(), Path(str(name)).name))
        content = {**{key: other[key] for key in SHARED if key in other}, **content}
    return parse(content, path)


def _beside(path: Path, name: str) -> Path:
    """Another experiment beside one: a file beside a file, or a folder beside a folder."""
    return path.parent.parent / name if path.name == FILE else path.with_name(f"{name}.toml")


def _content(path: Path) -> dict[str, JsonValue]:
    try:
        return _toml(read_given(path, FILE, MAX_TEXT)[0].decode())
    except BadCheckpoint as error:
        raise BadRecipe.of(error) from None
    except RuntimeError as error:  # a loop of links
        raise BadRecipe(f"cannot be read ({error})", "give the file of an experiment", file=path) from None
    except OSError as error:
        raise BadRecipe(f"cannot be read ({error.strerror})", "give the file of an experiment", file=path) from None
    except (ValueError, RecursionError) as error:
        raise BadRecipe(f"is not TOML that is read here ({one_line(error)})", "correct it", file=path) from None


def parse(content: Mapping[str, JsonValue], path: Path) -> Experiment:
    try:
        return Experiment.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        found = f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        raise BadRecipe(f"is not an experiment ({found})", "correct it", file=path) from None


def _toml(text: str) -> dict[str, JsonValue]:
    content = tomllib.loads(text)
    require_plain(content)
    return content
