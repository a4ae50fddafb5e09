"""Added Post-LN blocks: the larger module is the smaller one with norms repeated, whatever the weights are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lemonx
from lemonx.algebra.norm_chains import LIMIT

WORDS = 11
Blocks = type[nn.Module]


def words(seed: int) -> Tensor:
    return torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """A text in Post-LN blocks."""

    def __init__(self, block: Blocks, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(block(width) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Encoder(nn.TransformerEncoderLayer):
    """Attention and an MLP, each with a norm behind it, eps 1e-5."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width // 4, 2 * width, dropout=0.0, batch_first=True)


class Mlps(nn.Module):
    """Two MLPs with the norms that `norm` runs behind them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.first, self.second = nn.Linear(width, 12), nn.Linear(12, width)
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.other = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.down(torch.tanh(self.up(x))), self.gain)
        return self.norm(x + self.second(F.gelu(self.first(x))), self.other) + self.bias

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """Written out."""
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4) * gain


class Twice(Mlps):
    """One norm in two places."""

    def __init__(self, width: int, affine: bool = True) -> None:
        super().__init__(width)
        self.both = nn.LayerNorm(width, elementwise_affine=affine)
        del self.gain, self.bias, self.other

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(x + self.down(torch.tanh(self.up(x))))
        return self.both(x + self.second(F.gelu(self.first(x))))


class Plain(Twice):
    """The same without a gain."""

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False)


def pair(block: Blocks, size: float, seed: int, width: int = 8) -> tuple[nn.Module, nn.Module]:
    """A module of random parameters of this size, and one of twice its depth."""
    small, large = Model(block, 8, 2).double(), Model(block, width, 4).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in small.parameters():
            tensor.copy_(size * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return small, large


def off(small: nn.Module, large: nn.Module) -> float:
    with torch.no_grad():
        ours, theirs = small(words(1)), large(words(1))
    return float((ours - theirs).abs().max() / ours.abs().max())


@pytest.mark.parametrize("size", [1.0, 3.0])
@pytest.mark.parametrize(("block", "width", "seed"), [(Encoder, 8, 0), (Encoder, 16, 1), (Mlps, 16, 2)])
def test_only_the_repeated_norms_change_anything(block: Blocks, width: int, seed: int, size: float) -> None:
    """Large weights carry what eps takes further than any number of norms says, and all of it is accounted for."""
    small, large = pair(block, size, seed, width)
    grown = lemonx.grow(small, large, [words(0), words(2)[:, :4]])
    assert grown.rehearsed < 1e-12 and grown.difference < 1e-12
    assert 1e-8 < grown.lost_to_eps < 1e-3 and off(small, large) < 10 * grown.lost_to_eps


def test_small_gains_lose_nothing() -> None:
    small, large = pair(Encoder, 0.3, 3)
    grown = lemonx.grow(small, large, words(0), free={"small_gains": True})
    assert grown.lost_to_eps < 1e-11 and grown.plan.expected_loss < 1e-11 and off(small, large) < 1e-11


def test_a_stream_that_is_not_large_beside_eps_is_refused_and_small_gains_help() -> None:
    small, large = pair(Mlps, 0.05, 4)
    with pytest.raises(lemonx.Refused, match=rf"would move the stream by .* more than {LIMIT:.1e}.*small_gains=True"):
        lemonx.grow(small, large, words(0))
    assert lemonx.grow(small, large, words(0), free={"small_gains": True}).lost_to_eps < 1e-9


def test_a_norm_in_two_places_cannot_be_the_identity_in_one() -> None:
    small, large = pair(Twice, 0.3, 5)
    with pytest.raises(lemonx.Refused, match=r"layers.0.both.weight, the gain of .* layers.0, is used by other"):
        lemonx.grow(small, large, words(0))


def test_norms_without_gains_are_repeated_where_they_are() -> None:
    small, large = pair(Plain, 0.5, 6)
    grown = lemonx.grow(small, large, words(0))
    assert grown.difference < 1e-12 < grown.lost_to_eps
