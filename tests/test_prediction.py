"""Predicting a head start: the law is found again in growths that obey it, and errors widen the interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import lemonx
from commands import runner
from lemonx.cli.render.advising import prediction_text
from lemonx.errors import BadRecipe
from lemonx.training.prediction import Case, Growth, fit, leave_out, measured, predict, usable, useful_steps
from lemonx_lab.experiments import report

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def growths(noise: float = 0.0) -> list[Growth]:
    """Fourteen growths of a law by which a source is worth 0.9 of scratch at most, each off by `noise` in logs."""
    found = []
    for i, (steps, scratch) in enumerate((s, n) for s in (100, 200, 400, 800, 1600, 3200, 6400) for n in (1000, 3000)):
        ahead = 1 / (1 / steps + 1 / (0.9 * scratch)) * math.exp(noise * (-1) ** (i // 2))
        found.append(Growth(0.2, steps, scratch, f"e{i // 2}: g{i}", ahead))
    return found


def by_name(one: Growth) -> str:
    return one.name


def test_the_law_is_found_again() -> None:
    law = fit(growths())
    assert law.most == pytest.approx(0.9, rel=0.02) and law.width < 0.01
    assert all(abs(one.off) < 0.02 and abs(one.ahead_off) < 0.01 for one in leave_out(growths(), by_name))


def test_errors_widen_the_interval() -> None:
    assert fit(growths(noise=0.3)).width > 0.2
    left = leave_out(growths(noise=0.3), by_name)
    assert all(one.low < one.predicted < one.high for one in left)
    with pytest.raises(BadRecipe, match="3 growths are too few"):
        fit(growths()[:3])


def test_a_left_out_experiment_leaves_nothing_behind() -> None:
    """A growth that is far off moves the predictions of others, but not of its own experiment."""
    far = [*growths(), Growth(0.2, 500, 1000, "e0: far", 900.0)]
    apart = {one.growth.name: one.predicted for one in leave_out(far, lambda one: one.experiment)}
    alone = {one.growth.name: one.predicted for one in leave_out(growths(), lambda one: one.experiment)}
    assert apart["e0: g0"] == alone["e0: g0"] and apart["e1: g2"] != alone["e1: g2"]


def test_it_says_where_growing_does_not_pay() -> None:
    """A source as large as its target, trained for three times as long, costs more than any head start."""
    dear = predict(Case(1.0, 3000, 1000), growths())
    assert dear.source_cost == 3000 and dear.high < 1000 and dear.advice.startswith("do not grow")
    cheap = predict(Case(0.1, 1000, 1000), growths())
    assert cheap.source_cost == 100 < cheap.low and cheap.advice == "growing pays, also if the source is counted"
    assert cheap.length == round(1000 - cheap.head_start)
    # So long a source is worth almost all of a short training: there is hardly anything left to train.
    near = predict(Case(0.1, 100_000, 1000), growths())
    assert near.length < 150 and near.advice.startswith("do not grow for so short a training")


def test_the_growths_that_ship_can_be_predicted_from() -> None:
    assert len(usable(measured())) >= 17 and len({one.name for one in measured()}) == len(measured())
    found = predict(Case(0.158, 1500, 1200))
    assert 0 < found.low < found.head_start < found.high < 1200
    # Nothing has a unit of steps: a thousand times as long a training needs a thousand times as many.
    long = predict(Case(0.158, 1_500_000, 1_200_000))
    assert long.head_start == pytest.approx(1000 * found.head_start)
    assert predict(Case(0.2, 100_000, 1000)).high == 1000  # and not more than all of it
    text = " ".join(prediction_text(found, 500).replace("# ", "").split())
    assert text.endswith(
        f"The recipe has the 500 steps of the paper's nearest growth; set {found.length} to go by this."
    )
    assert "The recipe has" not in prediction_text(found) + prediction_text(found, found.length)


def test_a_source_counts_until_its_loss_is_flat(tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    file.write_text("step,learning_rate,train_loss,validation_loss\n0,,,5.0\n100,1e-3,3.0,2.0\n200,1e-3,1.9,\n")
    assert useful_steps(tmp_path) == 100
    file.write_text(file.read_text() + "300,1e-3,1.0,1.0\n400,1e-3,1.0,0.999\n")
    assert useful_steps(file) == 300
    file.write_text("step,loss\n1,2\n")
    with pytest.raises(BadRecipe, match="is not the curve of a run"):
        useful_steps(file)
    for losses in ("3.1", "3.1 nan 2.0", "1.1 1.2 4.9", "inf 2.0 1.9"):
        rows = "".join(f"{10 * place},,,{loss}\n" for place, loss in enumerate(losses.split()))
        file.write_text(f"step,learning_rate,train_loss,validation_loss\n{rows}")
        with pytest.raises(BadRecipe, match="shows no training"):
            useful_steps(file)
    # A loss may be negative, and a spreadsheet writes a mark in front.
    file.write_text("\ufeffstep,learning_rate,train_loss,validation_loss\n0,,,1.0\n10,,,-2.0\n20,,,-2.001\n", "utf-8")
    assert useful_steps(file) == 10
    for steps in ("-10 0", "0 20 10", "0 0"):
        rows = "".join(f"{step},,,{5 - place}\n" for place, step in enumerate(steps.split()))
        file.write_text(f"step,learning_rate,train_loss,validation_loss\n{rows}")
        with pytest.raises(BadRecipe, match="its steps must rise"):
            useful_steps(file)
    file.write_text(f"step,validation_loss\n0,{'1' * 200_000}\n")
    with pytest.raises(BadRecipe, match="is not the curve of a run"):
        useful_steps(file)
    with pytest.raises(BadRecipe, match="No such file"):
        useful_steps(tmp_path / "nothing.csv")
    file.unlink()
    with pytest.raises(BadRecipe, match="does not exist: give a run's folder"):
        useful_steps(tmp_path)


def test_lengths_are_told_from_the_mean_over_seeds_and_only_near_those_that_were_run(
    making: Callable[[str], ModuleType],
) -> None:
    length_at = making("growths").length_at
    runs = {400: {0: 2.0, 1: 2.2}, 800: {0: 1.8, 1: 2.0}}
    found = length_at({0: 1.9, 1: 2.0, 2: 9.9}, runs)
    assert found is not None and found.steps == pytest.approx(400 * 2**0.75) and found.error > 0
    assert (beyond := length_at({0: 1.78, 1: 1.98}, runs)) is not None and beyond.steps == pytest.approx(800 * 2**0.1)
    assert length_at({0: 1.7, 1: 1.9}, runs) is None and length_at({0: 1.9}, {400: {0: 2.0}}) is None
    assert length_at({5: 1.9}, runs) is None


def test_growths_are_measured_against_all_lengths_of_the_same_run_from_scratch(
    making: Callable[[str], ModuleType],
) -> None:
    """`start` trained further what `growth-inside` trained from scratch; a source's best start counts, and once."""
    names = ("growth-inside", "start", "upcycling")  # whose scratch has one length alone
    measured_growths = making("growths").measured_growths
    found = measured_growths([report.read(RESULTS / name) for name in names])
    assert len(found) == 5 and {one.experiment for one in found} == {"growth-inside", "start"}
    longest = next(one for one in found if one.name.endswith("1200 steps"))
    assert 1000 < longest.scratch < 1200 and longest.length == pytest.approx(500)
    assert all(one.error > 0 for one in found)
    # Alone it has a run of 1,000 steps as its longest, and what is beyond is told from its slope.
    [alone] = [one for one in measured_growths([report.read(RESULTS / names[0])]) if one.name == longest.name]
    assert alone.scratch == pytest.approx(longest.scratch, rel=0.03)


def test_recipe_predicts_from_the_sources_run(
    good: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, large = runner(monkeypatch, capfd, tmp_path), tmp_path / "large"
    lemonx.expand(good(), large, depth=8, verify=False)
    (tmp_path / "curve.csv").write_text("step,learning_rate,train_loss,validation_loss\n0,,,5.0\n600,1e-3,3.0,2.0\n")
    result = run("recipe", good(), large, "--steps", 2000, "--curve", "curve.csv")
    expected = predict(Case(0.25, 600, 2000))
    assert result.code == 0 and f"so {expected.length:,} of the 2,000 steps" in result.out.replace("\n#   ", " ")
    assert "counts with 600 steps" in result.out and "cost as much as 150 steps" in result.out
