"""Does the paper's claim hold here? One verdict per comparison, from the numbers alone.

Runs of one seed share the source and the order of the data, so arms are compared seed by seed. LEMON is ahead of
another arm if the mean difference in steps to the mark exceeds the standard deviation of the differences. Bounds can
leave that open: the shortest run had passed the mark already, or the longest had not. Then the final quality of the
longest runs of equal length decides, if there are any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lemonx_lab.experiments import wording
from lemonx_lab.experiments.answer import (
    AT_LEAST,
    AT_MOST,
    NEW,
    OLD,
    by_seed,
    figure,
    forgettings,
    measured_head_starts,
    steps_to,
)
from lemonx_lab.experiments.result_file import LEMON, SCRATCH, ArmResult, Result
from lemonx_lab.experiments.wording import percent

AHEAD, BEHIND, NOISE, OPEN = "ahead", "behind", "noise", "open"
# The order in which outcomes are told: what does not hold first.
WORST_FIRST = (BEHIND, NOISE, OPEN, AHEAD)
STEPS, FINAL = "steps", "final"

# The words of each outcome, for the claim that LEMON is ahead, and for a variant of LEMON against the first.
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
    points = by_seed(arm.runs)
    if content.is_baseline(arm):
        return Need((float(content.steps),) * len(points))
    counted: list[float] = []
    less = more = False
    for of_seed, mark in zip(points.values(), content.mark.by_seed, strict=True):
        found, bound = steps_to(mark, of_seed, content.experiment.better)
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
    unsure = {AHEAD: smaller, BEHIND: larger, NOISE: larger or smaller}[leans]
    if unsure and (lengths := common_lengths(arm, other)):
        return at_equal_length(content, arm, other, max(lengths))
    outcome = OPEN if unsure or noise is None else leans
    bound = {(True, False): AT_LEAST, (False, True): AT_MOST}.get((larger, smaller), "")
    return ArmComparison(arm.label, other.label, outcome, STEPS, advantage, noise, None, bound, not unsure)


def at_equal_length(content: Result, arm: ArmResult, other: ArmResult, length: int) -> ArmComparison:
    pair = arm.after(length).by_seed, other.after(length).by_seed
    advantage, noise = paired(*(pair if content.experiment.better == "higher" else reversed(pair)))
    return ArmComparison(arm.label, other.label, outcome_of(advantage, noise), FINAL, advantage, noise, length)


def common_lengths(arm: ArmResult, other: ArmResult) -> set[int]:
    return {*arm.lengths} & {*other.lengths}


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float | None]:
    """The mean of the differences first - second, seed by seed, and their spread (None for a single seed).

    >>> paired((3.0, 5.0), (1.0, 3.0))
    (2.0, 0.0)
    """
    differences = figure([a - b for a, b in zip(first, second, strict=True)])
    return differences.mean, differences.spread


def outcome_of(advantage: float, noise: float | None) -> str:
    """
    >>> outcome_of(10.0, 5.0), outcome_of(-10.0, 5.0), outcome_of(3.0, 5.0), outcome_of(10.0, None)
    ('ahead', 'behind', 'noise', 'open')
    """
    if noise is None:
        return OPEN
    if abs(advantage) <= noise:
        return NOISE
    return AHEAD if advantage > 0 else BEHIND


# Which arms are compared.


def lemons(content: Result) -> list[ArmResult]:
    return [arm for arm in content.arms if arm.method == LEMON]


def challengers(content: Result) -> list[ArmResult]:
    """The LEMON arms that do not themselves set the mark."""
    return [arm for arm in lemons(content) if not content.is_baseline(arm)]


def claims(content: Result) -> list[ArmComparison]:
    """Every LEMON arm against the arms that start from the same source, and against those that need none.

    Where an experiment compares variants with a reference, only that arm.
    """
    reference = content.experiment.reference
    if forgettings(content):  # where two losses are the question, steps are not
        return []
    return [judge(content, arm, other) for arm, other in _pairs(content) if reference in (None, arm.label)]


def _pairs(content: Result) -> Iterator[tuple[ArmResult, ArmResult]]:
    """LEMON arms, each with its rivals."""
    for arm in challengers(content):
        for other in content.arms:
            is_rival = other.method != LEMON and (other.method == SCRATCH or other.source == arm.source)
            if other is not arm and (is_rival or content.is_baseline(other)):
                yield arm, other


def references(content: Result) -> dict[str, ArmResult]:
    """By source, the LEMON arm that its others are compared with: the reference, or the first."""
    named = [arm for arm in lemons(content) if arm.label == content.experiment.reference]
    first: dict[str, ArmResult] = {}
    for arm in [*named, *challengers(content)]:
        first.setdefault(arm.source, arm)
    return first


def variants(content: Result) -> list[ArmComparison]:
    """The further LEMON arms of a source against its reference."""
    first = references(content)
    pairs = [(arm, first[arm.source]) for arm in challengers(content)]
    return [judge(content, arm, other) for arm, other in pairs if arm is not other]


def tuned(content: Result) -> list[tuple[str, ArmComparison]]:
    """LEMON against the others after fine-tuning, by task; every such metric but a loss is better when higher."""
    found: list[tuple[str, ArmComparison]] = []
    for arm, other in _pairs(content):
        for task, first in arm.downstream.items():
            pair = first.by_seed, other.downstream[task].by_seed
            advantage, noise = paired(*(reversed(pair) if "loss" in first.metric else pair))
            outcome = outcome_of(advantage, noise)
            found.append((task, ArmComparison(arm.label, other.label, outcome, FINAL, advantage, noise)))
    return found


def best_against_best(content: Result) -> Iterator[ArmComparison]:
    """For each source: its lowest LEMON arm against the lowest of the other methods that start from it.

    Where there is no other method, against the LEMON arm that its variants are compared with. The best of many arms are
    chosen after the runs, on both sides.
    """
    others = [arm for arm in content.arms if arm.method not in (LEMON, SCRATCH)]
    rivals = others or list(references(content).values())
    for source in dict.fromkeys(arm.source for arm in content.arms):
        own = [[arm for arm in arms if arm.source == source] for arms in (lemons(content), rivals)]
        pairs = [(arm, other) for arm in own[0] for other in own[1] if arm is not other and common_lengths(arm, other)]
        if pairs:
            longest = max(max(common_lengths(*pair)) for pair in pairs)
            there = [pair for pair in pairs if longest in common_lengths(*pair)]
            arm, other = (content.best([pair[side] for pair in there], longest) for side in (0, 1))
            yield at_equal_length(content, arm, other, longest)


# In words.


def answer(content: Result) -> tuple[str, str]:
    """The outcome of an experiment's claim: that nothing is forgotten, or that LEMON needs fewer steps."""
    found = forgettings(content)
    if not found:
        return headline(claims(content))
    does = f"within {percent(NEW)} % of {content.experiment.baseline}, and the old loss at most {percent(OLD)} % up"
    kept = [one.arm for one in found if one.learns_and_keeps]
    if not kept:
        return BEHIND, f"None of {len(found)} ways does both ({does})."
    return AHEAD, f"Of {len(found)} ways, this does both ({does}): {' / '.join(kept)}."


