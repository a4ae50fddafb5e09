"""What a width and an input decide together: numbers, branches and sizes that one example cannot tell apart."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lemonx
from lemonx.verification.variations import LEAST_STEP, _lengths

Decides = Callable[[Tensor, int], Tensor]


class Decided(nn.Module):
    """A map, what a function makes of its outputs and the width, and two maps more."""

    def __init__(self, width: int, how: Decides) -> None:
        super().__init__()
        self.width, self.how = width, how
        self.a, self.b, self.c = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.how(self.a(x), self.width))))


class Attended(Decided):
    """Scores of attention, of which the function makes the factor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c((self.how(self.b(x) @ x.mT, self.width)).softmax(-1) @ x)


def rows(seed: int, examples: int = 3, length: int = 7) -> Tensor:
    shape = examples, length, 6
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grow(kind: type[Decided], how: Decides) -> tuple[nn.Module, nn.Module]:
    small, large = kind(8, how).double(), kind(16, how).double()
    lemonx.grow(small, large, rows(0))
    return small, large


NUMBERS: dict[str, tuple[type[Decided], Decides]] = {
    "a sum": (Decided, lambda x, width: x / (width + x.shape[1])),
    "examples": (Decided, lambda x, width: x * torch.tensor(1 / (width + len(x)), dtype=x.dtype)),
    "scores": (Attended, lambda x, width: x * (width + x.shape[1]) ** -0.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_both_is_refused_where_it_is(name: str) -> None:
    """The check knows it from runs on two inputs, with the module and the operation, before anything is made."""
    why = r"the model, (div|mul|bmm).*: its number is .* in the smaller model and .* on other inputs .* depends on the"
    with pytest.raises(lemonx.Refused, match=why):
        grow(*NUMBERS[name])


@pytest.mark.parametrize("kind", [Decided, Attended])
def test_a_product_of_both_is_taken_up(kind: type[Decided]) -> None:
    """What the length makes of it is the same in both sizes."""
    small, large = grow(kind, lambda x, width: x * (width**-0.5 * math.log(2 + x.shape[1])))
    for given in (rows(1), rows(2, 2, 30), rows(3, 5, 3)):
        ours, theirs = small(given), large(given)
        assert float((ours - theirs).detach().abs().max()) < 1e-12 * float(ours.detach().abs().max())


BRANCHES: dict[str, tuple[Decides, str]] = {
    "a branch": (lambda x, width: torch.relu(x) if x.shape[1] > width else x, "3 x 1[0-6] x 6"),
    "a branch far below": (lambda x, width: torch.relu(x) if 3 * x.shape[1] > width else x, "3 x [345] x 6"),
    "the larger of two": (lambda x, width: x * max(width, 3 * x.shape[1]), "the model, mul: its number is 21"),
    "a bound": (lambda x, width: x.clamp(max=max(1.0, x.shape[1] / width)), "the model, clamp: its number"),
    "a cut": (lambda x, width: x[:, :width], "differ by inf"),
    "a stride": (lambda x, width: x[:, :: max(1, x.shape[1] // width)], "differ by inf"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_what_an_example_does_not_show_other_lengths_do(name: str) -> None:
    how, why = BRANCHES[name]
    with pytest.raises(lemonx.Refused, match=why):
        grow(Decided, how)


def test_lengths_miss_no_comparison_with_a_size_that_grows() -> None:
    """Wherever a length is compared with a part of a size, one of those tried is between what both sizes make of it."""
    for before, after in ((8, 16), (8, 12), (10, 13), (6, 30)):
        tried = _lengths(7, [(before, after), (5, 5 * after)])
        for times in range(1, before // 2):
            between = [length for length in tried if before / times < length <= after / times]
            assert between or math.floor(after / times) == math.floor(before / times), (before, after, times)
    assert min(b / a for a, b in zip(tried[1:], tried, strict=False)) >= LEAST_STEP or 1 in tried


class Tempered(nn.Module):
    """Divided by what a function makes of an argument and the width."""

    def __init__(self, width: int, how: Callable[[float, int], float]) -> None:
        super().__init__()
        self.width, self.how = width, how
        self.a, self.c = nn.Linear(6, width), nn.Linear(width, 5)

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return self.c(torch.relu(self.a(x) / self.how(temperature, self.width)))


def test_numbers_among_the_arguments_are_inputs_too() -> None:
    small, large = (Tempered(width, lambda t, width: t * width).double() for width in (8, 16))
    assert lemonx.grow(small, large, (rows(0), 2.0)).rehearsed < 1e-12
    small, large = (Tempered(width, lambda t, width: t + width).double() for width in (8, 16))
    with pytest.raises(lemonx.Refused, match=r"div: its number is 0.1 .* depends on the inputs too"):
        lemonx.grow(small, large, (rows(0), 2.0))
