"""How long will a grown target need? A head start, predicted from sizes and from the source's own training.

A growth is worth a head start: the steps from scratch that its source stands for. Measured growths are described by
three numbers and the kind of model: `share`, the source's part of the target's FLOPs per step; `trained`, the steps of
the source per step of the target from scratch; and `ahead`, the head start per such step. The law is linear in logs,

    logit(ahead) = a(kind) + b log(share) + c log(trained),

fitted with a small ridge, since growths are few. Its interval is honest rather than narrow: every growth is predicted
from all the others, and the interval is as wide, in logits, as four of five of these errors. The loss soon after growth
is not used: it does not rank methods.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from lemonx.checkpoints.opening import MAX_TEXT, read_given
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.errors import BadRecipe
from lemonx.training.curve import COLUMNS

# The growths that were measured, written by benchmarks/prediction.py.
MEASURED = Path(__file__).with_name("growths.json")
KINDS = ("vision", "language")
COVERED = 0.8
RIDGE = 0.1
# A source has done its work where its loss is this near its last, as a part of it.
FLAT = 0.005


@dataclass(frozen=True)
class Growth:
    """A growth whose head start was measured; `bound`: where it is "at least" so much, or "at most"."""

    name: str
    kind: str
    share: float
    trained: float
    ahead: float
    bound: str = ""


@dataclass(frozen=True)
class Law:
    """A fitted law: its coefficients for each kind, log(share) and log(trained), and the half width of its interval."""

    coefficients: tuple[float, ...]
    width: float

    def ahead(self, kind: str, share: float, trained: float, shift: float = 0.0) -> float:
        """The predicted head start, `shift` times the half width away, as a part of training from scratch."""
        value = float(np.dot(_features(kind, share, trained), self.coefficients)) + shift * self.width
        return 1 / (1 + math.exp(-value))


def _features(kind: str, share: float, trained: float) -> list[float]:
    return [*(float(kind == one) for one in KINDS), math.log(share), math.log(trained)]


def _coefficients(growths: Sequence[Growth]) -> tuple[float, ...]:
    """Ridge regression; kinds share what they have in common, so the penalty pulls both towards their mean."""
    x = np.array([_features(g.kind, g.share, g.trained) for g in growths])
    y = np.array([math.log(g.ahead / (1 - g.ahead)) for g in growths])
    # The penalty is on what differs between growths, not on where they lie.
    logs, centre = x[:, len(KINDS) :].mean(0), y.mean()
    x[:, len(KINDS) :] -= logs
    solved = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ (y - centre))
    solved[: len(KINDS)] += centre - solved[len(KINDS) :] @ logs
    return tuple(float(value) for value in solved)


def usable(growths: Sequence[Growth]) -> list[Growth]:
    """Those that a law can be fitted to: a head start of nothing, or of everything, has no logit."""
    return [g for g in growths if 0 < g.ahead < 1 and g.share > 0 and g.trained > 0 and g.kind in KINDS]


def fit(growths: Sequence[Growth]) -> Law:
    """The law of these growths; its width is that of the errors when each is predicted from the others."""
    known = usable(growths)
    if len(known) < 4:
        raise BadRecipe(f"{len(known)} growths are too few to predict from", "measure more of them")
    errors = []
    for i, left_out in enumerate(known):
        law = Law(_coefficients([*known[:i], *known[i + 1 :]]), 0.0)
        guess = law.ahead(left_out.kind, left_out.share, left_out.trained)
        errors.append(abs(math.log(guess / (1 - guess)) - math.log(left_out.ahead / (1 - left_out.ahead))))
    return Law(_coefficients(known), float(np.quantile(errors, COVERED)))


@dataclass(frozen=True)
class LeftOut:
    """A growth predicted from all others: the length it needed and the predicted one, as parts of scratch's."""

    growth: Growth
    length: float
    predicted: float
    low: float
    high: float

    @property
    def off(self) -> float:
        """The error of the predicted length, as a part of the length needed."""
        return self.predicted / self.length - 1


def leave_one_out(growths: Sequence[Growth]) -> list[LeftOut]:
    known, found = usable(growths), []
    for i, one in enumerate(known):
        law = fit([*known[:i], *known[i + 1 :]])
        ahead = [law.ahead(one.kind, one.share, one.trained, shift) for shift in (0.0, 1.0, -1.0)]
        found.append(LeftOut(one, 1 - one.ahead, *(1 - value for value in ahead)))
    return found


@cache
def measured() -> tuple[Growth, ...]:
    """The growths that come with lemonx."""
    raw, _ = read_given(MEASURED, MEASURED.name, MAX_TEXT)
    return tuple(Growth(**one) for one in parse_json(raw))


@dataclass(frozen=True)
class Prediction:
    """The head start of a growth in steps of the target, with its interval, and what the source itself costs in them.

    `useful`: the steps of the source that it counts with; `covered`: the part of growths whose head start lies inside
    the interval.
    """

    head_start: float
    low: float
    high: float
    scratch: int
    useful: int
    source_cost: float
    growths: int
    covered: float = COVERED

    @property
    def length(self) -> int:
        return max(1, round(self.scratch - self.head_start))

    @property
    def advice(self) -> str:
        """Whether to grow, in a sentence."""
        if self.high <= self.source_cost:
            return (
                "do not grow, unless the source is there already: it costs more than the head start that it would give"
            )
        if self.head_start <= self.source_cost:
            return "do not train a source for this: its cost is about the head start; grow only one that is there"
        if self.low <= self.source_cost:
            return "growing should pay, though at the lower end of the interval not if the source is counted"
        return "growing pays, also if the source is counted"

    def as_dict(self) -> dict[str, JsonValue]:
        return {**asdict(self), "length": self.length, "advice": self.advice}


def predict(kind: str, share: float, steps: int, scratch: int, growths: Sequence[Growth] | None = None) -> Prediction:
    """The head start of a source that was trained for so many steps, in a target that needs `scratch` from scratch."""
    known = measured() if growths is None else growths
    law, trained = fit(known), steps / scratch
    middle, low, high = (law.ahead(kind, share, trained, shift) * scratch for shift in (0.0, -1.0, 1.0))
    return Prediction(middle, low, high, scratch, steps, share * steps, len(usable(known)))


def useful_steps(curve: Path) -> int:
    """The steps of a run after which its validation loss hardly fell any more; `curve`: its folder or curve.csv."""
    raw, path = read_given(curve, "curve.csv", MAX_TEXT)
    try:
        rows = list(csv.DictReader(raw.decode().splitlines()))
        points = [(int(float(row["step"])), float(row[COLUMNS[3]])) for row in rows if row.get(COLUMNS[3])]
        last = points[-1][1]
        return max(1, next(step for step, loss in points if loss <= last * (1 + FLAT)))
    except (ValueError, KeyError, IndexError, StopIteration, UnicodeDecodeError):
        raise BadRecipe(
            "is not the curve of a run: it has no validation losses", "give a run's folder", file=path
        ) from None
