"""Models made of torch's own transformer modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 5, 7


def sequences(seed: int, rows: int = 3, length: int = 11) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, length, FEATURES, generator=generator, dtype=torch.float64),)


def pairs(seed: int, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    """Two sequences, of which the second is read by the first."""
    return {"target": sequences(seed, rows, length - 4)[0], "memory": sequences(seed + 1000, rows, length)[0]}


class Encoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=norm_first)
        last = nn.LayerNorm(dim) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, depth, norm=last, enable_nested_tensor=False)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def pre_norm_encoder(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return Encoder(width, depth, heads, norm_first=True)


def post_norm_encoder(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return Encoder(width, depth, heads, norm_first=False)


class Decoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.target, self.memory = nn.Linear(FEATURES, dim), nn.Linear(FEATURES, dim)
        layer = nn.TransformerDecoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.decoder = nn.TransformerDecoder(layer, depth, norm=nn.LayerNorm(dim) if norm_first else None)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.head(self.decoder(self.target(target), self.memory(memory), tgt_mask=ahead))


def pre_norm_decoder(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return Decoder(width, depth, heads, norm_first=True)


def post_norm_decoder(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return Decoder(width, depth, heads, norm_first=False)


class AttentionPool(nn.Module):
    """nn.MultiheadAttention by learned queries over a sequence, as heads of detectors and of CLIP have it."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, dim)
        self.queries = nn.Parameter(torch.zeros(1, 4, dim))
        self.attention = nn.ModuleList([nn.MultiheadAttention(dim, heads, batch_first=True) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.embed(x)
        q = self.queries.expand(len(x), -1, -1)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            q = q + attention(norm(q), keys, keys, need_weights=False)[0]
        return self.head(q)


def attention_pool(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return AttentionPool(width, depth, heads)
