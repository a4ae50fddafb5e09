"""At which step does training from scratch pass the loss of a source? Read from the curves of two runs.

Losses are compared before the rate comes down, or after: a run that has decayed stands lower than one that trains on.
A run from scratch that decays at its end tells both: what its decay was worth, as a part of the loss, and how much
longer the run was for it, are taken to be so at other lengths too.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lemonx.checkpoints.opening import MAX_TEXT, read_given
from lemonx.errors import BadRecipe
from lemonx.training.curve import COLUMNS

# The part of its maximum that a rate must have for its loss not to be one of decay.
HIGH = 0.9
# A source has decayed if its rate had come down to so much of its maximum.
LOW = 0.5
# Points that show how the loss falls, and how far beyond them it is believed to fall so, as a factor of steps.
FEWEST = 4
BEYOND = 2.0


@dataclass(frozen=True)
class Curve:
    """A run's steps, with the validation loss and the learning rate at each."""

    steps: tuple[float, ...]
    losses: tuple[float, ...]
    rates: tuple[float, ...]

    @property
    def decayed(self) -> bool:
        return self.rates[-1] < LOW * max(self.rates)

    @property
    def high(self) -> list[tuple[float, float]]:
        """Steps and losses while the rate is high: after the warm-up, and before any decay."""
        least = HIGH * max(self.rates)
        rows = zip(self.steps, self.losses, self.rates, strict=True)
        return [(step, loss) for step, loss, rate in rows if step > 0 and rate >= least]


def passed(scratch: Curve, loss: float, *, decayed: bool) -> float:
    """The step at which training from scratch has the loss of a source, which has `decayed` or trains on."""
    points, stretch = scratch.high, 1.0
    if len(points) < FEWEST:
        raise BadRecipe(
            f"the run from scratch has {len(points)} validation losses at its full rate, and {FEWEST} are needed",
            "give a run that is evaluated more often, and decays at its end alone",
        )
    last, lowest = points[-1]
    if decayed:
        if not scratch.decayed:
            raise BadRecipe(
                "the source has decayed, and the run from scratch has not", "give one that decays at its end"
            )
        loss *= lowest / scratch.losses[-1]
        stretch = scratch.steps[-1] / last
    # A parabola in the logarithm of steps: single losses are too noisy to be read, and this falls as curves do.
    logs, losses = np.log([step for step, _ in points]), [value for _, value in points]
    bend, slope, level = np.polyfit(logs, losses, 2)
    tried = np.linspace(logs[0], logs[-1] + math.log(BEYOND), 20_000)
    reached = tried[(bend * tried + slope) * tried + level <= loss]
    if not len(reached):
        raise BadRecipe(
            "the run from scratch does not come near the loss of the source", "give a longer one, on the same data"
        )
    return float(math.exp(reached[0]) * stretch)


def read_curve(given: Path) -> Curve:
    """The curve of a run, by its folder or its curve.csv."""
    raw, path = read_given(given, "curve.csv", MAX_TEXT)
    try:
        rows = [row for row in csv.DictReader(raw.decode().splitlines()) if row.get(COLUMNS[3])]
        steps, losses = ([float(row[name]) for row in rows] for name in (COLUMNS[0], COLUMNS[3]))
        # Before the first step there is no rate yet.
        rates = [float(row[COLUMNS[1]] or 0) for row in rows]
    except (ValueError, KeyError, UnicodeDecodeError):
        rows, steps, losses, rates = [], [], [], []
    if not rows or max(rates) <= 0 or not all(map(math.isfinite, (*steps, *losses, *rates))):
        raise BadRecipe("is not the curve of a run: it has no validation losses", "give a run's folder", file=path)
    return Curve(tuple(steps), tuple(losses), tuple(rates))
