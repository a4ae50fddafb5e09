"""Modules composed at random, each at two sizes: does anything claim that the larger is the same when it is not?

`case(n)` is a recipe drawn from a seed: operations on a sequence of vectors or on a picture, and the sizes of a small
and of a large model. Some operations cannot be grown (a softmax over units, a factor that the width decides): whoever
grows has to see that and refuse. The judgement is made here, by inputs of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from lemonx.errors import LemonxError, NotVerified
from lemonx_lab.survey.randomise import randomise

FEATURES, OUTPUTS, SIDE = 5, 3, 12
# The largest difference, relative to the largest output, that rounding can make of the small networks here.
TOLERANCE = 1e-9
Grow = Callable[[nn.Module, nn.Module, tuple[Tensor, ...]], object]


@dataclass(frozen=True)
class Case:
    """What is built: operations by name with their settings, the width before and after, blocks before and after."""

    number: int
    picture: bool
    steps: tuple[tuple[str, dict[str, Any]], ...]
    width: tuple[int, int]
    inner: tuple[int, int]
    heads: tuple[int, int]
    blocks: tuple[int, int]
    # Who adds a block to the stream: the block itself, or the model around it.
    outside: bool = False
    # Every second block has its steps in the other order; the stream is read behind this one too; there is no head.
    turns: bool = False
    tap: int | None = None
    bare: bool = False

    def model(self, which: int, seed: int = 0) -> nn.Module:
        """The small one (0) or the large one (1), in float64 and eval mode, every parameter random."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Composed(self, which).double().eval()
        randomise(model, seed)
        return model

    def inputs(self, seed: int, rows: int = 3, length: int = 7) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, FEATURES, SIDE, SIDE) if self.picture else (rows, length, FEATURES)
        return (torch.randn(shape, generator=generator, dtype=torch.float64),)


