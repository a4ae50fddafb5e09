"""What a source is worth: the steps from scratch that reach what a grown target reaches, less its own steps.

The saving of a growth behaves as a head start in steps, which a percentage hides: it shrinks as the run grows longer.
The yardstick is the best training from scratch at every length that was run; between two lengths the steps are
interpolated, and beyond them only bounded. The net saving counts the FLOPs of every phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lemonx_lab.experiments.answer import INTERPOLATED, by_seed, figure, steps_to
from lemonx_lab.experiments.result_file import ArmResult, Better, Figure, Result


@dataclass(frozen=True)
class HeadStart:
    """One arm at one length: steps ahead of scratch, and the part of scratch's FLOPs that all phases together save.

    `bound`: "" where every seed's figure lies between two runs from scratch; else "at least" or "at most", and
    both figures are the bound's.
    """

    arm: str
    source: str
    steps: int
    ahead: Figure
    net: Figure
    bound: str


def head_starts(content: Result) -> list[HeadStart]:
    """Every grown arm and length of a result that has training from scratch to compare with."""
    scratch = [arm for arm in content["arms"] if arm["method"] == "scratch"]
    better = content["experiment"]["better"]
    if not scratch:
        return []
    yardstick = _yardstick(scratch, better)
    per_step = min(run["flops"] / run["steps"] for arm in scratch for run in arm["runs"])
    return [
        _head_start(arm, at["steps"], yardstick, per_step, better)
        for arm in content["arms"]
        if arm["method"] != "scratch"
        for at in arm["at"]
    ]


def measured_head_starts(content: Result) -> list[HeadStart]:
    """The same, only where training from scratch was run at several lengths: one alone is no yardstick."""
    lengths = {at["steps"] for arm in content["arms"] if arm["method"] == "scratch" for at in arm["at"]}
    return head_starts(content) if len(lengths) > 1 else []


def _yardstick(scratch: Sequence[ArmResult], better: Better) -> dict[int, list[tuple[float, float]]]:
    """The best (steps, final) from scratch, by seed and length; schedules are not mixed within a length."""
    best = min if better == "lower" else max
    lengths = sorted({at["steps"] for arm in scratch for at in arm["at"]})
    found: dict[int, list[tuple[float, float]]] = {}
    for length in lengths:
        there = [arm for arm in scratch if any(at["steps"] == length for at in arm["at"])]
        chosen = best(there, key=lambda arm: next(at["mean"] for at in arm["at"] if at["steps"] == length))
        for seed, points in by_seed(chosen["runs"]).items():
            found.setdefault(seed, []).extend(point for point in points if point[0] == length)
    return found


def _head_start(
    arm: ArmResult, length: int, yardstick: dict[int, list[tuple[float, float]]], per_step: float, better: Better
) -> HeadStart:
    ahead: list[float] = []
    net: list[float] = []
    bounds: set[str] = set()
    for run in (run for run in arm["runs"] if run["steps"] == length):
        points = yardstick[run["seed"]]
        reached, word = steps_to(run["final"], points, better)
        if word != INTERPOLATED:
            bounds.add("at most" if reached is not None else "at least")
        equal = max(steps for steps, _ in points) if reached is None else reached
        ahead.append(equal - length)
        net.append(1 - (run["flops"] + run["source_flops"]) / (equal * per_step))
    bound = " and ".join(sorted(bounds))
    return HeadStart(arm["label"], arm["source"], length, figure(ahead), figure(net), bound)