def headline(comparisons: Sequence[ArmComparison]) -> tuple[str, str]:
    """The worst outcome of all, and one sentence on them."""
    by = {outcome: [c for c in comparisons if c.outcome == outcome] for outcome in WORST_FIRST}
    if not comparisons:
        return OPEN, "No run of this experiment tests whether LEMON needs fewer steps."
    total = len(comparisons)
    if len(by[AHEAD]) == total:
        count = {1: "the one comparison made", 2: "both comparisons"}.get(total, f"all {total} comparisons")
        return AHEAD, f"The claim reproduces here: LEMON is ahead in {count}."
    parts: list[str] = []
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
    return next(outcome for outcome in WORST_FIRST if by[outcome]), " ".join(parts)


def _listed(comparisons: Iterable[ArmComparison], *, several: bool) -> str:
    """`FPI, AKI`; with the arm where several LEMON arms are compared: `scratch (LEMON, indivisible)`."""
    names = [f"{c.other} ({c.arm})" if several else c.other for c in comparisons]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def answer_line(content: Result) -> tuple[str, str, str]:
    """Steps saved, FLOPs with the source counted, and against the best other method; empty where nothing is told."""
    rival = answer(content)[1] if forgettings(content) else rivals_text(content)
    return (*saved_lines(content), rival)


_AGAINST = {
    AHEAD: "{lead} better than {other}",
    BEHIND: "{lead} worse than {other}",
    NOISE: "level with {other} ({lead})",
    OPEN: "undecided against {other} ({lead})",
}


def rivals_text(content: Result) -> str:
    """`own copies: 0.0401 ± 0.0112 better than AKI`; one part for each source, what does not hold first."""
    parts: list[str] = []
    for c in sorted(best_against_best(content), key=lambda c: WORST_FIRST.index(c.outcome)):
        lead = wording.metric(abs(c.advantage) if c.outcome in (AHEAD, BEHIND) else c.advantage)
        lead += wording.plus_minus(c.noise, wording.metric)
        parts.append(f"{c.arm}: {_AGAINST[c.outcome].format(lead=lead, other=c.other)}")
    return "; ".join(parts)


def saved_lines(content: Result) -> tuple[str, str]:
    """The savings of the best lossless start against the best from scratch: of its steps, and with the source counted.

    If no start reaches the mark with every seed, how near the nearest comes. Of whole runs, the net of all phases, and
    that of the best other way to go on from the source.
    """
    arms = challengers(content)
    if not arms or not wording.has_savings(content):
        return "", ""
    if shown := [(arm.saved.steps.mean, arm) for arm in arms if arm.saved]:
        arm = max(shown, key=lambda pair: pair[0])[1]
        steps = f"{arm.label}: {wording.saved_text(arm, 'steps')}"
        counted = wording.saved_text(arm, "flops_with_source")
    else:
        arm = max(arms, key=lambda arm: (arm.reach.reached, -(arm.reach.short_of or 0.0)))
        steps, counted = f"{arm.label}: the mark is {wording.not_reached(arm)}", ""
    nets = [one for one in measured_head_starts(content) if AT_MOST not in one.bound]
    grown = [one for one in nets if one.arm in {arm.label for arm in arms}]
    sides = (grown, [one for one in nets if one not in grown]) if grown else ()
    best = [max(side, key=lambda one: one.net.mean) for side in sides if side]
    return steps, "; ".join(f"{one.arm}: {wording.net_text(one)}" for one in best) or counted
