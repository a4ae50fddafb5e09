"""The line that answers an experiment: what is saved against scratch, and who ends lower than whom.

Which of many arms is the best is chosen after the runs, on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator

from lemonx_lab.experiments import wording
from lemonx_lab.experiments.answer import AT_MOST
from lemonx_lab.experiments.forgetting import forgettings
from lemonx_lab.experiments.head_start import measured_head_starts
from lemonx_lab.experiments.result_file import ArmResult, Result
from lemonx_lab.experiments.verdict import (
    AHEAD,
    BEHIND,
    LEMON,
    NOISE,
    OPEN,
    ArmComparison,
    answer,
    at_equal_length,
    challengers,
    common_lengths,
    lemons,
    references,
)

WORDS = {
    AHEAD: "{} better than {}",
    BEHIND: "{} worse than {}",
    NOISE: "level with {1} ({0})",
    OPEN: "undecided against {1} ({0})",
}


def answer_line(content: Result) -> tuple[str, str, str]:
    """Steps saved, FLOPs with the source counted, and against the best other method; empty where nothing is told."""
    rival = answer(content)[1] if forgettings(content) else rivals_text(content)
    return (*saved_lines(content), rival)


def best_against_best(content: Result) -> Iterator[ArmComparison]:
    """For each source: its lowest LEMON arm against the lowest of the other methods that start from it.

    Where there is no other method, against the LEMON arm that its variants are compared with.
    """
    others = [arm for arm in content["arms"] if arm["method"] not in (LEMON, "scratch")]
    rivals = others or list(references(content).values())
    for source in dict.fromkeys(arm["source"] for arm in content["arms"]):
        pairs = [
            (max(lengths), arm, other)
            for arm in lemons(content)
            for other in rivals
            if arm is not other and arm["source"] == source == other["source"]
            if (lengths := common_lengths(arm, other))
        ]
        if pairs:
            longest = max(length for length, _, _ in pairs)
            there = [(arm, other) for length, arm, other in pairs if length == longest]
            arm, other = (_best(content, [pair[side] for pair in there], longest) for side in (0, 1))
            yield at_equal_length(content, arm, other, longest)


def _best(content: Result, arms: list[ArmResult], length: int) -> ArmResult:
    best = min if content["experiment"]["better"] == "lower" else max
    return best(arms, key=lambda arm: next(at["mean"] for at in arm["at"] if at["steps"] == length))


def rivals_text(content: Result) -> str:
    """`own copies: 0.0401 ± 0.0112 better than AKI`; one part for each source, what does not hold first."""
    order = (BEHIND, NOISE, OPEN, AHEAD)
    found = sorted(best_against_best(content), key=lambda c: order.index(c.outcome))
    return "; ".join(_text(c) for c in found)


def _text(c: ArmComparison) -> str:
    lead = wording.metric(abs(c.advantage) if c.outcome in (AHEAD, BEHIND) else c.advantage)
    return f"{c.arm}: {WORDS[c.outcome].format(lead + wording.plus_minus(c.noise, wording.metric), c.other)}"


def saved_lines(content: Result) -> tuple[str, str]:
    """What the best lossless start saves against the best from scratch: of its steps, and with the source counted.

    If no start reaches the mark with every seed, how near the nearest comes. Of whole runs, the net of all phases, and
    that of the best other way to go on from the source.
    """
    arms = challengers(content)
    if not arms or not wording.has_savings(content):
        return "", ""
    steps, counted = _saved(content, arms)
    nets = [one for one in measured_head_starts(content) if AT_MOST not in one.bound]
    grown = [one for one in nets if one.arm in {arm["label"] for arm in arms}]
    sides = (grown, [one for one in nets if one not in grown]) if grown else ()
    best = [max(side, key=lambda one: one.net["mean"]) for side in sides if side]
    return steps, "; ".join(f"{one.arm}: {wording.net_text(one)}" for one in best) or counted


def _saved(content: Result, arms: list[ArmResult]) -> tuple[str, str]:
    if shown := [(arm["saved"]["steps"]["mean"], arm) for arm in arms if arm["saved"]]:
        arm = max(shown, key=lambda pair: pair[0])[1]
        return f"{arm['label']}: {wording.saved_text(arm, 'steps')}", wording.saved_text(arm, "flops_with_source")
    arm = max(arms, key=lambda arm: (arm["reach"]["reached"], -(arm["reach"]["short_of"] or 0.0)))
    return f"{arm['label']}: the mark is {wording.not_reached(arm)}", ""