def case(number: int) -> Case:
    """The case of this number, always the same."""
    r = random.Random(number)
    picture = r.random() < 0.3
    known = PICTURES if picture else SEQUENCES
    plain, traps = [name for name in known if name not in TRAPS], [name for name in known if name in TRAPS]
    names = [r.choice(plain) for _ in range(r.randint(1, 6))]
    if r.random() < 0.3:
        names[r.randrange(len(names))] = r.choice(traps)
    steps = tuple((name, {"number": r.randrange(10**6), "flag": r.random() < 0.5}) for name in names)
    heads, each = r.choice((2, 4)), r.choice((2, 4, 6))
    width = heads * each
    factor = r.choice((1, 2, 2, 1.5, 3))
    grown = int(width * factor) if heads * factor % 1 == 0 else width * 2
    more = r.choice((1, 1, 2))
    inner = r.choice((6, 8, 10))
    wide_inner = inner if r.random() < 0.4 else inner + r.choice((1, 3, inner, 2 * inner))
    blocks = r.randint(1, 2)
    sizes = {
        "width": (width, grown),
        "inner": (inner, wide_inner),
        # Heads make up the width, or are wider.
        "heads": (heads, heads * grown // width if r.random() < 0.7 else heads * more),
        "blocks": (blocks, blocks + r.choice((0, 0, 1, 2))),
    }
    if sizes["width"][1] % sizes["heads"][1]:
        sizes["heads"] = (heads, heads)
    if grown == width and sizes["blocks"][0] == sizes["blocks"][1] and not INNER & set(names):
        sizes["blocks"] = (blocks, blocks + 1)
    elif grown == width and inner == wide_inner:
        sizes["inner"] = (inner, 2 * inner)
    tap = r.randrange(-blocks, blocks) if r.random() < 0.15 else None
    turns, bare = len(steps) > 1 and r.random() < 0.15, r.random() < 0.1
    return Case(number, picture, steps, **sizes, outside=r.random() < 0.1, turns=turns, tap=tap, bare=bare)


class Block(nn.Module):
    """Steps one after the other, added to the stream if so asked."""

    def __init__(self, steps: list[nn.Module], adds: bool) -> None:
        super().__init__()
        self.steps, self.adds = nn.Sequential(*steps), adds

    def forward(self, x: Tensor) -> Tensor:
        return x + self.steps(x) if self.adds else self.steps(x)


class Composed(nn.Module):
    """A stem, the steps of a case one after the other, a head; in blocks, each of them added to the stream."""

    def __init__(self, of: Case, which: int) -> None:
        super().__init__()
        self.picture = of.picture
        width, inner, heads = of.width[which], of.inner[which], of.heads[which]
        self.stem: nn.Module = nn.Conv2d(FEATURES, width, 3, padding=1) if of.picture else nn.Linear(FEATURES, width)
        known = PICTURES if of.picture else SEQUENCES
        self.blocks = nn.ModuleList(
            Block([known[name](width, inner, heads, **settings) for name, settings in steps], not of.outside)
            for steps in (of.steps[:: -1 if of.turns and number % 2 else 1] for number in range(of.blocks[which]))
        )
        self.tap = of.tap
        self.outside = of.outside
        self.last = Channels(nn.LayerNorm(width)) if of.picture else nn.LayerNorm(width)
        self.head = nn.Identity() if of.bare else nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.stem(x), []
        for block in self.blocks:
            x = x + block(x) if self.outside else block(x)
            seen.append(x)
        x = self.last(x if self.tap is None else x + seen[self.tap])
        return self.head(x.mean((2, 3)) if self.picture else x)


# ----------------------------------------------------------------- operations


class Apply(nn.Module):
    """A function of the stream, and of the modules that it is given."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module, **parameters: Tensor) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)
        self.names = list(parameters)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts, *(getattr(self, name) for name in self.names))


class Channels(nn.Module):
    """A module for the last axis, along the channels of a picture."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x.movedim(1, -1)).movedim(-1, 1)


class RMS(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt())


def _square(x: Tensor) -> Tensor:
    return x * torch.tanh(x)  # a square near 0, and no larger than what it is given further out


def _exp(x: Tensor) -> Tensor:
    return torch.exp(torch.tanh(x))


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.elu, F.leaky_relu, torch.sin, _square, F.mish),
    *(F.hardswish, _exp, torch.abs),
)


def _activation(number: int) -> Callable[[Tensor], Tensor]:
    return ACTIVATIONS[number % len(ACTIVATIONS)]


def _norm(width: int, number: int) -> nn.Module:
    made = (
        nn.LayerNorm(width), RMS(width), nn.LayerNorm(width, elementwise_affine=False), nn.RMSNorm(width, eps=1e-3),
        nn.LayerNorm(width, bias=False),
    )  # fmt: skip
    return made[number % len(made)]


