"""The paper's question: how many steps until the target is as good as training from scratch makes it?

Every length is a run of its own, with a schedule that ends there: a crossing inside a longer schedule is not the
same. Between two lengths the answer is interpolated (log steps against the metric). Runs of one seed share the
source and the order of the data, so the mark of a seed is what the baseline's longest run reaches with it; the spread
of an answer is the standard deviation over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

EXACT, AT_MOST, NOT_REACHED = "interpolated", "at most", "not reached"


@dataclass(frozen=True)
class Figure:
    """A mean with its spread over seeds (None for a single seed)."""

    mean: float
    spread: float | None
    by_seed: tuple[float, ...]


def figure(values: Sequence[float]) -> Figure:
    return Figure(fmean(values), stdev(values) if len(values) > 1 else None, tuple(values))


@dataclass(frozen=True)
class Reach:
    """Steps until the mark; `bound` says whether the shortest run had already passed it, or none did.

    `short_of`: how far the best runs stay from their marks in the mean, where not every seed reaches its own.
    """

    steps: Figure | None
    bound: str
    reached: int
    seeds: int
    short_of: float | None


def steps_to(mark: float, points: Sequence[tuple[float, float]], better: str) -> tuple[float | None, str]:
    """Steps at which (steps, metric) points, one a run, pass the mark.

    >>> steps_to(1.5, [(100, 2.0), (400, 1.0)], "lower")
    (200.0, 'interpolated')
    >>> steps_to(3.0, [(100, 2.0), (400, 1.0)], "lower")
    (100, 'at most')
    """
    sign = 1.0 if better == "lower" else -1.0
    ordered = sorted(points)
    before: tuple[float, float] | None = None
    for steps, value in ordered:
        gap = sign * (value - mark)
        if math.isnan(gap):
            before = None  # it has not passed the mark, and nothing can be interpolated from it
            continue
        if gap <= 0:
            if before is None:
                return steps, AT_MOST
            share = before[1] / (before[1] - gap)
            logs = math.log2(before[0]) + share * (math.log2(steps) - math.log2(before[0]))
            return round(2**logs, 6), EXACT
        before = steps, gap
    return None, NOT_REACHED


def reach(marks: Mapping[int, float], runs: Sequence[dict[str, Any]], better: str) -> Reach:
    """The answer over the seeds of one arm; each run has seed, steps and final, each seed its mark."""
    points = by_seed(runs)
    answers = [steps_to(marks[seed], points[seed], better) for seed in points]
    found = [steps for steps, _ in answers if steps is not None]
    if len(found) < len(points):
        sign, best = (1.0, min) if better == "lower" else (-1.0, max)
        figures = {seed: [value for _, value in points[seed] if not math.isnan(value)] for seed in points}
        short = [sign * (best(figures[seed] or [math.nan]) - marks[seed]) for seed in points]
        return Reach(None, NOT_REACHED, len(found), len(points), fmean(short))
    bound = AT_MOST if any(word == AT_MOST for _, word in answers) else EXACT
    return Reach(figure(found), bound, len(found), len(points), None)


def by_seed(runs: Sequence[dict[str, Any]]) -> dict[int, list[tuple[float, float]]]:
    """The (steps, final) points of each seed, in the order of the seeds."""
    seeds = sorted({run["seed"] for run in runs})
    return {seed: [(run["steps"], run["final"]) for run in runs if run["seed"] == seed] for seed in seeds}


def saved(answer: Reach, arm: Costs, baseline: Costs) -> dict[str, Any] | None:
    """Parts of the baseline's cost that are saved: in steps, FLOPs, and FLOPs with the source's training counted."""
    if answer.steps is None:
        return None
    steps = answer.steps.by_seed
    parts = {
        "steps": [1 - n / baseline.steps for n in steps],
        "flops": [1 - n * arm.per_step / baseline.total for n in steps],
        "flops_with_source": [1 - (n * arm.per_step + arm.source) / baseline.total for n in steps],
    }
    return {name: asdict(figure(values)) for name, values in parts.items()}


@dataclass(frozen=True)
class Costs:
    """FLOPs of a step, of the source's training, and the length of the longest run."""

    per_step: float
    source: float
    steps: int

    @property
    def total(self) -> float:
        return self.per_step * self.steps
