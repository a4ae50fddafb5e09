"""The paper's question: how many steps until the grown target is as good as a model trained from scratch?

Every length is a separate run whose schedule ends there; where a longer schedule crosses the mark is another question.
Between two lengths the answer is interpolated (log steps against the metric). Runs with the same seed share the source
and the order of the data, so every seed has its own mark: what the baseline's longest run reaches with it. The spread
of an answer is the standard deviation over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypedDict

from lemonx_lab.experiments.result_file import Better, Figure, Reach, Savings

INTERPOLATED, AT_MOST, NOT_REACHED = "interpolated", "at most", "not reached"


def figure(values: Sequence[float]) -> Figure:
    spread = stdev(values) if len(values) > 1 else None
    return {"mean": fmean(values), "spread": spread, "by_seed": list(values)}


def steps_to(mark: float, points: Sequence[tuple[float, float]], better: Better) -> tuple[float | None, str]:
    """Steps at which (steps, metric) points, one per run, pass the mark.

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
            return round(2**logs, 6), INTERPOLATED
        before = steps, gap
    return None, NOT_REACHED


class Ended(TypedDict):
    """What counts of a run here."""

    seed: int
    steps: int
    final: float


def reach(marks: Mapping[int, float], runs: Sequence[Ended], better: Better) -> Reach:
    """The answer over the seeds of one arm; each run has seed, steps and final, each seed its mark."""
    points = by_seed(runs)
    answers = [steps_to(marks[seed], points[seed], better) for seed in points]
    found = [steps for steps, _ in answers if steps is not None]
    if len(found) < len(points):
        sign, best = (1.0, min) if better == "lower" else (-1.0, max)
        figures = {seed: [value for _, value in points[seed] if not math.isnan(value)] for seed in points}
        short = [sign * (best(figures[seed] or [math.nan]) - marks[seed]) for seed in points]
        return Reach(steps=None, bound=NOT_REACHED, reached=len(found), seeds=len(points), short_of=fmean(short))
    bound = AT_MOST if any(word == AT_MOST for _, word in answers) else INTERPOLATED
    return Reach(steps=figure(found), bound=bound, reached=len(found), seeds=len(points), short_of=None)


def by_seed(runs: Sequence[Ended]) -> dict[int, list[tuple[float, float]]]:
    """The (steps, final) points of each seed, in the order of the seeds."""
    seeds = sorted({run["seed"] for run in runs})
    return {seed: [(run["steps"], run["final"]) for run in runs if run["seed"] == seed] for seed in seeds}


def saved(answer: Reach, arm: Costs, baseline: Costs) -> Savings | None:
    """Fractions of the baseline's cost that are saved: steps, FLOPs, and FLOPs with the source's training counted."""
    if answer["steps"] is None:
        return None
    steps = answer["steps"]["by_seed"]
    return {
        "steps": figure([1 - n / baseline.steps for n in steps]),
        "flops": figure([1 - n * arm.per_step / baseline.total for n in steps]),
        "flops_with_source": figure(
            [1 - (n * arm.per_step + arm.source) / (baseline.total + baseline.source) for n in steps]
        ),
    }


@dataclass(frozen=True)
class Costs:
    """FLOPs of a step, of the source's training, and the length of the longest run."""

    per_step: float
    source: float
    steps: int

    @property
    def total(self) -> float:
        return self.per_step * self.steps
