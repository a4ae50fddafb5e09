"""How long will a grown target need? A head start, predicted from the source's training, before anything is paid.

A growth is worth a head start: the steps from scratch that its source stands for. If losses fall by power laws of the
size and of the steps, a source that was trained little stands for nearly as many steps as it took, and however long it
is trained it stands for no more than those at which the target passes what a model of its size can reach:

    1 / head start = 1 / source's steps + 1 / (most x steps from scratch),

with one number, `most`, from the growths that were measured. All is in proportion: no number of steps is built in. The
source's part of the target's FLOPs decides what the source costs; it did not help to predict the head start.

Intervals are honest rather than narrow: every growth is predicted from all the others, and the interval is as wide, as
a factor, as four of five of these errors. The loss soon after growth is not used: it does not rank methods.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from lemonx.checkpoints.opening import MAX_TEXT, read_given
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.errors import BadCheckpoint, BadRecipe
from lemonx.training.curve import COLUMNS

# The growths that were measured, written by docs/make/prediction.py.
MEASURED = Path(__file__).with_name("growths.json")
COVERED = 0.8
# What `most` may be; one number by least squares of logs, so a fine grid is enough.
MOST = np.geomspace(0.1, 100, 601)
# Where as little of training from scratch is left, a source that trained on and decayed ended as low as a grown one.
SHORT = 0.15
# A source has done its work where its loss is this near its last, as a part of it.
FLAT = 0.005


@dataclass(frozen=True)
class Case:
    """What is known before paying: the source's share of the target's FLOPs per step and its steps, and the steps that
    the target takes from scratch."""

    share: float
    steps: float
    scratch: float


@dataclass(frozen=True)
class Growth(Case):
    """A growth whose head start was measured, with the error of its mean over seeds (0 where it is not known)."""

    name: str = ""
    ahead: float = 0.0
    error: float = 0.0

    @property
    def experiment(self) -> str:
        return self.name.partition(":")[0]

    @property
    def length(self) -> float:
        """The steps that the grown target needed."""
        return self.scratch - self.ahead


@dataclass(frozen=True)
class Law:
    """A fitted law: the most that a source is worth, as a part of scratch, and its interval's half width in logs."""

    most: float
    width: float

    def ahead(self, case: Case, shift: float = 0.0) -> float:
        """The predicted head start in steps, `shift` times the half width away."""
        return float(_ahead(case, self.most)) * math.exp(shift * self.width)


def _ahead(case: Case, most: float | np.ndarray) -> float | np.ndarray:
    return 1 / (1 / case.steps + 1 / (most * case.scratch))


def usable(growths: Sequence[Growth]) -> list[Growth]:
    """Those that a law can be fitted to: a head start of nothing has no logarithm."""
    return [one for one in growths if one.ahead > 0 and one.steps > 0]


def _most(growths: Sequence[Growth]) -> float:
    errors = [np.log(_ahead(one, MOST) / one.ahead) for one in growths]
    return float(MOST[np.square(errors).sum(0).argmin()])


def fit(growths: Sequence[Growth]) -> Law:
    """The law of these growths; its width is that of the errors when each is predicted from the others."""
    known = usable(growths)
    if len(known) < 4:
        raise BadRecipe(f"{len(known)} growths are too few to predict from", "measure more of them")
    errors = []
    for place, one in enumerate(known):
        most = _most([*known[:place], *known[place + 1 :]])
        errors.append(abs(math.log(float(_ahead(one, most)) / one.ahead)))
    return Law(_most(known), float(np.quantile(errors, COVERED)))


@dataclass(frozen=True)
class LeftOut:
    """A growth predicted from others: the predicted length, with its interval, in steps."""

    growth: Growth
    predicted: float
    low: float
    high: float

    @property
    def off(self) -> float:
        """The error of the predicted length, as a part of the length needed."""
        return self.predicted / self.growth.length - 1

    @property
    def ahead_off(self) -> float:
        """The error of the predicted head start, as a part of the one measured."""
        return (self.growth.scratch - self.predicted) / self.growth.ahead - 1


