"""Does the paper's claim hold here? One verdict per comparison, from the numbers alone.

Runs of one seed share the source and the order of the data, so arms are compared seed by seed: LEMON is ahead of
another arm if the mean of these differences in steps to the mark exceeds their standard deviation. Where bounds leave
that open (the shortest run had passed the mark already, the longest had not), the final quality of the longest runs of
equal length decides, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lemonx_lab.experiments.answer import AT_MOST, by_seed, figure, steps_to
from lemonx_lab.experiments.forgetting import NEW, OLD, forgettings
from lemonx_lab.experiments.result_file import ArmResult, Result
from lemonx_lab.experiments.wording import AT_LEAST, is_baseline, percent

AHEAD, BEHIND, NOISE, OPEN = "ahead", "behind", "noise", "open"
STEPS, FINAL = "steps", "final"
LEMON = "lemon"

# What each outcome says of the claim that LEMON is ahead, and of a variant of LEMON against the first.
CLAIM = {AHEAD: "reproduces", BEHIND: "does not reproduce", NOISE: "within seed noise", OPEN: "undecided"}
OVERALL = {**CLAIM, NOISE: "partly within seed noise"}
VARIANT = {AHEAD: "better", BEHIND: "worse", NOISE: "within seed noise", OPEN: "undecided"}
# After fine-tuning, the claim is only that nothing is lost.
TUNED = {AHEAD: "better", BEHIND: "worse: does not reproduce", NOISE: "equal within seed noise", OPEN: "undecided"}


@dataclass(frozen=True)
class Need:
    """Steps that an arm needs, by seed; `less`, `more`: some seed needs at most, or at least, what is counted."""

    steps: tuple[float, ...]
    less: bool = False
    more: bool = False


@dataclass(frozen=True)
class ArmComparison:
    """One arm compared with another: the outcome, the advantage and the noise to judge it by.

    `basis`: steps to the mark, or final quality at equal `length`. `noise` is None where a single seed leaves none.
    `bound`: what a bound on either side makes of the advantage, `at least` or `at most`; `known`: its sign is known.
    """

    arm: str
    other: str
    outcome: str
    basis: str
    advantage: float
    noise: float | None
    length: int | None = None
    bound: str = ""
    known: bool = True


def need(content: Result, arm: ArmResult) -> Need:
    """An arm's steps to the mark over its seeds; a seed that does not reach it counts with its longest run."""
    points = by_seed(arm["runs"])
    if is_baseline(content, arm):
        return Need((float(content["steps"]),) * len(points))
    better = content["experiment"]["better"]
    counted: list[float] = []
    less = more = False
    for of_seed, mark in zip(points.values(), content["mark"]["by_seed"], strict=True):
        found, bound = steps_to(mark, of_seed, better)
        less, more = less or bound == AT_MOST, more or found is None
        counted.append(max(steps for steps, _ in of_seed) if found is None else found)
    return Need(tuple(counted), less, more)


def judge(content: Result, arm: ArmResult, other: ArmResult) -> ArmComparison:
    """Is `arm` ahead of `other`?"""
    first, second = need(content, arm), need(content, other)
    advantage, noise = paired(second.steps, first.steps)
    # One seed leaves no noise to judge by, but it leans to a side.
    leans = outcome_of(advantage, noise or 0.0)
    larger, smaller = first.less or second.more, first.more or second.less
    # A bound decides only if the truth behind it can but add to the difference.
    unsure = {AHEAD: smaller, BEHIND: larger, NOISE: larger or smaller, OPEN: True}[leans]
    if unsure and (lengths := common_lengths(arm, other)):
        return at_equal_length(content, arm, other, max(lengths))
    outcome = OPEN if unsure or noise is None else leans
    bound = {(True, False): AT_LEAST, (False, True): AT_MOST}.get((larger, smaller), "")
    return ArmComparison(arm["label"], other["label"], outcome, STEPS, advantage, noise, None, bound, not unsure)


def at_equal_length(content: Result, arm: ArmResult, other: ArmResult, length: int) -> ArmComparison:
    first, second = (next(at for at in a["at"] if at["steps"] == length)["by_seed"] for a in (arm, other))
    better, worse = (first, second) if content["experiment"]["better"] == "higher" else (second, first)
    advantage, noise = paired(better, worse)
    return ArmComparison(arm["label"], other["label"], outcome_of(advantage, noise), FINAL, advantage, noise, length)


def common_lengths(arm: ArmResult, other: ArmResult) -> set[int]:
    return {at["steps"] for at in arm["at"]} & {at["steps"] for at in other["at"]}


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float | None]:
    """The mean of the differences first - second, seed by seed, and their spread (None for a single seed).

    >>> paired((3.0, 5.0), (1.0, 3.0))
    (2.0, 0.0)
    """
    differences = figure([a - b for a, b in zip(first, second, strict=True)])
    return differences["mean"], differences["spread"]


def outcome_of(advantage: float, noise: float | None) -> str:
    """
    >>> outcome_of(10.0, 5.0), outcome_of(-10.0, 5.0), outcome_of(3.0, 5.0), outcome_of(10.0, None)
    ('ahead', 'behind', 'noise', 'open')
    """
    if noise is None or math.isnan(advantage):
        return OPEN
    if abs(advantage) <= noise:
        return NOISE
    return AHEAD if advantage > 0 else BEHIND


def lemons(content: Result) -> list[ArmResult]:
    return [arm for arm in content["arms"] if arm["method"] == LEMON]


