"""Modules whose streams LayerNorms feed, at widths that are no multiples: frames carry them, or it is said why not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lemonx
from lemonx_lab.survey.randomise import randomise

TOKENS = 12


class PostNorm(nn.Module):
    """Post-LN blocks of an MLP alone; `twist`: what is done to it besides."""

    def __init__(self, width: int, hidden: int, depth: int = 2, twist: str = "") -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(20, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(_Block(width, hidden, twist) for _ in range(depth))
        self.head = nn.Linear(width, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, twist: str) -> None:
        super().__init__()
        self.mix, self.one = nn.Linear(width, width, bias=False), nn.LayerNorm(width)
        self.up, self.down, self.two = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)
        self.twist = twist

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.mean(1, keepdim=True).expand_as(x))
        early = self.twist == "early"
        x = self.one(x if early else x + mixed)
        weight = 0.5 * self.up.weight if self.twist == "weight" else self.up.weight
        inner = nn.functional.linear(x, weight, self.up.bias)
        inner = torch.tanh(inner) if self.twist == "tanh" else nn.functional.gelu(inner)
        inner = 2 * inner if self.twist == "inside" else inner
        made = self.down(inner) + mixed if early else self.down(inner)
        return self.two((1.5 * x if self.twist == "residual" else x) + made)


class Staged(nn.Module):
    """A norm feeds each of two stages; a kernel reads the last norm of the first, and a map four tokens.

    `beside`: what is added where a norm wrote, by a table (`map`), by the norm's own input or by another norm.
    """

    def __init__(self, width: int, beside: str = "") -> None:
        super().__init__()
        self.beside = beside
        self.map = nn.Embedding(20, width) if beside == "map" else None
        self.other = nn.LayerNorm(width) if beside == "norm" else None
        self.embed, self.enter, self.inner = nn.Embedding(20, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down, self.leave = nn.Linear(width, 30), nn.Linear(30, width), nn.LayerNorm(width)
        self.merge, self.again = nn.Conv1d(width, width, 3, stride=1, padding=1), nn.LayerNorm(width)
        self.last, self.head = nn.LayerNorm(width), nn.Linear(4 * width, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(self.embed(tokens))
        x = x + self.down(torch.relu(self.up(self.inner(x))))
        made = self.leave(x)
        made = made if self.map is None else made + self.map(tokens)
        made = made if self.other is None else made + self.other(x)
        x = x + made if self.beside == "input" else made
        x = self.again(self.merge(x.transpose(1, 2)).transpose(1, 2))
        x = self.last(x + x.mean(1, keepdim=True))
        return self.head(x.reshape(x.shape[0], -1, 4 * x.shape[2]))


def _pair(small: nn.Module, large: nn.Module) -> tuple[nn.Module, nn.Module]:
    for seed, module in enumerate((small, large)):
        randomise(module.double().eval(), seed)
    return small, large


def _tokens(seed: int) -> Tensor:
    return torch.randint(20, (3, TOKENS), generator=torch.Generator().manual_seed(seed))


def _assert_framed(small: nn.Module, large: nn.Module) -> None:
    grown = lemonx.grow(small, large, _tokens(0))
    with torch.no_grad():
        a, b = small(_tokens(7)), large(_tokens(7))
    assert float((a - b).abs().max()) <= 1e-10 * float(a.abs().max())
    assert grown.plan.types.framed
    assert grown.stability is not None and grown.stability.noise < 10 and grown.stability.gradient < 10


@pytest.mark.parametrize(("width", "hidden"), [(24, 72), (40, 80)])
def test_a_post_norm_stream_grows_to_any_width(width: int, hidden: int) -> None:
    _assert_framed(*_pair(PostNorm(16, 40), PostNorm(width, hidden)))


def test_kernels_and_maps_of_several_tokens_read_a_frame() -> None:
    _assert_framed(*_pair(Staged(16), Staged(24)))


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ("map", "map adds to what a LayerNorm writes"),
        ("input", "as a LayerNorm feeds it"),
        ("norm", "or to what another one writes"),
    ],
)
def test_what_is_added_behind_a_norm_is_refused_beforehand(beside: str, why: str) -> None:
    small, large = _pair(Staged(16, beside), Staged(24, beside))
    with pytest.raises(lemonx.Refused, match=why):
        lemonx.grow(small, large, _tokens(0))


def test_the_number_of_neurons_that_is_missing_is_said() -> None:
    small, large = _pair(PostNorm(16, 40), PostNorm(24, 71))
    with pytest.raises(lemonx.Refused, match=r"needs 32 new MLP neurons .* and 71 leave 31 .*72 or more"):
        lemonx.grow(small, large, _tokens(0))


def test_what_is_computed_in_front_of_a_norm_and_added_behind_it_is_refused_beforehand() -> None:
    small, large = _pair(PostNorm(16, 40, twist="early"), PostNorm(24, 72, twist="early"))
    with pytest.raises(lemonx.Refused, match="or to what another one writes"):
        lemonx.grow(small, large, _tokens(0))


@pytest.mark.parametrize("twist", ["tanh", "inside", "residual", "weight"])
def test_a_branch_that_passes_no_number_on_is_refused_beforehand(twist: str) -> None:
    """A rehearsal that fails would raise NotVerified."""
    small, large = _pair(PostNorm(16, 40, twist=twist), PostNorm(24, 72, twist=twist))
    before = {name: tensor.clone() for name, tensor in large.state_dict().items()}
    with pytest.raises(lemonx.Refused, match="pass a number on unchanged"):
        lemonx.grow(small, large, _tokens(0))
    assert all(torch.equal(before[name], tensor) for name, tensor in large.state_dict().items())


def test_an_output_in_another_basis_is_refused() -> None:
    small, large = _pair(PostNorm(16, 40), PostNorm(24, 72))
    for module in (small, large):
        module.head = nn.Identity()
    with pytest.raises(lemonx.Refused, match="the model gives first_weight out"):
        lemonx.grow(small, large, _tokens(0))
