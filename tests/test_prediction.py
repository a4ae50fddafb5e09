"""Predicting a head start: the law is found again in growths that obey it, and errors widen the interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

import lemonx
from commands import runner
from lemonx.errors import BadRecipe
from lemonx.experiments import report
from lemonx.experiments.measured import length_at, measured_growths
from lemonx.training.passing import Curve, passed, read_curve
from lemonx.training.prediction import Case, Growth, fit, leave_out, measured, predict, usable

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def growths(noise: float = 0.0) -> list[Growth]:
    """Fourteen growths of the law, each off by `noise` in logs; read from a run, three times as much is kept."""
    found = []
    for i, (steps, scratch) in enumerate((s, n) for s in (100, 200, 400, 800, 1600, 3200, 6400) for n in (1000, 3000)):
        ahead = 1 / (1 / steps + 1 / (0.9 * scratch)) * math.exp(noise * (-1) ** (i // 2))
        # What stands for the source's steps in the law that reads them from a run.
        read = 1 / (1 / ahead - 1 / (2.7 * scratch))
        found.append(Growth(0.2, steps, scratch, read, f"e{i // 2}: g{i}", ahead))
    return found


def by_name(one: Growth) -> str:
    return one.name


@pytest.mark.parametrize(("reads", "kept"), [(False, 0.9), (True, 2.7)])
def test_the_law_is_found_again(*, reads: bool, kept: float) -> None:
    law = fit(growths(), reads=reads)
    assert law.kept == pytest.approx(kept, rel=0.02) and law.width < 0.01
    assert all(abs(one.off) < 0.02 and abs(one.ahead_off) < 0.01 for one in leave_out(growths(), by_name, reads=reads))


def test_errors_widen_the_interval() -> None:
    assert fit(growths(noise=0.3), reads=False).width > 0.2
    left = leave_out(growths(noise=0.3), by_name, reads=False)
    assert all(one.low < one.predicted < one.high for one in left)
    with pytest.raises(BadRecipe, match="3 growths are too few"):
        fit(growths()[:3], reads=False)


def test_a_left_out_experiment_leaves_nothing_behind() -> None:
    """A growth that is far off moves the predictions of others, but not of its own experiment."""
    far = [*growths(), Growth(0.2, 500, 1000, None, "e0: far", 900.0)]
    apart = {one.growth.name: one.predicted for one in leave_out(far, lambda one: one.experiment, reads=False)}
    alone = {one.growth.name: one.predicted for one in leave_out(growths(), lambda one: one.experiment, reads=False)}
    assert apart["e0: g0"] == alone["e0: g0"] and apart["e1: g2"] != alone["e1: g2"]


def test_it_says_where_growing_does_not_pay() -> None:
    """A source as large as its target, trained for three times as long, costs more than any head start."""
    dear = predict(Case(1.0, 3000, 1000), growths())
    assert dear.source_cost == 3000 and dear.high < 1000 and dear.advice.startswith("do not grow")
    cheap = predict(Case(0.1, 1000, 1000), growths())
    assert cheap.source_cost == 100 < cheap.low and cheap.advice == "growing pays, also if the source is counted"
    assert cheap.length == round(1000 - cheap.head_start)
    # Training from scratch passes the source just before its end: there is hardly anything left to train.
    near = predict(Case(0.1, 1000, 1000, 1600), growths())
    assert near.length < 150 and near.advice.startswith("do not grow for so short a training")


def test_the_growths_that_ship_can_be_predicted_from() -> None:
    assert len(usable(measured(), reads=True)) >= 12 and len({one.name for one in measured()}) == len(measured())
    assert len(usable(measured(), reads=False)) >= 17
    for case in (Case(0.158, 1500, 1200), Case(0.158, 1500, 1200, 600)):
        found = predict(case)
        assert 0 < found.low < found.head_start < found.high < 1200
    # Nothing has a unit of steps: a thousand times as long a training needs a thousand times as many.
    long = predict(Case(0.158, 1_500_000, 1_200_000))
    assert long.head_start == pytest.approx(1000 * predict(Case(0.158, 1500, 1200)).head_start)


def falling(last: int, decays: bool) -> Curve:
    """A run whose loss falls by 0.2 in every e-fold of steps, and by a tenth more in its last fifth if it decays."""
    steps = [0.0, *(last / 20 * i for i in range(1, 21))]
    losses = [5.0, *(4 - 0.2 * math.log(step) for step in steps[1:])]
    rates = [0.0, *(1e-3 for _ in steps[1:])]
    if decays:
        losses[-1] = 0.9 * losses[16]
        rates[17:] = [8e-4, 5e-4, 2e-4, 0.0]
    return Curve(tuple(steps), tuple(losses), tuple(rates))


def test_the_step_at_which_scratch_passes_a_source() -> None:
    run = falling(2000, decays=True)
    assert run.decayed and not falling(2000, decays=False).decayed
    assert passed(run, 4 - 0.2 * math.log(700), decayed=False) == pytest.approx(700, rel=0.01)
    # The same loss after a decay is reached by a run a quarter longer that decays as well.
    assert passed(run, 0.9 * (4 - 0.2 * math.log(700)), decayed=True) == pytest.approx(875, rel=0.01)


def test_runs_that_do_not_tell_are_refused() -> None:
    with pytest.raises(BadRecipe, match="the run from scratch has not"):
        passed(falling(2000, decays=False), 2.5, decayed=True)
    with pytest.raises(BadRecipe, match="does not come near"):
        passed(falling(2000, decays=True), 1.0, decayed=False)
    short = Curve((0.0, 100.0, 200.0), (5.0, 3.0, 2.8), (0.0, 1e-3, 1e-3))
    with pytest.raises(BadRecipe, match="has 2 validation losses"):
        passed(short, 2.9, decayed=False)


def test_a_curve_is_read(tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    file.write_text("step,learning_rate,train_loss,validation_loss\n0,,,5.0\n100,1e-3,3.0,2.0\n200,1e-3,1.9,\n")
    assert read_curve(tmp_path) == Curve((0.0, 100.0), (5.0, 2.0), (0.0, 1e-3))
    file.write_text(file.read_text() + "300,1e-4,1.0,1.0\n")
    assert read_curve(file).decayed
    for wrong in ("step,loss\n1,2\n", "step,learning_rate,train_loss,validation_loss\n1,1e-3,1,nan\n", ""):
        file.write_text(wrong)
        with pytest.raises(BadRecipe, match="is not the curve of a run"):
            read_curve(file)


def test_lengths_are_told_from_the_mean_over_seeds_and_only_near_those_that_were_run() -> None:
    runs = {400: {0: 2.0, 1: 2.2}, 800: {0: 1.8, 1: 2.0}}
    found = length_at({0: 1.9, 1: 2.0, 2: 9.9}, runs)
    assert found is not None and found.steps == pytest.approx(400 * 2**0.75) and found.error > 0
    assert (beyond := length_at({0: 1.78, 1: 1.98}, runs)) is not None and beyond.steps == pytest.approx(800 * 2**0.1)
    assert length_at({0: 1.7, 1: 1.9}, runs) is None and length_at({0: 1.9}, {400: {0: 2.0}}) is None
    assert length_at({5: 1.9}, runs) is None


def test_growths_are_measured_against_all_lengths_of_the_same_run_from_scratch() -> None:
    """`start` trained further what `growth-inside` trained from scratch; a source's best start counts, and once."""
    names = ("growth-inside", "start", "muon")
    found = measured_growths([report.read(RESULTS / name) for name in names])
    assert len(found) == 5 and {one.experiment for one in found} == {"growth-inside", "start"}
    longest = next(one for one in found if one.name.endswith("1200 steps"))
    assert 1000 < longest.scratch < 1200 and longest.length == pytest.approx(500)
    assert all(one.passed is not None and one.error > 0 for one in found)
    # Alone it has a run of 1,000 steps as its longest, and what is beyond is told from its slope.
    [alone] = [one for one in measured_growths([report.read(RESULTS / names[0])]) if one.name == longest.name]
    assert alone.scratch == pytest.approx(longest.scratch, rel=0.03)


def test_recipe_reads_both_runs(
    good: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, large = runner(monkeypatch, capfd, tmp_path), tmp_path / "large"
    lemonx.expand(good(), large, depth=8, verify=False)
    for name, last in (("source", 600), ("scratch", 2000)):
        shown = falling(last, decays=name == "scratch")
        rows = zip(shown.steps, shown.losses, shown.rates, strict=True)
        lines = (f"{int(step)},{rate},,{loss}" for step, loss, rate in rows)
        (tmp_path / f"{name}.csv").write_text("\n".join(("step,learning_rate,train_loss,validation_loss", *lines)))
    given = ("recipe", good(), large, "--steps", 2000, "--curve", "source.csv")
    rough, found = run(*given), run(*given, "--scratch-curve", "scratch.csv")
    assert rough.code == found.code == 0 and "its run of 600 steps; with --scratch-curve" in rough.out
    # Both fall alike, so scratch passes the source where the source ends.
    assert "passes the source's loss at step 600: a head start" in found.out.replace("\n#   ", " ")
    alone = run(*given[:5], "--scratch-curve", "scratch.csv")
    assert alone.code == 2 and "give that with --curve" in alone.err
