"""The paper's question: how many steps until the grown target is as good as a model trained from scratch?

Every length is a separate run whose schedule ends there; where a longer schedule crosses the mark is another question.
Between two lengths the answer is interpolated (log steps against the metric). Runs with the same seed share the source
and the order of the data, so every seed has its own mark: the metric that the baseline's longest run reaches with it.
The spread of an answer is the standard deviation over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from lemonx_lab.experiments.result_file import (
    SCRATCH,
    ArmResult,
    Better,
    Figure,
    Reach,
    Result,
    RunResult,
    Savings,
)

INTERPOLATED, AT_MOST, AT_LEAST, NOT_REACHED = "interpolated", "at most", "at least", "not reached"
# (steps, final metric), one pair a run.
Points = Sequence[tuple[float, float]]


def figure(values: Sequence[float]) -> Figure:
    spread = stdev(values) if len(values) > 1 else None
    return Figure(mean=fmean(values), spread=spread, by_seed=list(values))


def by_seed(runs: Iterable[RunResult]) -> dict[int, list[tuple[float, float]]]:
    """The points of each seed, in the order of the seeds."""
    found: dict[int, list[tuple[float, float]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        found.setdefault(run.seed, []).append((run.steps, run.final))
    return found


def steps_to(mark: float, points: Points, better: Better) -> tuple[float | None, str]:
    """Steps at which the points pass the mark.

    >>> steps_to(1.5, [(100, 2.0), (400, 1.0)], "lower")
    (200.0, 'interpolated')
    >>> steps_to(3.0, [(100, 2.0), (400, 1.0)], "lower")
    (100, 'at most')
    """
    sign = 1.0 if better == "lower" else -1.0
    before: tuple[float, float] | None = None
    for steps, value in sorted(points):
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


def reach(marks: Mapping[int, float], points: Mapping[int, Points], better: Better) -> Reach:
    """The answer of one arm, from the mark and the points of each seed."""
    answers = [steps_to(marks[seed], points[seed], better) for seed in points]
    found = [steps for steps, _ in answers if steps is not None]
    if len(found) < len(points):
        sign, best = (1.0, min) if better == "lower" else (-1.0, max)
        figures = {seed: [value for _, value in points[seed] if not math.isnan(value)] for seed in points}
        short = [sign * (best(figures[seed] or [math.nan]) - marks[seed]) for seed in points]
        return Reach(steps=None, bound=NOT_REACHED, reached=len(found), seeds=len(points), short_of=fmean(short))
    bound = AT_MOST if any(word == AT_MOST for _, word in answers) else INTERPOLATED
    return Reach(steps=figure(found), bound=bound, reached=len(found), seeds=len(points), short_of=None)


@dataclass(frozen=True)
class Costs:
    """FLOPs of a step, of the source's training, and the length of the longest run."""

    per_step: float
    source: float
    steps: int

    @property
    def total(self) -> float:
        return self.per_step * self.steps


def saved(answer: Reach, arm: Costs, baseline: Costs) -> Savings | None:
    """Fractions of the baseline's cost that are saved: steps, FLOPs, and FLOPs with the source's training counted."""
    if answer.steps is None:
        return None
    steps = answer.steps.by_seed
    whole = baseline.total + baseline.source
    return Savings(
        steps=figure([1 - n / baseline.steps for n in steps]),
        flops=figure([1 - n * arm.per_step / baseline.total for n in steps]),
        flops_with_source=figure([1 - (n * arm.per_step + arm.source) / whole for n in steps]),
    )


# Beyond the mark: the worth of a source, and the price on other examples.


@dataclass(frozen=True)
class HeadStart:
    """One arm at one length: steps ahead of scratch, and the part of scratch's FLOPs that all phases together save.

    `bound` is "" where every seed's figure lies between two runs from scratch. Otherwise both figures are bounds,
    "at least" or "at most".
    """

    arm: str
    source: str
    steps: int
    ahead: Figure
    net: Figure
    bound: str


def head_starts(content: Result) -> list[HeadStart]:
    """Every grown arm and length of a result that has training from scratch to compare with.

    The saving of a growth behaves as a head start in steps, which a percentage hides: it shrinks as the run grows
    longer. The head start is the steps from scratch that reach the target's final metric, less the target's own steps.
    The yardstick is the best training from scratch at every length that was run. Between two lengths its steps are
    interpolated, and beyond them only bounded.
    """
    if not content.scratch:
        return []
    points: dict[int, list[tuple[float, float]]] = {}
    for length in sorted({at.steps for arm in content.scratch for at in arm.at}):
        best = content.best([arm for arm in content.scratch if length in arm.lengths], length)
        for seed, found in by_seed(best.runs_of(length)).items():
            points.setdefault(seed, []).extend(found)
    per_step = min(run.flops / run.steps for arm in content.scratch for run in arm.runs)
    grown = [arm for arm in content.arms if arm.method != SCRATCH]
    better = content.experiment.better
    return [_head_start(arm, at.steps, points, per_step, better) for arm in grown for at in arm.at]


def measured_head_starts(content: Result) -> list[HeadStart]:
    """The head starts, only where training from scratch was run at several lengths: one alone is no yardstick."""
    lengths = {at.steps for arm in content.scratch for at in arm.at}
    return head_starts(content) if len(lengths) > 1 else []


def _head_start(
    arm: ArmResult, length: int, points: Mapping[int, Points], per_step: float, better: Better
) -> HeadStart:
    ahead: list[float] = []
    net: list[float] = []
    bounds: set[str] = set()
    for run in arm.runs_of(length):
        reached, word = steps_to(run.final, points[run.seed], better)
        if word != INTERPOLATED:
            bounds.add(AT_LEAST if reached is None else AT_MOST)
        equal = max(steps for steps, _ in points[run.seed]) if reached is None else reached
        ahead.append(equal - length)
        net.append(1 - (run.flops + run.source_flops) / (equal * per_step))
    return HeadStart(arm.label, arm.source, length, figure(ahead), figure(net), " and ".join(sorted(bounds)))


# An arm keeps the old text if the old loss rises by at most OLD. It learns the new text if the loss there is at most
# NEW above that of full fine-tuning.
OLD, NEW = 0.005, 0.02


@dataclass(frozen=True)
class Forgetting:
    """One arm at its longest: `new` is its final loss relative to the baseline's, `old` the change of the old loss.

    Both are fractions, seed by seed: 0.02 is two percent worse.
    """

    arm: str
    beside: str
    new: Figure
    old: Figure

    @property
    def learns_and_keeps(self) -> bool:
        return self.new.mean <= NEW and self.old.mean <= OLD


def forgettings(content: Result) -> list[Forgetting]:
    """Every arm of a result whose runs were evaluated beside their own examples."""
    found: list[Forgetting] = []
    for arm in content.arms:
        runs = arm.runs_of(arm.lengths[-1])
        new = [run.final / mark - 1 for run, mark in zip(runs, content.mark.by_seed, strict=True)]
        for name in runs[0].beside:
            old = [after / before - 1 for before, after in (run.beside[name] for run in runs)]
            found.append(Forgetting(arm.label, name, figure(new), figure(old)))
    return found
