"""What a run shows beyond plain layers: routes of tokens, vectors among others, outputs that grow, angles, pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lemonx
from lemonx_lab.survey.randomise import randomise

TOKENS, WORDS = 7, 11


def grown(make: Callable[[int], nn.Module], sizes: tuple[int, int], inputs: Callable[[int], object]) -> lemonx.Grown:
    """Grow and compare on inputs that were not seen: all of what there was, in front of what is new."""
    small, large = make(sizes[0]).double().eval(), make(sizes[1]).double().eval()
    randomise(small, 0)
    randomise(large, 1)
    result = lemonx.grow(small, large, inputs(0))
    for seed in (1, 2):
        given = inputs(seed)
        args = given if isinstance(given, tuple) else (given,)
        with torch.no_grad():
            ours, theirs = small(*args), large(*args)
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, theirs)), strict=True):
            off = (a - b[tuple(slice(size) for size in a.shape)]).abs().max()
            assert float(off) <= 1e-10 * float(a.abs().max())
    return result


def rows(seed: int) -> Tensor:
    return torch.randn(3, TOKENS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def words(seed: int) -> Tensor:
    return torch.randint(WORDS, (3, TOKENS), generator=torch.Generator().manual_seed(seed))


class Experts(nn.Module):
    """Two of five experts for a token, run in a loop over those that any token goes to."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 5)
        self.up = nn.Parameter(torch.randn(5, 2 * inner, width))
        self.down = nn.Parameter(torch.randn(5, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(flat)
        mask = F.one_hot(chosen, 5).permute(2, 1, 0)
        for expert in mask.sum((1, 2)).nonzero()[:, 0]:
            place, token = torch.where(mask[expert])
            gate, up = F.linear(flat[token], self.up[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[expert])
            result.index_add_(0, token, made * weights[token, place, None])
        return result.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, mixed: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = Experts(width, width) if mixed else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stacked(nn.Module):
    """Blocks of two kinds by turns, read behind a block before the last as well."""

    def __init__(self, width: int, kinds: str, tap: int | None = None) -> None:
        super().__init__()
        self.tap, self.embed, self.head = tap, nn.Embedding(WORDS, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width, kind == "e") for kind in kinds)
        self.side = None if tap is None else nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return self.head(x) if self.side is None else self.head(x) + self.side(seen[self.tap or 0])


@pytest.mark.parametrize("width", [16, 12], ids=["twice", "half more"])
def test_tokens_go_to_the_experts_that_they_went_to(width: int) -> None:
    grown(lambda n: Stacked(n, "de"), (8, width), words)


@pytest.mark.parametrize("kinds", [("e", "ee"), ("de", "dede"), ("dde", "ddedde"), ("ed", "eedd")], ids=str)
def test_blocks_of_several_kinds_grow_deeper_each_by_its_own(kinds: tuple[str, str]) -> None:
    grown(lambda n: Stacked(8, kinds[n]), (0, 1), words)


def test_blocks_in_another_order_are_refused() -> None:
    with pytest.raises(lemonx.Refused, match="in another order"):
        grown(lambda n: Stacked(8, ("de", "eedd")[n]), (0, 1), words)
    with pytest.raises(lemonx.Refused, match="unlike every block"):
        grown(lambda n: Stacked(8, ("d", "de")[n]), (0, 1), words)


@pytest.mark.parametrize(("depths", "tap"), [((2, 4), -2), ((3, 5), 1), ((3, 6), 0), ((2, 5), 0)])
def test_a_stream_that_is_read_between_blocks_is_read_behind_the_same_ones(depths: tuple[int, int], tap: int) -> None:
    grown(lambda n: Stacked(8, "d" * n, tap), depths, words)


def test_a_stream_that_would_be_read_behind_other_blocks_is_refused() -> None:
    taps = {2: 0, 4: 3}
    with pytest.raises(lemonx.Refused, match="in another order"):
        grown(lambda n: Stacked(8, "d" * n, taps[n]), (2, 4), words)


class Wider(nn.Module):
    """It gives its own width out, behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x))


@pytest.mark.parametrize("width", [16, 12], ids=["twice", "half more"])
def test_an_output_that_grows_begins_with_what_it_was(width: int) -> None:
    grown(Wider, (8, width), rows)


def test_an_output_of_several_axes_in_one_does_not_grow() -> None:
    class Heads(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, width), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).unflatten(-1, (-1, 4)).relu()).flatten(-2)

    with pytest.raises(lemonx.Refused, match="one of several axes in one"):
        grown(Heads, (8, 16), rows)


class Among(nn.Module):
    """Vectors of a picture in the places of some words."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.way, self.embed = way, nn.Embedding(WORDS, width)
        self.seen, self.norm, self.head = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, tokens: Tensor, picture: Tensor) -> Tensor:
        x, seen, mask = self.embed(tokens), self.seen(picture), tokens == 1
        if self.way == "scatter":
            wide = mask.unsqueeze(-1).expand_as(x)
            assert x[wide].numel() == seen.numel()  # counted, and nothing else
            x = x.masked_scatter(wide, seen)
        else:
            x[mask] = seen
        return self.head(self.norm(x))


@pytest.mark.parametrize("way", ["scatter", "put"])
def test_vectors_put_among_others_are_one_space_with_them(way: str) -> None:
    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        tokens = words(seed).clamp(min=2)
        tokens[:, 1:4] = 1
        picture = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return tokens, picture

    for width in (16, 12):
        grown(lambda n: Among(n, way), (8, width), inputs)


class Angles(nn.Module):
    """The angle between two projections."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.way, self.one, self.two = way, nn.Linear(6, width), nn.Linear(6, width)

    def _unit(self, x: Tensor) -> Tensor:
        if self.way == "normalize":
            return F.normalize(x, dim=-1)
        return x / (x.norm(dim=-1, keepdim=True) if self.way == "norm" else x.pow(2).sum(-1, keepdim=True).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        return self._unit(self.one(x)) @ self._unit(self.two(x)).mT


@pytest.mark.parametrize("way", ["normalize", "norm", "sum"])
def test_vectors_of_unit_length_keep_their_angles(way: str) -> None:
    for width in (16, 12):
        grown(lambda n: Angles(n, way), (8, width), rows)


class Probed(nn.Module):
    """A learned query, repeated for every example, by a map or by heads as it is."""

    def __init__(self, width: int, mapped: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.probe = nn.Parameter(torch.randn(1, 2, width))
        self.query = nn.Linear(width, width) if mapped else nn.Identity()
        self.key, self.value, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, probe = self.up(x), self.probe.expand(len(x), -1, -1)
        parts = (self.query(probe), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("mapped", [True, False])
def test_a_query_that_is_a_parameter_grows_with_the_heads(mapped: bool) -> None:
    for width in (16, 12):
        grown(lambda n: Probed(n, mapped), (8, width), rows)


class Pieces(nn.Module):
    """Keys of two parts, written to a tensor one after the other; the second is turned, as complex numbers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.turned = nn.Linear(6, 10 * heads), nn.Linear(6, 6 * heads), nn.Linear(6, 4)
        self.value, self.head = nn.Linear(6, 3 * heads), nn.Linear(3 * heads, 5)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=torch.float64).outer(torch.tensor([1.0, 0.1], dtype=torch.float64))
        turned = torch.view_as_complex(self.turned(x).unflatten(-1, (-1, 2))) * torch.polar(
            torch.ones_like(angles), angles
        )
        still = self.key(x).unflatten(-1, (self.heads, 6)).transpose(1, 2)
        keys = still.new_empty(*still.shape[:-1], 10)
        keys[..., :6].copy_(still)
        keys[..., 6:].copy_(torch.view_as_real(turned).flatten(-2).unsqueeze(1))
        q, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query(x), self.value(x)))
        return self.head(F.scaled_dot_product_attention(q, keys, v).transpose(1, 2).flatten(-2))


