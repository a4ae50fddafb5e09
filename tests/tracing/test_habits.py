"""Habits of code that people write: each grows, or is refused with a reason that says what to change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lemonx

WORDS = 11


def rows(seed: int) -> Tensor:
    return torch.randn(3, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def words(seed: int) -> Tensor:
    return torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(seed))


def pictures(seed: int) -> Tensor:
    return torch.randn(3, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grow(
    make: Callable[[int, int], nn.Module], inputs: Callable[[int], Tensor], width: int = 16, depth: int = 3
) -> lemonx.Grown:
    """Grow from a width of 8 and two blocks, and judge by inputs of its own."""
    small, large = make(8, 2).double(), make(width, depth).double()
    before = copy.deepcopy(small.state_dict())
    grown = lemonx.grow(small, large, inputs(0))
    assert all(torch.equal(before[name], tensor) for name, tensor in small.state_dict().items())
    with torch.no_grad():
        ours, theirs = small.eval()(inputs(1)), large.eval()(inputs(1))
    assert float((ours - theirs).abs().max()) <= 1e-12 * float(ours.abs().max())
    return grown


class Blocks(nn.Module):
    """Blocks of one kind between two maps."""

    def __init__(self, block: Callable[[int], nn.Module], width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, width), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """All experts, summed by Python's sum with the weights of the two that are chosen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 3), nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = x.new_zeros(*x.shape[:-1], 3).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class ReZero(nn.Module):
    """A branch times a number that is learned."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.alpha = nn.Linear(width, 12), nn.Linear(12, width), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("block", [Experts, ReZero])
def test_blocks_are_silenced_where_they_write(block: type[nn.Module]) -> None:
    grow(lambda width, depth: Blocks(block, width, depth), rows)


class LastTwo(Blocks):
    """The last two states, in one sum."""

    def forward(self, x: Tensor) -> Tensor:
        states = [self.stem(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(states[-1] + states[-2])


def test_one_operation_reads_the_stream_behind_two_blocks() -> None:
    grow(lambda width, depth: LastTwo(ReZero, width, depth), rows, depth=4)


class Shuffled(nn.Module):
    """Channels that become pixels, and pixels that become channels."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.up = nn.Conv2d(3, width, 1), nn.Conv2d(4 * width, 4 * width, 1)
        self.head = nn.Conv2d(width, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(torch.relu(self.stem(x)), 2)
        return self.head(F.pixel_shuffle(self.up(x), 2).relu())


def test_pixels_are_shuffled() -> None:
    grow(Shuffled, pictures, width=12)


class Factorised(nn.Module):
    """A small table, a map to the width, and back to the table as the head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(WORDS, width // 2), nn.Linear(width // 2, width)
        self.norm, self.down = nn.LayerNorm(width), nn.Linear(width, width // 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.norm(self.up(self.table(ids)))) @ self.table.weight.T


def test_a_map_writes_what_the_table_reads() -> None:
    assert grow(Factorised, words, width=12).sizes["table"] == (4, 6)


class Running(nn.Module):
    """A forward that changes a buffer, whether it is trained or not."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, width), nn.Linear(width, 5)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.mean.mul_(0.9).add_(x.mean((0, 1)).detach(), alpha=0.1)
        return self.head(torch.relu(x - self.mean))


class Renormed(nn.Module):
    """A table whose forward makes rows shorter that are too long."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width, max_norm=0.5), nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def test_what_a_forward_changes_is_put_back() -> None:
    grow(Running, rows)
    small, large = Renormed(8, 1).double(), Renormed(16, 1).double()
    before = [copy.deepcopy(module.state_dict()) for module in (small, large)]
    with pytest.raises(lemonx.Refused, match="embedding_renorm"):
        lemonx.grow(small, large, words(0))
    for module, state in zip((small, large), before, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


class Shared(nn.Module):
    """A branch behind a norm that all blocks have."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.map = norm, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(self.norm(x))


def shared(width: int, depth: int) -> nn.Module:
    norm = nn.LayerNorm(width)
    return Blocks(lambda width: Shared(width, norm), width, depth)


def test_blocks_that_share_a_tensor_grow_wider_and_not_deeper() -> None:
    grow(shared, rows, depth=2)
    with pytest.raises(lemonx.Refused, match=r"blocks.1.norm.weight and blocks.0.norm.weight are one tensor"):
        grow(shared, rows)


@dataclass
class Given:
    hidden: Tensor
    logits: Tensor


class Named(Blocks):
    def forward(self, x: Tensor) -> Given:  # type: ignore[override]
        return Given(self.stem(x), super().forward(x))


class Hidden:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Unseen(Blocks):
    def forward(self, x: Tensor) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(x))


class Counted(Blocks):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(x), self.head.in_features


class Each(Blocks):
    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        states = [self.stem(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return [self.head(states[-1]), *states]


def test_outputs_are_compared_or_refused() -> None:
    small, large = Named(ReZero, 8, 2).double(), Named(ReZero, 16, 3).double()
    lemonx.grow(small, large, rows(0))
    ours, theirs = small(rows(1)), large(rows(1))
    torch.testing.assert_close(theirs.hidden[..., :8], ours.hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(theirs.logits, ours.logits, rtol=0, atol=1e-12)
    for kind, why in ((Unseen, "no tensor"), (Counted, "an output is 8 in"), (Each, "4 outputs and the larger 5")):
        with pytest.raises(lemonx.Refused, match=why):
            lemonx.grow(kind(ReZero, 8, 2).double(), kind(ReZero, 16, 3).double(), rows(0))


class Outside(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Noisy(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(x + torch.randn_like(x)))


def test_refusals_say_what_to_change() -> None:
    with pytest.raises(lemonx.Refused, match="such as adding it to the stream, must be in its own forward"):
        grow(lambda width, depth: Outside(ReZero, width, depth), rows)
    with pytest.raises(lemonx.Refused, match="randn_like: random numbers are drawn for its entries"):
        grow(lambda width, depth: Noisy(lambda width: nn.Identity(), width, 0), rows)


def test_a_state_that_is_the_last_in_one_model_alone_is_refused() -> None:
    """The second state of two blocks is what the head reads anyway, and of four it is another."""

    class Second(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            states = [self.stem(x)]
            for block in self.blocks:
                states.append(block(states[-1]))
            return self.head(states[-1] + states[2])

    with pytest.raises(lemonx.Refused, match=r"behind blocks.1 in .* and behind blocks.1 and blocks.3 in the"):
        grow(lambda width, depth: Second(ReZero, width, depth), rows, depth=4)
