"""What a run shows of channels: in groups, one by one, with weights kept as a direction and a length; and means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lemonx
from tracing.test_mechanisms import grown, rows


class Channels(nn.Module):
    """Channels that a layer under test reads and writes, between a convolution and a head."""

    def __init__(self, width: int, layer: Callable[[int], nn.Module], last: int | None = None) -> None:
        super().__init__()
        self.up, self.layer, self.head = nn.Conv1d(7, width, 3, padding=1), layer(width), nn.Linear(last or width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.layer(self.up(x))).mT)


class Beside(Channels):
    """The same, added to what it read, in front of a norm: a convolution of positions."""

    def __init__(self, width: int, layer: Callable[[int], nn.Module]) -> None:
        super().__init__(width, layer)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.head(self.norm((x + F.gelu(self.layer(x))).mT))


def conv(groups: Callable[[int], int], times: int = 1, turned: bool = False) -> Callable[[int], nn.Module]:
    kind = nn.ConvTranspose1d if turned else nn.Conv1d
    return lambda n: kind(n, times * n, 3, padding=1, groups=groups(n))


GROUPS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "as many groups": (conv(lambda n: 4), 1),
    "as many groups, which write more": (conv(lambda n: 4, 3), 3),
    "more groups": (conv(lambda n: n // 2), 1),
    "more groups, which write more": (conv(lambda n: n // 2, 2), 2),
    "two kernels for every channel": (conv(lambda n: n, 2), 2),
    "turned over": (conv(lambda n: 4, turned=True), 1),
    "a norm for every channel": (lambda n: nn.GroupNorm(n, n), 1),
}


@pytest.mark.parametrize("name", GROUPS)
def test_channels_grow_in_groups_and_groups_as_a_whole(name: str) -> None:
    layer, times = GROUPS[name]
    for width in (16, 12):
        grown(lambda n: Channels(n, layer, times * n), (8, width), rows)


def test_a_convolution_in_groups_may_write_the_stream() -> None:
    grown(lambda n: Beside(n, conv(lambda n: 4)), (8, 16), rows)
    with pytest.raises(lemonx.Refused, match="a LayerNorm reads"):
        grown(lambda n: Beside(n, conv(lambda n: 4)), (8, 12), rows)


def test_groups_that_read_the_axis_which_tells_them_apart_are_not_copied() -> None:
    with pytest.raises(lemonx.Refused, match="a transposed convolution in groups reads it"):
        grown(lambda n: Channels(n, conv(lambda n: n // 2, turned=True)), (8, 16), rows)


def test_groups_that_sizes_make_of_single_channels_are_refused() -> None:
    for layer in (conv(lambda n: 8), lambda n: nn.GroupNorm(8, n)):
        with pytest.raises(lemonx.Refused, match="its entries are 8 in the smaller model"):
            grown(lambda n, layer=layer: Channels(n, layer), (8, 16), rows)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_weight_norm_takes_the_length_that_copies_make(dim: int) -> None:
    for groups in (1, 4):
        grown(lambda n, g=groups: Beside(n, _normed(conv(lambda n: g), dim)), (8, 24), rows)
    grown(lambda n: Channels(n, _normed(conv(lambda n: 2, 3), dim), 3 * n), (8, 16), rows)
    with pytest.raises(lemonx.Refused, match="a weight norm divides by the length"):
        grown(lambda n: Channels(n, _normed(conv(lambda n: 1), dim)), (8, 12), rows)


def _normed(layer: Callable[[int], nn.Module], dim: int) -> Callable[[int], nn.Module]:
    return lambda n: parametrizations.weight_norm(layer(n), dim=dim)


def test_a_direction_that_is_also_used_as_it_is_does_not_grow() -> None:
    class Twice(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), parametrizations.weight_norm(nn.Linear(width, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            return self.head(x) + F.linear(x, self.head.get_parameter("parametrizations.weight.original1"))

    with pytest.raises(lemonx.Refused, match="is not a map of one axis"):
        grown(Twice, (8, 16), rows)


class Together(nn.Module):
    """Units with a number made of all of them."""

    def __init__(self, width: int, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what, self.up, self.head = what, nn.Linear(6, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.head(torch.tanh(x)) * self.what(x)


def test_copies_leave_the_mean_and_the_largest() -> None:
    grown(lambda n: Together(n, lambda x: x.mean(-1, keepdim=True)), (8, 16), rows)
    for width in (16, 12):
        grown(lambda n: Together(n, lambda x: x.amax(-1, keepdim=True)), (8, width), rows)
    with pytest.raises(lemonx.Refused, match="every new unit must duplicate an old one"):
        grown(lambda n: Together(n, lambda x: x.mean(-1, keepdim=True)), (8, 12), rows)
    for other in (lambda x: x.sum(-1, keepdim=True), lambda x: x.logsumexp(-1, keepdim=True)):
        with pytest.raises(lemonx.Refused):
            grown(lambda n, f=other: Together(n, f), (8, 16), rows)


def test_a_mean_that_no_nonlinearity_reads_keeps_at_any_width() -> None:
    class Linear(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            return self.head(x) + x.mean(-1, keepdim=True).exp()

    for width in (16, 12):
        grown(Linear, (8, width), rows)


def test_halves_of_a_gate_are_one_space() -> None:
    for width in (16, 12):
        grown(lambda n: Channels(n, lambda n: nn.Sequential(nn.Conv1d(n, 2 * n, 1), nn.GLU(1))), (8, width), rows)


def test_rows_written_one_by_one_are_the_space_that_they_come_from() -> None:
    class Scan(nn.Module):
        def __init__(self, width: int, other: bool) -> None:
            super().__init__()
            self.other, self.up, self.decay = other, nn.Linear(6, width), nn.Parameter(torch.randn(width))
            self.head = nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            made, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
            for i in range(x.shape[1]):
                state = state * torch.sigmoid(self.decay) + x[:, i]
                made[:, i] = state.flip(-1) if self.other and i % 2 else state
            return self.head(torch.tanh(made))

    for width in (16, 12):
        grown(lambda n: Scan(n, False), (8, width), rows)
    with pytest.raises(lemonx.Refused, match="moved along it"):
        grown(lambda n: Scan(n, True), (8, 16), rows)


def test_a_mask_that_is_the_same_for_all_units_may_write_zeros_to_them() -> None:
    class Masked(nn.Module):
        def __init__(self, width: int, number: float, alike: bool) -> None:
            super().__init__()
            self.number, self.alike = number, alike
            self.up, self.norm, self.head = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            mask = torch.zeros(x.shape, dtype=torch.bool)
            mask[:, 2:4, :: 1 if self.alike else 2] = True
            x[mask] = self.number
            return self.head(self.norm(x))

    for width in (16, 12):
        grown(lambda n: Masked(n, 0.0, True), (8, width), rows)
    grown(lambda n: Masked(n, 1.0, True), (8, 16), rows)
    for number, alike, width in ((1.0, True, 12), (0.0, False, 16)):
        with pytest.raises(lemonx.Refused):
            grown(lambda n, a=number, b=alike: Masked(n, a, b), (8, width), rows)