def test_a_tensor_that_is_written_piece_by_piece_is_a_sum_of_them() -> None:
    grown(Pieces, (2, 4), rows)
    grown(Pieces, (2, 3), rows)


class Grid(nn.Module):
    """Positions on a grid, looked up by numbers that are the same for any grid, and so mean other places."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(4, columns, 6)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1, keepdim=True) + F.embedding(torch.arange(8), self.table.flatten(0, 1)))


def test_a_grid_of_positions_does_not_get_more_columns() -> None:
    with pytest.raises(lemonx.Refused, match="numbers that rows are looked up by"):
        grown(Grid, (4, 8), rows)


class TwoScores(nn.Module):
    """Two pairs of queries and keys in one module, of which one alone is divided by what grows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.maps = nn.ModuleList(nn.Linear(6, n) for n in (size, size, 3, 3, 4))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, other_q, other_k, v = (one(x) for one in self.maps)
        scores = q @ k.transpose(-1, -2) / self.size**0.5 + other_q @ other_k.transpose(-1, -2) / 3**0.5
        return self.head(scores.softmax(-1) @ v)


def test_two_kinds_of_scores_in_one_module_keep_their_own_factors() -> None:
    grown(TwoScores, (4, 8), rows)
    grown(TwoScores, (4, 7), rows)