def leave_out(growths: Sequence[Growth], group: Callable[[Growth], str]) -> list[LeftOut]:
    """Every growth predicted from those of other groups; a group is a growth's name, or its experiment."""
    known, found = usable(growths), []
    for one in known:
        law = fit([other for other in known if group(other) != group(one)])
        found.append(LeftOut(one, *(one.scratch - law.ahead(one, shift) for shift in (0.0, 1.0, -1.0))))
    return found


@cache
def measured() -> tuple[Growth, ...]:
    """The growths that come with lemonx."""
    raw, _ = read_given(MEASURED, MEASURED.name, MAX_TEXT)
    return tuple(Growth(**one) for one in parse_json(raw))


@dataclass(frozen=True)
class Prediction:
    """The head start of a growth in steps of the target, with its interval, and what the source itself costs in them.

    `covered`: the part of growths whose head start lies inside the interval.
    """

    case: Case
    head_start: float
    low: float
    high: float
    growths: int
    covered: float = COVERED

    @property
    def length(self) -> int:
        return max(1, round(self.case.scratch - self.head_start))

    @property
    def source_cost(self) -> float:
        return self.case.share * self.case.steps

    @property
    def advice(self) -> str:
        """Whether to grow, in a sentence."""
        cost = self.source_cost
        if self.length <= SHORT * self.case.scratch:
            return (
                "do not grow for so short a training: the source alone, trained on for as long and decayed, should "
                f"end about as low, with {self.case.share:.0%} of the cost"
            )
        if self.high <= cost:
            return (
                "do not grow, unless the source is there already: it costs more than the head start that it would give"
            )
        if self.head_start <= cost:
            return "do not train a source for this: its cost is about the head start; grow only one that is there"
        if self.low <= cost:
            return "growing should pay, though at the lower end of the interval not if the source is counted"
        return "growing pays, also if the source is counted"

    def as_dict(self) -> dict[str, JsonValue]:
        return {**asdict(self), "length": self.length, "source_cost": self.source_cost, "advice": self.advice}


def predict(case: Case, growths: Sequence[Growth] | None = None) -> Prediction:
    """The head start of this case, from the growths that come with lemonx if no others are given."""
    known = measured() if growths is None else growths
    law = fit(known)
    # No head start is longer than training from scratch.
    middle, low, high = (min(law.ahead(case, shift), case.scratch) for shift in (0.0, -1.0, 1.0))
    return Prediction(case, middle, low, high, len(usable(known)))


def useful_steps(curve: Path) -> int:
    """The steps of a run after which its validation loss hardly fell any more; `curve`: its folder or curve.csv."""
    try:
        raw, path = read_given(curve, "curve.csv", MAX_TEXT)
    except OSError as error:
        raise BadRecipe(f"cannot be read ({error.strerror})", "give a run's folder", file=curve) from None
    except BadCheckpoint as error:
        raise BadRecipe(error.found, "give a run's folder", file=error.file) from None
    try:
        rows = list(csv.DictReader(raw.decode("utf-8-sig").splitlines()))
        points = [(int(float(row["step"])), float(row[COLUMNS[3]])) for row in rows if row.get(COLUMNS[3])]
    except (ValueError, KeyError, OverflowError, csv.Error):
        points = []
    if not points:
        raise BadRecipe(
            "is not the curve of a run: it has no validation losses", "give a run's folder", file=path
        ) from None
    # A single loss, one that rises, or NaN: no length can be read from it.
    if not (points[-1][1] < points[0][1] and all(math.isfinite(loss) for _, loss in points)):
        raise BadRecipe(
            "shows no training: its validation losses must be numbers, and end lower than they begin",
            "give the whole run of the source",
            file=path,
        )
    if points[0][0] < 0 or any(after <= before for (before, _), (after, _) in pairwise(points)):
        raise BadRecipe(
            "is not the curve of one run: its steps must rise", "give the whole run of the source", file=path
        )
    last = points[-1][1]
    return max(1, next(step for step, loss in points if loss <= last + FLAT * abs(last)))
