"""The line that answers an experiment: the best lossless start against the best of the others, after equal steps."""

from __future__ import annotations

from typing import Any

import pytest

import pretend
from lab.test_report import DOCS
from lemonx_lab.experiments import report
from lemonx_lab.experiments.result_file import ArmResult, Result
from lemonx_lab.experiments.verdict import answer_line, best_against_best, rivals_text, saved_lines


def arm(label: str, method: str, finals: dict[int, tuple[float, float]], source: str = "s") -> ArmResult:
    """Two seeds; `finals` by steps."""
    runs = [
        pretend.ended(seed, steps, two[seed], flops=10.0 * steps, source_flops=100.0)
        for steps, two in finals.items()
        for seed in (0, 1)
    ]
    found = pretend.arm(label, method, runs, source)
    found.reach.short_of = 0.25
    return found


def content(*arms: ArmResult, **asked: Any) -> Result:
    return pretend.compared([*arms], **asked).model_copy(update={"steps": 100})


SCRATCH = arm("scratch", "scratch", {100: (1.0, 1.0)})


def test_the_lowest_of_each_side_at_the_greatest_common_length() -> None:
    """Not the lowest at a length that the others lack, nor one from another source."""
    found = best_against_best(
        content(
            SCRATCH,
            arm("long", "lemon", {90: (0.1, 0.1)}),
            arm("far", "lemon", {50: (1.5, 1.6)}),
            arm("near", "lemon", {30: (1.0, 1.0), 50: (1.2, 1.3)}),
            arm("elsewhere", "lemon", {50: (0.9, 0.9)}, source="other"),
            arm("bad", "aki", {50: (2.0, 2.0)}),
            arm("good", "fpi", {30: (0.5, 0.5), 50: (1.4, 1.6)}),
        )
    )
    [one] = found
    assert (one.arm, one.other, one.length, one.outcome) == ("near", "good", 50, "ahead")
    assert one.advantage == pytest.approx(0.25) and one.noise == pytest.approx(0.05 * 2**0.5)


def test_where_more_is_better_the_highest_is_the_best() -> None:
    arms = (arm("a", "lemon", {50: (0.5, 0.5)}), arm("b", "lemon", {50: (0.7, 0.8)}), arm("c", "aki", {50: (0.9, 0.9)}))
    [one] = best_against_best(content(SCRATCH, *arms, better="higher"))
    assert (one.arm, one.outcome) == ("b", "behind")


def test_variants_alone_are_compared_with_the_reference_of_their_source() -> None:
    arms = (
        arm("plain", "lemon", {50: (1.0, 1.0)}),
        arm("own", "lemon", {50: (0.8, 0.9)}),
        arm("wide", "lemon", {50: (1.0, 1.1)}, source="t"),
        arm("wide own", "lemon", {50: (1.0, 1.1)}, source="t"),
    )
    assert rivals_text(content(SCRATCH, *arms, reference="plain")) == (
        "wide own: level with wide (0.0000 ± 0.0000); own: 0.1500 ± 0.0707 better than plain"
    )


def test_what_does_not_hold_stands_first() -> None:
    arms = (
        arm("a", "lemon", {50: (1.0, 1.0)}),
        arm("b", "aki", {50: (1.1, 1.1)}),
        arm("c", "lemon", {50: (1.0, 1.0)}, source="t"),
        arm("d", "gstack", {50: (0.9, 0.9)}, source="t"),
    )
    assert rivals_text(content(SCRATCH, *arms)) == ("c: 0.1000 ± 0.0000 worse than d; a: 0.1000 ± 0.0000 better than b")


def test_nothing_is_saved_without_scratch_or_with_a_mark_that_is_not_reached() -> None:
    grown = arm("a", "lemon", {50: (1.2, 1.3)})
    assert saved_lines(content(SCRATCH, grown)) == ("a: the mark is not reached (0.2500 short)", "")
    assert saved_lines(content(grown, baseline="a")) == ("", "")
    short = arm("short", "scratch", {50: (1.2, 1.3)})
    assert answer_line(content(SCRATCH, short)) == ("", "", "")  # nothing was grown


def test_of_whole_runs_the_net_is_told_beside_that_of_the_source_alone() -> None:
    said = content(
        arm("scratch", "scratch", {50: (2.0, 2.0), 100: (1.0, 1.0)}),
        arm("a", "lemon", {20: (1.5, 1.5)}),
        arm("alone", "none", {10: (1.5, 1.5)}),
    )
    # Halfway between 50 and 100, in the logarithm: 70.7 steps, against 20 and the 10 of the source, and 10 and 10.
    assert saved_lines(said)[1] == "a: 57.6 ± 0.0 %; alone: 71.7 ± 0.0 %"


def test_the_results_of_the_docs() -> None:
    """By the figures that the tables there have."""
    lm = report.read(DOCS / "results" / "lm")
    assert [(c.arm, c.other) for c in best_against_best(lm)] == [
        ("own copies, no warm-up", "AKI"),
        ("width: LEMON", "width: HyperCloning"),
        ("depth: LEMON", "depth: G_stack"),
    ]
    steps, counted = saved_lines(lm)
    best = next(a for a in lm.arms if a.label == "own copies, no warm-up").saved
    assert best is not None and f"{100 * best.steps.mean:.1f}" in steps
    assert f"{100 * best.flops_with_source.mean:.1f}" in counted
