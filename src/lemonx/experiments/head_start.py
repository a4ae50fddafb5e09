"""What a source is worth: the steps from scratch that reach what a grown target reaches, less its own steps.

The saving of a growth behaves as a head start in steps, which a percentage hides: it shrinks as the run grows longer.
The yardstick is the best training from scratch at every length that was run; between two lengths the steps are
interpolated, and beyond them only bounded. The net saving counts the FLOPs of every phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lemonx.experiments.answer import AT_MOST, INTERPOLATED, by_seed, figure, steps_to
from lemonx.experiments.result_file import ArmResult, Better, Figure, Result
from lemonx.experiments.spec import GROWN_FROM
from lemonx.training.prediction import Growth


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


def measured_growths(content: Result) -> list[Growth]:
    """What a result adds to the growths that predictions are made from: one for every LEMON arm, with its best start.

    An arm that reached the mark counts with the length of training from scratch, and one whose head start lies between
    two runs from scratch with the length that it is ahead of, for its longest run: shorter ones are little but decay.
    Where training from scratch was run under the cosine alone, a head start against it would promise too much.
    """
    kind = "vision" if content["recipe"]["train"]["task"].startswith("image") else "language"  # type: ignore[index,union-attr]
    base = next(arm for arm in content["arms"] if arm["label"] == content["experiment"]["baseline"])
    # Where starts alone are compared, nothing says what training from scratch needs.
    if base["method"] != "scratch" or not _is_best_schedule(content):
        return []
    per_step = min(run["flops"] / run["steps"] for run in base["runs"])
    ahead = {(one.arm, one.steps): one for one in head_starts(content) if not one.bound}
    found = []
    for arm in content["arms"]:
        source = content["sources"].get(arm["source"])
        if arm["method"] != "lemon" or source is None or "flops" not in source or _is_grown(content, arm["source"]):
            continue
        share = source["flops"] / source["steps"] / per_step
        name = f"{content['experiment']['name']}: {arm['label']}"
        reach = arm["reach"]["steps"]
        if reach is not None:
            length = content["steps"]
            bound = "at least" if arm["reach"]["bound"] == AT_MOST else ""
            found.append(Growth(name, kind, share, source["steps"] / length, 1 - reach["mean"] / length, bound))
            continue
        known = [one for at in arm["at"] if (one := ahead.get((arm["label"], at["steps"]))) is not None]
        for one in known[-1:]:
            equal = one.ahead["mean"] + one.steps
            longer = f"{name}, {one.steps} steps"
            found.append(Growth(longer, kind, share, source["steps"] / equal, one.ahead["mean"] / equal))
    return found


def _is_best_schedule(content: Result) -> bool:
    """Whether WSD is among the schedules of training from scratch: it ends lower than the cosine wherever both ran."""
    recipe: Any = content["recipe"]
    of_all = {**recipe["train"], **recipe["target"]["train"]}
    fresh = (arm for arm in recipe["arms"] if arm.get("method") == "scratch")
    return any({**of_all, **arm.get("train", {})}.get("decay") == "wsd" for arm in fresh)


def _is_grown(content: Result, source: str) -> bool:
    sources = content["recipe"].get("sources")
    one = sources.get(source) if isinstance(sources, dict) else None
    return isinstance(one, dict) and GROWN_FROM in one
