"""Modules composed at random: the judge sees every false claim, and nothing is claimed falsely."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

import lemonx
from lemonx.errors import NotVerified, Refused
from random_modules import PICTURES, SEQUENCES, TOLERANCE, case, run_case


def test_cases_are_the_same_again_and_use_every_operation() -> None:
    assert case(17) == case(17)
    used = collections.Counter(name for number in range(600) for name, _ in case(number).steps)
    assert used.keys() == SEQUENCES.keys() | PICTURES.keys()
    grown = [case(number) for number in range(200)]
    for size in ("width", "inner", "heads", "blocks"):
        assert any(getattr(one, size)[0] < getattr(one, size)[1] for one in grown), size


@pytest.mark.parametrize("number", range(40))
def test_both_sizes_run_on_the_same_inputs(number: int) -> None:
    made = case(number)
    small, large = made.model(0), made.model(1)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in large.parameters())
    for seed, rows, length in ((1, 3, 7), (2, 2, 11)):
        one, other = (model(*made.inputs(seed, rows, length)) for model in (small, large))
        assert one.shape[:-1] == other.shape[:-1] and (made.bare or one.shape == other.shape)
        assert bool(torch.isfinite(one).all()) and bool(torch.isfinite(other).all())


def claims(small: Any, large: Any, inputs: Any) -> None:
    """Says that it grew the model, and did nothing."""


def nearly(small: Any, large: Any, inputs: Any) -> None:
    """Makes the larger model right but for one part in a million."""
    large.forward = lambda *given: small(*given) * (1 + 1e-6)


def becomes(small: Any, large: Any, inputs: Any) -> None:
    """Makes the larger model right, in a way that is no growth."""
    large.forward = small.forward


def refuses(small: Any, large: Any, inputs: Any) -> None:
    raise Refused("no")


def rejects(small: Any, large: Any, inputs: Any) -> None:
    raise NotVerified("not so")


def spoils(small: Any, large: Any, inputs: Any) -> None:
    large.forward = small.forward
    with torch.no_grad():
        next(small.parameters()).zero_()


def fails(small: Any, large: Any, inputs: Any) -> None:
    raise KeyError("blocks.0")


@pytest.mark.parametrize(
    ("grow", "kind"),
    [
        (claims, "false"),
        (nearly, "false"),
        (becomes, "exact"),
        (refuses, "refused"),
        (rejects, "rejected"),
        (spoils, "broken"),
        (fails, "broken"),
    ],
)
def test_the_judge_believes_nothing(grow: Any, kind: str) -> None:
    outcomes = [run_case(number, grow) for number in range(8)]
    assert {outcome.kind for outcome in outcomes} == {kind}
    if kind == "exact":
        assert max(outcome.difference for outcome in outcomes) <= TOLERANCE


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_nothing_is_claimed_falsely(first: int) -> None:
    outcomes = [run_case(number, lemonx.grow) for number in range(first, first + 10)]
    assert not [outcome for outcome in outcomes if outcome.kind not in ("exact", "refused")]
