"""Growths in results: one for every source, with the head start of the best LEMON arm from it.

Head starts are over training from scratch under WSD, since one against the cosine would promise too much. They are
those of means over seeds: a single seed's runs differ by more than lengths that are near each other do. Between two
lengths the steps are interpolated, and a little beyond them extrapolated, by the slope of the two next to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from lemonx.training.prediction import Growth
from lemonx.training.schedule import COOLDOWN
from lemonx_lab.experiments.result_file import LEMON, ArmResult, Result, SourceResult
from lemonx_lab.experiments.spec import GROWN_FROM

# Final metrics by length and seed.
Finals = dict[int, dict[int, float]]
# How far beyond the lengths that were run a length is still told from them, as a factor.
BEYOND = 1.15


@dataclass(frozen=True)
class Length:
    """Steps that reach a level, and the error of their mean over seeds."""

    steps: float
    error: float


def length_at(levels: Mapping[int, float], finals: Finals) -> Length | None:
    """The length whose runs end where these seeds do, in the mean, if some runs are near enough.

    >>> length_at({0: 1.5}, {100: {0: 2.0}, 400: {0: 1.0}})
    Length(steps=200.0, error=0.0)
    """
    seeds = sorted(set(levels).intersection(*finals.values()))
    if not seeds or len(finals) < 2:
        return None
    points = [(steps, fmean(finals[steps][seed] for seed in seeds)) for steps in sorted(finals)]
    level = fmean(levels[seed] for seed in seeds)
    steps = _crossing(level, points)
    if steps is None or not points[0][0] / BEYOND <= steps <= points[-1][0] * BEYOND:
        return None
    # Seeds are paired: the error is the variation of the difference from the nearest length among them.
    near = min(finals, key=lambda one: abs(math.log(one / steps)))
    apart = [levels[seed] - finals[near][seed] for seed in seeds]
    off = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
    ends = [_crossing(level + sign * off, points) or steps for sign in (1, -1)]
    return Length(steps, abs(ends[1] - ends[0]) / 2)


def _crossing(level: float, points: Sequence[tuple[int, float]]) -> float | None:
    """The steps at which a line through two neighbours, in the logarithm of steps, passes the level."""
    pairs = list(pairwise(points))
    inside = [pair for pair in pairs if min(pair[0][1], pair[1][1]) <= level <= max(pair[0][1], pair[1][1])]
    first, last = points[0][1], points[-1][1]
    (before, high), (after, low) = (
        inside[0] if inside else pairs[0] if (level - first) * (last - first) < 0 else pairs[-1]
    )
    if high == low:
        return None
    return before * (after / before) ** ((high - level) / (high - low))


def measured_growths(contents: Sequence[Result]) -> list[Growth]:
    """Every source of these results whose head start is known."""
    series: dict[object, Finals] = {}
    for content in contents:
        for arm in content.scratch:
            if _train(content, arm.label).get("decay") == "wsd":
                _add(series.setdefault(_identity(content, arm), {}), arm)
    best: dict[object, Growth] = {}
    for content in contents:
        base = next(filter(content.is_baseline, content.arms))
        setting = _identity(content, base)
        if setting not in series:
            continue
        for arm in content.arms:
            if arm.method == LEMON and (found := _growth(content, arm, base, series[setting])) is not None:
                # Experiments share sources, and with them a growth; it counts with its best start.
                key = setting, found.share, found.steps, _has_decayed(content, arm.source)
                best[key] = max(best.get(key, found), found, key=lambda one: one.ahead)
    return list(best.values())


def _growth(content: Result, arm: ArmResult, base: ArmResult, scratch: Finals) -> Growth | None:
    source = content.sources.get(arm.source)
    if not isinstance(source, SourceResult) or _is_grown(content, arm.source):
        return None
    own: Finals = {}
    _add(own, arm)
    equal = float(content.steps)
    reached = length_at(scratch[content.steps], own)
    if reached is not None:
        ahead = equal - reached.steps
    else:
        # No run ends near the mark: which length is the longest one ahead of? Shorter ones are little but decay.
        longest = max(own)
        reached = length_at(own[longest], scratch)
        if reached is None:
            return None
        equal, ahead = reached.steps, reached.steps - longest
    per_step = min(run.flops / run.steps for run in base.runs)
    return Growth(
        share=source.flops / source.steps / per_step,
        steps=source.steps,
        scratch=equal,
        name=f"{content.experiment.name}: {arm.label}",
        ahead=ahead,
        error=reached.error,
    )


def _add(finals: Finals, arm: ArmResult) -> None:
    for run in arm.runs:
        finals.setdefault(run.steps, {})[run.seed] = run.final


def _identity(content: Result, arm: ArmResult) -> object:
    """The common mark of runs of several lengths and experiments that are one run until it decays."""
    run = arm.runs[0]
    return run.flops / run.steps, _train(content, arm.label).get("cooldown", COOLDOWN), _losses(content, arm)


def _losses(content: Result, arm: ArmResult) -> tuple[float, ...]:
    curve = next((curve for curve in content.curves if curve.arm == arm.label), None)
    return tuple(curve.validation_loss[:3]) if curve else ()


def _train(content: Result, label: str) -> dict[str, Any]:
    recipe: Any = content.recipe
    own = next(arm for arm in recipe["arms"] if arm["label"] == label)
    return {**recipe["train"], **recipe["target"]["train"], **own.get("train", {})}


def _is_grown(content: Result, source: str) -> bool:
    sources = content.recipe.get("sources")
    one = sources.get(source) if isinstance(sources, dict) else None
    return isinstance(one, dict) and GROWN_FROM in one


def _has_decayed(content: Result, source: str) -> bool:
    recipe: Any = content.recipe
    return {**recipe["train"], **recipe["sources"][source]}.get("decay") != "constant"