def linear(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return nn.Linear(width, width, bias=flag)


def activation(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    function = _activation(number)
    return Apply(lambda x: function(0.5 * x) if flag else function(x))


def norm(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return _norm(width, number)


def mlp(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    layers = (nn.Linear(width, inner, bias=flag), nn.Linear(inner, width, bias=not flag))
    return Apply(lambda x, up, down: down(_activation(number)(up(x))), *layers)


def gated(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Two projections, or one that is cut in two."""
    if flag:
        parts = (nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width))
        return Apply(lambda x, a, b, down: down(_activation(number)(a(x)) * b(x)), *parts)

    def fused(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        a, b = up(x).chunk(2, dim=-1)
        return down(_activation(number)(a) * b)

    return Apply(fused, nn.Linear(width, 2 * inner), nn.Linear(inner, width))


def attention(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Fused or not, by torch's function or by hand, heads before or behind what is joined with them."""

    def fused(x: Tensor, qkv: nn.Module, out: nn.Module) -> Tensor:
        b, t, _ = x.shape
        split = qkv(x).view(b, t, 3, heads, width // heads) if number % 2 else None
        if split is None:  # each head has its queries, keys and values together
            split = qkv(x).view(b, t, heads, 3, width // heads).transpose(2, 3)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=flag)
        return out(mixed.transpose(1, 2).reshape(b, t, width))

    def apart(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module, out: nn.Module) -> Tensor:
        queries, keys, values = (part(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        scores = queries @ keys.transpose(-1, -2) * (width // heads) ** -0.5
        return out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))

    if number % 3:
        return Apply(fused, nn.Linear(width, 3 * width), nn.Linear(width, width))
    return Apply(apart, *[nn.Linear(width, width, bias=flag) for _ in range(4)])


def joined(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Two projections side by side, read by a third; or the stream beside itself."""
    if flag:
        parts = (nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(2 * inner, width))
        return Apply(lambda x, a, b, c: c(torch.cat([torch.tanh(a(x)), b(x)], -1)), *parts)
    return Apply(lambda x, c: c(torch.cat([x, torch.relu(x)], -1)), nn.Linear(2 * width, width))


def scaled(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    gain = torch.ones(width)
    return Apply(lambda x, gain: x * gain + (0.5 if flag else 0.0), gain=gain)


def shared(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """One module, used twice."""
    return Apply(lambda x, a: a(_activation(number)(a(x))), nn.Linear(width, width))


def tied(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """A matrix and its transpose."""
    return Apply(lambda x, a: F.linear(F.relu(a(x)), a.weight.T), nn.Linear(width, inner))


def by_heads(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """The stream as heads, each of them normed on its own."""

    def forward(x: Tensor, inside: nn.Module) -> Tensor:
        return inside(x.unflatten(-1, (heads, -1))).flatten(-2)

    return Apply(forward, _norm(width // heads, number))


def token_mean(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x, a: a(x) + x.mean(1, keepdim=True), nn.Linear(width, width))


def unused(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x, a, b: a(x), nn.Linear(width, width), nn.Linear(width, inner))


# What follows mixes units in ways that few growths keep.


def unit_softmax(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x, a: a(x).softmax(-1), nn.Linear(width, width))


def unit_sum(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x: x + (x.sum(-1, keepdim=True) if flag else x.mean(-1, keepdim=True)))


def unit_max(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x: x - x.amax(-1, keepdim=True))


def unit_cumsum(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x: x.cumsum(-1) if flag else x.sort(-1).values)


def unit_length(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x: F.normalize(x, dim=-1) if flag else x / x.norm(dim=-1, keepdim=True).add(1.0))


def unit_shift(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x: x + (x.roll(1, -1) if flag else x.flip(-1)))


def unit_select(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """One unit, or the first half of them, acts on all."""
    if flag:
        return Apply(lambda x: x * x[..., :1])
    return Apply(lambda x: torch.cat([x[..., : x.shape[-1] // 2].relu(), x[..., x.shape[-1] // 2 :]], -1))


def width_factor(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    factor = width**-0.5 if flag else float(width)
    return Apply(lambda x, a: a(x) * factor, nn.Linear(width, width))


def width_branch(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """What it computes depends on how wide it is."""
    return Apply(lambda x: torch.relu(x) if width > 20 else torch.tanh(x))


def unit_constant(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    ramp = torch.arange(width, dtype=torch.float64) / (width if flag else 10)
    return Apply(lambda x: x * ramp)


def unit_dropped(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Apply(lambda x: F.group_norm(x.flatten(0, 1), 2).view_as(x))


class Routed(nn.Module):
    """Some of four experts for each token, run in a loop; `flag`: weighed by a softmax over those chosen."""

    def __init__(self, width: int, inner: int, chosen: int, flag: bool) -> None:
        super().__init__()
        self.gate, self.chosen, self.flag = nn.Linear(width, 4), chosen, flag
        self.up, self.down = nn.Parameter(torch.randn(4, 2 * inner, width)), nn.Parameter(torch.randn(4, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).topk(self.chosen, dim=-1)
        weights = weights.softmax(-1) if self.flag else weights.sigmoid()
        result, mask = torch.zeros_like(flat), F.one_hot(chosen, 4).permute(2, 1, 0)
        for expert in mask.sum((1, 2)).nonzero()[:, 0]:
            place, token = torch.where(mask[expert])
            gate, up = F.linear(flat[token], self.up[expert]).chunk(2, -1)
            result.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, place, None])
        return result.view_as(x)


def routed(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Routed(width, inner, 1 + number % 2, flag)


def angles(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Tokens mixed by the angles between two projections."""

    def forward(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
        one, two = a(x), b(x)
        one = F.normalize(one, dim=-1) if flag else one / one.norm(dim=-1, keepdim=True)
        return (one @ F.normalize(two, dim=-1).mT) @ c(x)

    return Apply(forward, nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(width, width))


def pieces(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Two projections, written to one tensor one after the other."""

    def forward(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
        one, two = a(x), b(x)
        both = one.new_empty(*one.shape[:-1], one.shape[-1] + two.shape[-1])
        both[..., : one.shape[-1]].copy_(one)
        both[..., one.shape[-1] :].copy_(two)
        return c(F.gelu(both) if flag else both)

    return Apply(forward, nn.Linear(width, inner), nn.Linear(width, 2 * inner), nn.Linear(3 * inner, width))


def probed(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """What a learned query finds, added to every token."""

    def forward(x: Tensor, key: nn.Module, value: nn.Module, query: nn.Module, probe: Tensor) -> Tensor:
        parts = (query(probe.expand(len(x), -1, -1)), key(x), value(x))
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    maps = (nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width) if flag else nn.Identity())
    return Apply(forward, *maps, probe=torch.randn(1, 1, width))


def among(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Other vectors in the places of some tokens."""

    def forward(x: Tensor, a: nn.Module) -> Tensor:
        mask = (torch.arange(x.shape[1]) % 3 == number % 3).expand(x.shape[:2])
        if flag:
            return x.masked_scatter(mask.unsqueeze(-1).expand_as(x), a(x)[mask])
        other = x.clone()
        other[mask] = a(x)[mask]
        return other

    return Apply(forward, nn.Linear(width, width))


def running(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Sums up to each token, or the largest of all tokens."""
    return Apply(lambda x: x.cumsum(1) if flag else x - x.max(dim=1, keepdim=True).values)


def scan(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """States of every unit, written token by token; and tokens that a mask sets to zero, or to one."""

    def forward(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
        keep, x = torch.sigmoid(a(x)), x.clone()
        x[(torch.arange(x.shape[1]) == 2).view(1, -1, 1).expand_as(x)] = float(number % 5 == 0)
        made, state = torch.zeros_like(keep), torch.zeros_like(keep[:, 0])
        for i in range(x.shape[1]):
            state = keep[:, i] * state + b(x[:, i])
            made[:, i] = state
        return made

    into = nn.Linear(width, width) if flag else nn.Identity()
    return Apply(forward, nn.Linear(width, width), into)


def weight_normed(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Maps kept as lengths and directions, the length of each row or of each column."""
    parts = (weight_norm(nn.Linear(width, inner), dim=number % 2), weight_norm(nn.Linear(inner, width, bias=flag)))
    return Apply(lambda x, a, b: b(_activation(number)(a(x))), *parts)


def weighed(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Units behind a nonlinearity, weighed and summed; the weights are divided by how many units there are."""
    parts = (nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(width, width))
    factor = inner**-0.5 if flag else 0.3

    def forward(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
        return c(x) * ((b(x) * factor).unsqueeze(-2) @ _activation(number)(a(x)).unsqueeze(-1)).squeeze(-1)

    return Apply(forward, *parts)


def unit_mean(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """A mean over units, of their squares or of those of what a nonlinearity leaves, used for all of them."""
    which = number % 4

    def forward(x: Tensor) -> Tensor:
        if which == 0:
            return x * torch.sigmoid(x.mean(-1, keepdim=True))
        if which == 1:
            return torch.relu(x) * x.pow(2).mean(-1, keepdim=True).sqrt()
        if which == 2:
            return x * (x.amax(-1, keepdim=True) + x.amin(-1, keepdim=True))
        return torch.relu(x - x.mean(-1, keepdim=True) - x.std(-1, keepdim=True, unbiased=flag))

    return Apply(forward)


def unit_route(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """The largest units of each token, or the first that is largest."""

    def forward(x: Tensor) -> Tensor:
        if flag:
            return torch.zeros_like(x).scatter(-1, x.topk(2, dim=-1).indices, 1.0) * x
        return x * x.argmax(-1, keepdim=True)

    return Apply(forward)


def unit_among(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Other numbers in the places of some units."""

    def forward(x: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[-1]) % 3 == number % 3).expand_as(x)
        if flag:
            return x.masked_scatter(mask, 2.0 * x)
        other = x.clone()
        other[..., :2] = 1.5 * other[..., :2]
        return other

    return Apply(forward)


def unit_masked(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """What a mask chooses from all units, used; or one unit of all."""
    if flag:
        return Apply(lambda x: x + x[torch.ones_like(x, dtype=torch.bool)].view_as(x).flip(-1))
    return Apply(lambda x: x * x[..., number % 2].unsqueeze(-1))


def value_branch(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """What it computes depends on its values."""
    return Apply(lambda x: torch.where(x.mean(-1, keepdim=True) > 0, x, -x) if flag else torch.where(x > 0, x, 0.1 * x))


# ----------------------------------------------------------------- for pictures


def conv(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return nn.Conv2d(width, width, 3, padding=1, bias=flag)


def depthwise(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return nn.Conv2d(width, width, 3, padding=1, groups=width if flag else heads)


def grouped(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """As many groups at any width, or a second kernel for every channel; kept as lengths and directions, or not."""
    groups = (2, width)[number % 2]
    made = nn.Conv2d(width, 2 * width, 3, padding=1, groups=groups, bias=flag)
    if number % 3 == 0:
        made = weight_norm(made, dim=number % 4)
    return Apply(lambda x, a: F.glu(_activation(number)(a(x)), 1), made)


def grouped_back(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return nn.ConvTranspose2d(width, width, 3, padding=1, groups=2 if flag else heads)


def batch_norm(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return nn.BatchNorm2d(width, affine=flag)


def group_norm(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return nn.GroupNorm(width if number % 3 == 0 else 2 if flag else 1, width)


def bottleneck(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    parts = (nn.Conv2d(width, inner, 1, bias=not flag), nn.BatchNorm2d(inner), nn.Conv2d(inner, width, 3, padding=1))
    return Apply(lambda x, a, b, c: c(_activation(number)(b(a(x)))), *parts)


def squeeze(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    def forward(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
        return x * torch.sigmoid(b(F.relu(a(x.mean((2, 3)))))).unsqueeze(-1).unsqueeze(-1)

    return Apply(forward, nn.Linear(width, inner), nn.Linear(inner, width))


def resampled(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    pools = (F.max_pool2d, F.avg_pool2d)
    return Apply(lambda x: F.interpolate(pools[number % 2](x, 2), scale_factor=2, mode="nearest"))


def transposed(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    parts = (nn.Conv2d(width, inner, 3, 2, 1), nn.ConvTranspose2d(inner, width, 2, 2))
    return Apply(lambda x, down, up: up(_activation(number)(down(x))), *parts)


def conv_joined(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    parts = (nn.Conv2d(width, inner, 1), nn.Conv2d(width + inner, width, 1))
    return Apply(lambda x, a, b: b(torch.cat([F.relu(a(x)), x] if flag else [x, F.relu(a(x))], 1)), *parts)


def channel_norm(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    return Channels(_norm(width, number))


def shuffled(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    """Channels of two groups by turns."""
    return Apply(lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def channel_trap(width: int, inner: int, heads: int, number: int, flag: bool) -> nn.Module:
    trap = (unit_softmax, unit_sum, unit_max, unit_length, unit_shift, width_factor, width_branch)[number % 7]
    return Channels(trap(width, inner, heads, number, flag))


Make = Callable[..., nn.Module]
SEQUENCES: dict[str, Make] = {
    made.__name__: made
    for made in (
        *(linear, activation, norm, mlp, gated, attention, joined, scaled, shared, tied, by_heads, token_mean, unused),
        *(
            routed,
            angles,
            pieces,
            probed,
            among,
            running,
            scan,
            weight_normed,
            weighed,
            unit_mean,
            unit_route,
            unit_among,
            unit_masked,
        ),
        *(unit_softmax, unit_sum, unit_max, unit_cumsum, unit_length, unit_shift, unit_select, width_factor),
        *(width_branch, unit_constant, unit_dropped, value_branch),
    )
}
PICTURES: dict[str, Make] = {
    made.__name__: made
    for made in (
        *(
            conv,
            depthwise,
            grouped,
            grouped_back,
            batch_norm,
            group_norm,
            bottleneck,
            squeeze,
            resampled,
            transposed,
            conv_joined,
        ),
        *(channel_norm, activation, shuffled, channel_trap),
    )
}
TRAPS = frozenset(
    (
        *("unit_softmax", "unit_sum", "unit_max", "unit_cumsum", "unit_length", "unit_shift", "unit_select"),
        *("width_factor", "width_branch", "unit_constant", "unit_dropped", "value_branch", "shuffled", "channel_trap"),
        *("unit_route", "unit_among", "unit_masked"),
    )
)
# Those that have an inner size, whatever their settings.
INNER = frozenset(
    {
        "mlp",
        "gated",
        "tied",
        "weight_normed",
        "weighed",
        "bottleneck",
        "squeeze",
        "transposed",
        "conv_joined",
        "routed",
        "angles",
        "pieces",
    }
)


# ----------------------------------------------------------------- the judgement


@dataclass(frozen=True)
class Outcome:
    """What a case came to: `exact`, `refused`, `false` (claimed and not so), `broken` (an error that is no refusal).

    `rejected`: the check let it pass, and the rehearsal did not, so the check has a fault.
    """

    case: Case
    kind: str
    difference: float = 0.0
    why: str = ""
    steps: list[str] = field(default_factory=list)


def run_case(number: int, grow: Grow) -> Outcome:
    """Grow the small model of a case into the large one, and see whether what is claimed is so."""
    made = case(number)
    small, large = made.model(0), made.model(1, seed=1)
    before = {name: value.clone() for name, value in small.state_dict().items()}
    try:
        grow(small, large, made.inputs(0))
    except NotVerified as failure:
        return Outcome(made, "rejected", why=str(failure))
    except LemonxError as refusal:
        return Outcome(made, "refused", why=str(refusal))
    except Exception as error:
        return Outcome(made, "broken", why=f"{type(error).__name__}: {error}")
    if any(not torch.equal(value, before[name]) for name, value in small.state_dict().items()):
        return Outcome(made, "broken", why="the small model was changed")
    worst = max(_difference(small, large, made.inputs(seed, rows, length)) for seed, rows, length in JUDGED)
    kind = "exact" if worst <= TOLERANCE else "false"
    return Outcome(made, kind, worst, "" if kind == "exact" else f"outputs differ by {worst:.1e} of the largest")


# Seeds, rows and lengths that nothing was grown with.
JUDGED = ((1001, 3, 7), (1002, 2, 11), (1003, 5, 4))


@torch.no_grad()
def _difference(small: nn.Module, large: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    one, other = small(*inputs), large(*inputs)
    if len(one.shape) != len(other.shape) or any(a > b for a, b in zip(one.shape, other.shape, strict=True)):
        return float("inf")
    other = other[tuple(slice(size) for size in one.shape)]  # a model without a head gives a wider output
    found = float((one - other).abs().max() / one.abs().max().clamp(min=1e-300))
    return found if found == found else float("inf")