def challengers(content: Result) -> list[ArmResult]:
    """The LEMON arms that do not themselves set the mark."""
    return [arm for arm in lemons(content) if not is_baseline(content, arm)]


def claims(content: Result) -> list[ArmComparison]:
    """Every LEMON arm against what starts from the same source, and against what needs none.

    Where an experiment compares variants with a reference, that arm alone.
    """
    reference = content["experiment"].get("reference")
    if forgettings(content):  # where two losses are the question, steps are not
        return []
    return [
        judge(content, arm, other)
        for arm in lemons(content)
        if reference in (None, arm["label"])
        for other in content["arms"]
        if other is not arm and _rivals(content, arm, other)
    ]


def _rivals(content: Result, arm: ArmResult, other: ArmResult) -> bool:
    if is_baseline(content, other) or is_baseline(content, arm):
        return not is_baseline(content, arm)
    return other["method"] != LEMON and (other["method"] == "scratch" or other["source"] == arm["source"])


def references(content: Result) -> dict[str, ArmResult]:
    """By source, the LEMON arm that its others are compared with: the reference, or the first."""
    named = [arm for arm in lemons(content) if arm["label"] == content["experiment"].get("reference")]
    first: dict[str, ArmResult] = {}
    for arm in [*named, *challengers(content)]:
        first.setdefault(arm["source"], arm)
    return first


def variants(content: Result) -> list[ArmComparison]:
    """The further LEMON arms of a source against its reference."""
    first = references(content)
    return [
        judge(content, arm, first[arm["source"]]) for arm in challengers(content) if arm is not first[arm["source"]]
    ]


def finals(content: Result) -> list[ArmComparison]:
    """The same pairs, and LEMON arms against other methods from their source, by final quality at equal lengths."""
    arms = {arm["label"]: arm for arm in content["arms"]}
    pairs = [(arms[c.arm], arms[c.other]) for c in variants(content)]
    others = [arm for arm in content["arms"] if arm["method"] not in (LEMON, "scratch")]
    pairs += [(arm, other) for other in others for arm in lemons(content) if arm["source"] == other["source"]]
    return [
        at_equal_length(content, arm, other, length)
        for arm, other in pairs
        for length in sorted(common_lengths(arm, other))
    ]


def tuned(content: Result) -> list[tuple[str, ArmComparison]]:
    """LEMON against the others after fine-tuning, by task; every such metric but a loss is better when higher."""
    found = []
    for arm in lemons(content):
        for other in content["arms"]:
            if other is not arm and _rivals(content, arm, other):
                for task, first in arm["downstream"].items():
                    second = other["downstream"][task]
                    better, worse = (second, first) if "loss" in first["metric"] else (first, second)
                    advantage, noise = paired(better["by_seed"], worse["by_seed"])
                    outcome = outcome_of(advantage, noise)
                    found.append((task, ArmComparison(arm["label"], other["label"], outcome, FINAL, advantage, noise)))
    return found


def answer(content: Result) -> tuple[str, str]:
    """What becomes of an experiment's claim: that nothing is forgotten, or that LEMON needs fewer steps."""
    found = forgettings(content)
    if not found:
        return headline(claims(content))
    kept = [one.arm for one in found if one.learns_and_keeps]
    does = (
        f"within {percent(NEW)} % of {content['experiment']['baseline']}, and the old loss at most {percent(OLD)} % up"
    )
    return (AHEAD, f"Of {len(found)} ways, this does both ({does}): {' / '.join(kept)}.") if kept else (
        BEHIND, f"None of {len(found)} ways does both ({does})."
    )  # fmt: skip


def headline(comparisons: Sequence[ArmComparison]) -> tuple[str, str]:
    """The worst outcome of all, and one sentence on them."""
    by = {outcome: [c for c in comparisons if c.outcome == outcome] for outcome in (BEHIND, NOISE, OPEN, AHEAD)}
    if not comparisons:
        return OPEN, "No run of this experiment tests whether LEMON needs fewer steps."
    total = len(comparisons)
    if len(by[AHEAD]) == total:
        return AHEAD, f"The claim reproduces here: LEMON is ahead in {_count(total)}."
    parts = []
    for outcome, words in (
        (BEHIND, "The claim does not reproduce here against {}."),
        (NOISE, "The difference from {} is within seed noise."),
        (OPEN, "The comparison with {} is undecided."),
    ):
        if by[outcome]:
            parts.append(words.format(_listed(by[outcome], several=len({c.arm for c in comparisons}) > 1)))
    if single := [c for c in by[OPEN] if c.noise is None]:
        ahead = sum(c.known and c.advantage > 0 for c in single)
        parts.append(f"One seed leaves no spread to judge by; on it LEMON is ahead of {ahead} of {len(single)}.")
    if by[AHEAD]:
        parts.append(f"The claim reproduces in {len(by[AHEAD])} of {total} comparisons.")
    return next(outcome for outcome in (BEHIND, NOISE, OPEN) if by[outcome]), " ".join(parts)


def _count(total: int) -> str:
    return {1: "the one comparison made", 2: "both comparisons"}.get(total, f"all {total} comparisons")


def _listed(comparisons: Sequence[ArmComparison], *, several: bool) -> str:
    """`FPI, AKI`; with the arm where several LEMON arms are compared: `scratch (LEMON, indivisible)`."""
    names = [f"{c.other} ({c.arm})" if several else c.other for c in comparisons]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