class Alternating(nn.Module):
    """Blocks of two kinds that differ in nothing but an inner size, in turn."""

    class Block(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(self.Block(8 + 4 * (i % 2)) for i in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_blocks_that_differ_in_a_size_alone_are_of_two_kinds() -> None:
    grown(Alternating, (2, 5), rows)


class Scanned(nn.Module):
    """A state for every unit, whose steps are written to a tensor one by one, between equations of a delta rule."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key, self.value, self.head = nn.Linear(6, 4 * heads), nn.Linear(6, 3 * heads), nn.Linear(3 * heads, 5)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.key(x), self.value(x)))
        system = keys @ keys.transpose(-1, -2)
        values = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
        steps, state = torch.zeros_like(values), torch.zeros_like(values[:, :, 0])
        for t in range(x.shape[1]):
            state = 0.5 * state + values[:, :, t]
            steps[:, :, t] = state
        return self.head(steps.transpose(1, 2).flatten(-2))


def test_a_scan_that_writes_its_steps_one_by_one_grows() -> None:
    grown(Scanned, (2, 4), rows)
    grown(Scanned, (2, 3), rows)


class Gated(nn.Module):
    """Queries with a gate beside each, of heads that share keys: a projection that alternates by two axes."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.query, self.head = nn.Linear(6, groups * 2 * (4 + 4)), nn.Linear(groups * 2 * 4, 5)
        self.key, self.value = nn.Linear(6, groups * 4), nn.Linear(6, groups * 4)

    def forward(self, x: Tensor) -> Tensor:
        query, gate = self.query(x).unflatten(-1, (2 * self.groups, 8)).chunk(2, -1)
        k, v = (part.unflatten(-1, (self.groups, 4)).transpose(1, 2) for part in (self.key(x), self.value(x)))
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        scores = (query.transpose(1, 2) @ k.transpose(-1, -2)).softmax(-1)
        return self.head((scores @ v).transpose(1, 2).flatten(-2) * gate.flatten(-2).sigmoid())


def test_gates_beside_the_queries_of_grouped_heads_grow() -> None:
    grown(Gated, (2, 4), rows)
    grown(Gated, (2, 3), rows)


def test_pieces_of_a_tensor_that_holds_a_constant_do_not_grow() -> None:
    class Constant(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), nn.Linear(2 * width, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            both = torch.arange(2.0 * x.shape[-1], dtype=x.dtype).expand(*x.shape[:-1], -1).clone()
            both[..., : x.shape[-1]].copy_(x)
            return self.head(both)

    with pytest.raises(lemonx.Refused, match="piece by piece"):
        grown(Constant, (8, 16), rows)


def test_a_selected_entry_is_known_although_another_view_is_changed_in_place() -> None:
    class Changed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            one = x[..., 1]
            x.mul_(2.0)
            return self.head(x) + one.unsqueeze(-1)

    with pytest.raises(lemonx.Refused):
        grown(Changed, (8, 12), rows)


class Spare(nn.Module):
    """A token that these inputs do not use, and one row of a tensor that is looked at for its shape alone."""

    def __init__(self, width: int, unused: int) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.randn(unused, width))
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, 90)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        ones = torch.ones(x[:, :, -1].shape, dtype=x.dtype).unsqueeze(-1)
        return self.head(x * ones)


def test_few_parameters_that_are_not_used_may_grow_and_nothing_is_claimed_of_them() -> None:
    result = grown(lambda n: Spare(n, 1), (8, 12), words)
    assert result.unused == ("mask",) and result.exercised < 1
    with pytest.raises(lemonx.Refused, match="mask is not used by the inputs"):
        grown(lambda n: Spare(n, 9), (8, 12), words)


def test_running_sums_over_tokens_leave_units_alone() -> None:
    class Summed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            best = x.max(dim=1, keepdim=True).values  # and where they are, which nobody asks
            return self.head(x.cumsum(1) + best)

    grown(Summed, (8, 12), rows)


class Fused(nn.Module):
    """Queries, a key and a value for every head in one tensor; the last two picked by lists of one number."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.head = heads, nn.Linear(6, heads * 4 * 5), nn.Linear(heads * 10, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = F.hardswish(self.qkv(x)).unflatten(-1, (self.heads, 4, 5))
        q, k, v = parts[:, :, :, :-2], parts[:, :, :, [-2]], parts[:, :, :, [-1]]
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k.expand_as(q), v.expand_as(q)))
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def test_a_list_of_one_number_is_a_slice() -> None:
    grown(Fused, (2, 4), rows)


def test_copies_that_sizes_ask_for_are_not_compared() -> None:
    class Copied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            return self.head((x.clone() if x.shape[-1] > 8 else x).relu())

    grown(Copied, (8, 16), rows)


def test_code_that_asks_for_float32_by_name_is_traced_in_float64() -> None:
    class Named(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), nn.Linear(width, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.up(x.float().relu()))

    small, large = Named(8).double(), Named(12).double()
    assert lemonx.grow(small, large, rows(0)).rehearsed <= 1e-10


def test_positions_that_are_looked_up_between_others_grow_with_the_width() -> None:
    class Sampled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, width), nn.Linear(width, 4)
            self.table = nn.Parameter(torch.randn(5 * 5, width))

        def forward(self, x: Tensor) -> Tensor:
            grid = torch.linspace(-0.9, 0.8, 2 * x.shape[1], dtype=x.dtype).view(1, x.shape[1], 1, 2)
            pixels = self.table.view(5, 5, -1).permute(2, 0, 1).unsqueeze(0)
            found = F.grid_sample(pixels, grid, align_corners=False)[0, :, :, 0].T
            return self.head((self.up(x) + found).relu())

    grown(Sampled, (8, 12), rows)


# ----------------------------------------------------------------- windows, factors, numbers of the depth


class Windows(nn.Module):
    """Windows of a picture's pixels side by side, read by a map and put back; then one pool over all that is left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, width, 1), nn.Linear(4 * width, 4 * width)
        self.pool, self.head = nn.AvgPool2d(width, ceil_mode=True), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        cut = F.unfold(torch.relu(self.conv(x)), 2, stride=2)
        back = F.fold(self.mix(cut.transpose(1, 2)).transpose(1, 2), x.shape[2:], 2, stride=2)
        return self.head(self.pool(back).flatten(1))


class Overlapping(nn.Module):
    """Tokens in windows that overlap, cut by strides, of what heads computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.tanh(self.up(x)).view(3, TOKENS, -1, 4).transpose(1, 2).reshape(-1, TOKENS, 4)
        size, (rows, step, one) = heads.shape, heads.stride()
        cut = heads.as_strided((size[0], 3, 3, 4), (rows, 2 * step, step, one))
        mean = cut.mean(2).view(3, -1, 3, 4).transpose(1, 2).reshape(3, 3, -1)
        return self.down(mean)


def pictures(seed: int) -> Tensor:
    return torch.randn(3, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_windows_of_pixels_and_of_tokens() -> None:
    """The pool's window is as large as the width says, and larger than the picture."""
    assert grown(Windows, (8, 12), pictures).rehearsed < 1e-12
    assert grown(Overlapping, (8, 16), rows).rehearsed < 1e-12


def test_windows_that_mix_units_are_refused() -> None:
    class Mixed(Overlapping):
        def forward(self, x: Tensor) -> Tensor:
            made = torch.tanh(self.up(x)).contiguous()
            return self.down(made.as_strided((3, TOKENS - 1, made.shape[2]), made.stride(), 1))  # across two tokens

    with pytest.raises(lemonx.Refused, match="as_strided"):
        lemonx.grow(Mixed(7).double(), Mixed(14).double(), rows(0))


class Rescaled(nn.Module):
    """Branches times a number of the depth, a factor for the stream of every block, and a tied head times a width's."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, width), nn.RMSNorm(width, eps=1e-6)
        self.layers = nn.ModuleList(Factored(width, depth) for _ in range(depth))
        self.width = width

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return (self.norm(x) * self.width**-0.5) @ self.embed.weight.T


class Factored(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm, self.map, self.depth = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, width), depth
        self.factor = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.map(self.norm(x)) / self.depth**0.5) * self.factor


@pytest.mark.parametrize("sizes", [(8, 2), (16, 2), (12, 4)])
def test_numbers_of_the_depth_and_factors_of_the_stream(sizes: tuple[int, int]) -> None:
    result = grown(lambda large: Rescaled(*(sizes if large else (8, 2))), (0, 1), words)
    assert result.rehearsed < 1e-12


def test_a_stream_times_what_is_not_one_number_is_no_identity() -> None:
    """What is computed of a parameter is not one where that is one."""

    class Gated(Factored):
        def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
            super().__init__(8, 1)
            self.how = how

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.how(self.factor)

    def make(depth: int, how: Callable[[Tensor], Tensor]) -> nn.Module:
        model = Rescaled(8, depth)
        model.layers = nn.ModuleList(Gated(how) for _ in range(depth))
        return model.double()

    for how in (torch.sigmoid, lambda factor: 2 * factor, lambda factor: 1 + factor, lambda factor: -factor):
        with pytest.raises(lemonx.Refused, match="is not what it was given"):
            lemonx.grow(make(2, how), make(3, how), words(0))


# ----------------------------------------------------------------- constants that maps read


def sinusoids(width: int, base: float = 1e4) -> Tensor:
    angles = torch.arange(TOKENS).double()[:, None] * base ** (-torch.arange(0, width, 2).double() / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class Placed(nn.Module):
    """A map of sinusoids, as many as the width is large, added to what a text becomes."""

    def __init__(self, width: int, base: float = 1e4, both: bool = False) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, width), nn.Linear(width, width, bias=False)
        self.norm, self.head, self.both = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 4), both
        self.register_buffer("table", sinusoids(width, base), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.positions(self.table)
        return self.head(self.norm(self.positions(x) if self.both else x))


def test_a_map_of_sinusoids_reads_those_that_it_had() -> None:
    """Twice as wide, every second pair of sinusoids is one of the smaller model's; the others are not read yet."""
    assert grown(Placed, (8, 16), words).rehearsed < 1e-12


@pytest.mark.parametrize(
    "large", [lambda: Placed(12), lambda: Placed(16, base=1e3), lambda: Placed(16, both=True)],
    ids=["some are between", "others", "read the stream too"],
)  # fmt: skip
def test_a_map_of_other_numbers_is_refused(large: Callable[[], Placed]) -> None:
    wide = large().double()
    with pytest.raises(lemonx.Refused, match="it meets an axis of the inputs"):
        lemonx.grow(Placed(8, both=wide.both).double(), wide, words(0))


# ----------------------------------------------------------------- two streams that blocks join


class Pairs(nn.Module):
    """Words and what they name in two streams; every block joins them, adds to both, and parts them; `cut`: where."""

    def __init__(self, depth: int, cut: int = 0) -> None:
        super().__init__()
        self.words, self.named = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
        self.layers, self.head = nn.ModuleList(Pair(cut) for _ in range(depth)), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        words, named = self.words(ids), self.named(ids[:, :3])
        for layer in self.layers:
            words, named = layer(words, named)
        return self.head(torch.cat([words, named], 1))


class Pair(nn.Module):
    def __init__(self, cut: int) -> None:
        super().__init__()
        self.norm, self.map, self.last, self.cut = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), cut

    def forward(self, words: Tensor, named: Tensor) -> tuple[Tensor, Tensor]:
        whole, at = torch.cat([words, named], 1), words.shape[1]
        whole = self.norm(whole + self.map(whole.mean(1, keepdim=True).expand_as(whole)))
        again = torch.cat([whole[:, :at], whole[:, at:]], 1)
        again = self.last(again + self.map(again))
        return again[:, self.cut : at + self.cut], again[:, at:]


def test_streams_that_are_joined_and_parted() -> None:
    small, large = Pairs(2).double(), Pairs(3).double()
    randomise(small, 0)
    assert lemonx.grow(small, large, words(0), free={"small_gains": True}).rehearsed < 1e-11
    assert (small(words(1)) - large(words(1))).abs().max() < 1e-10


def test_streams_that_are_parted_elsewhere_are_no_identity() -> None:
    with pytest.raises(lemonx.Refused, match="is not what it was given"):
        lemonx.grow(Pairs(2, cut=1).double(), Pairs(3, cut=1).double(), words(0))
