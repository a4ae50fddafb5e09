"""Modules made of steps at random, of which some follow a larger width, some only a multiple, and some none."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, FEATURES, OUT = 5, 6, 3


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class Composed(nn.Module):
    """A norm written out."""

    def __init__(self, width: int, centred: bool) -> None:
        super().__init__()
        self.centred, self.gain = centred, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _constant(x: Tensor) -> Tensor:
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "square": lambda x: x * x,
    "double": lambda x: 2 * x,
    "shift": lambda x: x + 0.25,
    "mask": lambda x: x.masked_fill(torch.eye(TOKENS, dtype=torch.bool)[0][:, None], 0.0),
    "tokens": lambda x: x - x.mean(1, keepdim=True),
    "running": lambda x: x.cumsum(1),
    "running features": lambda x: x.cumsum(-1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "fold": lambda x: torch.cat([x.chunk(2, -1)[0] + x.chunk(2, -1)[1]] * 2, -1),
    "evens": lambda x: torch.stack([x[..., ::2], x[..., 1::2]], -1).flatten(-2),
    "softmax": lambda x: x.softmax(-1),
    "over tokens": lambda x: x.softmax(1),
    "sum": lambda x: x + x.sum(-1, keepdim=True),
    "mean": lambda x: x + x.mean(-1, keepdim=True),
    "largest": lambda x: x - x.amax(-1, keepdim=True),
    "unit": lambda x: F.normalize(x, dim=-1),
    "spread": lambda x: x / (x.std(-1, keepdim=True) + 1.0),
    "gram": lambda x: x + (x @ x.mT) @ x / x.shape[-1],
    "channels": lambda x: x @ (x.mT @ x).softmax(-1),
    "sorted": lambda x: x.sort(-1).values,
    "constant": _constant,
    "other rms": lambda x: F.relu(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0),
    "in place": lambda x: x.clone().mul_(0.5).add_(x).relu_(),
    "pieces": lambda x: torch.zeros_like(x).index_copy(1, torch.arange(TOKENS), x),
    "written": lambda x: _written(x),
}


def _written(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[:, 1:] = x[:, :-1]
    return out


class Mixed(nn.Module):
    """Steps that a seed chooses, each as it is or added to what it is given."""

    def __init__(self, seed: int, width: int, heads: int, inner: int, depth: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.inp, self.out = nn.Linear(FEATURES, width), nn.Linear(width, OUT)
        kinds = ["layer", "rms", "own layer", "own rms", "attention", "gated", "linear", "scale", *FUNCTIONS]
        common = 8 / len(kinds)  # of the steps half are usual ones
        chosen = [rng.choice(kinds[:8] if rng.random() < 0.5 + common / 2 else kinds) for _ in range(depth)]
        self.adds = [rng.random() < 0.6 for _ in chosen]
        self.steps = nn.ModuleList(self._step(kind, width, heads, inner) for kind in chosen)
        self.kinds = chosen

    def _step(self, kind: str, width: int, heads: int, inner: int) -> nn.Module:
        modules: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(width),
            "rms": lambda: nn.RMSNorm(width, eps=1e-3),
            "own layer": lambda: Composed(width, True),
            "own rms": lambda: Composed(width, False),
            "attention": lambda: Attention(width, heads),
            "gated": lambda: Gated(width, inner),
            "linear": lambda: nn.Linear(width, width),
            "scale": lambda: Scale(width),
        }
        return modules[kind]() if kind in modules else Apply(FUNCTIONS[kind])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for step, adds in zip(self.steps, self.adds, strict=True):
            x = x + step(x) if adds else step(x)
        return self.out(x)
