"""Predicting a head start: the law is found again in growths that obey it, and errors widen the interval."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lemonx.errors import BadRecipe
from lemonx.training.prediction import Growth, fit, leave_one_out, measured, predict, usable, useful_steps


def growths(noise: float = 0.0) -> list[Growth]:
    """Fourteen growths of a law with a slope in each of the three logs, every second one off by `noise` in logits."""
    found = []
    for i, (share, trained) in enumerate((s, t) for s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8) for t in (0.5, 1.5)):
        kind = "vision" if i % 4 < 2 else "language"
        logit = 0.8 + (0.5 if kind == "vision" else -0.5) + 0.4 * math.log(share) + 0.6 * math.log(trained)
        logit += noise * (-1) ** (i // 4 + i)
        found.append(Growth(f"g{i}", kind, share, trained, 1 / (1 + math.exp(-logit))))
    return found


def test_the_law_is_found_again() -> None:
    law = fit(growths())
    assert law.coefficients[2:] == pytest.approx([0.4, 0.6], abs=0.05)
    assert law.coefficients[0] - law.coefficients[1] == pytest.approx(1.0, abs=0.1)
    assert all(abs(one.off) < 0.1 for one in leave_one_out(growths()))
    assert fit(growths(noise=0.5)).width > 0.4 > 5 * law.width
    assert all(one.low < one.predicted < one.high for one in leave_one_out(growths(noise=0.5)))


def test_it_says_where_growing_does_not_pay() -> None:
    """A source as large as its target, trained for three times as long, costs more than any head start."""
    dear = predict("language", 1.0, 3000, 1000, growths())
    assert dear.source_cost == 3000 and dear.high < 1000 and dear.advice.startswith("do not grow")
    cheap = predict("vision", 0.1, 1000, 1000, growths())
    assert cheap.source_cost == 100 < cheap.low and cheap.advice == "growing pays, also if the source is counted"
    assert cheap.length == round(1000 - cheap.head_start)
    with pytest.raises(BadRecipe, match="3 growths are too few"):
        fit(growths()[:3])


def test_the_growths_that_ship_can_be_predicted_from() -> None:
    assert len(usable(measured())) >= 8 and len({one.name for one in measured()}) == len(measured())
    found = predict("language", 0.158, 1500, 1200)
    assert 0 < found.low < found.head_start < found.high < 1200


def test_a_source_counts_until_its_loss_is_flat(tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    file.write_text("step,learning_rate,train_loss,validation_loss\n0,,,5.0\n100,1e-3,3.0,2.0\n200,1e-3,1.9,\n")
    assert useful_steps(tmp_path) == 100
    file.write_text(file.read_text() + "300,1e-3,1.0,1.0\n400,1e-3,1.0,0.999\n")
    assert useful_steps(file) == 300
    file.write_text("step,loss\n1,2\n")
    with pytest.raises(BadRecipe, match="is not the curve of a run"):
        useful_steps(file)
