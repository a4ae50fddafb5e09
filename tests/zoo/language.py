"""Language models as people write them in one file: nanoGPT's way, Llama's, recurrent ones, einsum, tied and shared."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, CONTEXT = 61, 64


def tokens(seed: int, rows: int = 3, length: int = 11) -> tuple[Tensor]:
    """Random texts."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, VOCABULARY, (rows, length), generator=generator),)


# ----------------------------------------------------------------- nanoGPT's way


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(n_embd, 4 * n_embd), "gelu": nn.GELU(), "c_proj": nn.Linear(4 * n_embd, n_embd)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](self.mlp["gelu"](self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """Learned positions, a fused q, k and v, and a head that is the embedding."""

    def __init__(self, n_embd: int, n_layer: int, n_head: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, n_embd),
                "wpe": nn.Embedding(CONTEXT, n_embd),
                "h": nn.ModuleList([GPTBlock(n_embd, n_head) for _ in range(n_layer)]),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def nanogpt(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return GPT(width, depth, heads)


# ----------------------------------------------------------------- a Llama in one file


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class GroupedAttention(nn.Module):
    """Two key-value heads serve all query heads."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = rotate(self.wq(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        ahead = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = GroupedAttention(dim, n_heads, n_kv_heads, head_dim)
        self.ffn_norm = RMSNorm(dim)
        self.feed_forward = SwiGLU(dim, 2 * dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Grouped queries, RMSNorm, rotary positions, SwiGLU."""

    def __init__(self, dim: int, n_layers: int, n_heads: int, head_dim: int = 12) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList([LlamaBlock(dim, n_heads, n_heads // 2, head_dim) for _ in range(n_layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(CONTEXT), 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        h, t = self.tok_embeddings(ids), ids.shape[1]
        for layer in self.layers:
            h = layer(h, self.cos[:t], self.sin[:t])
        return self.output(self.norm(h))


def llama(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return Llama(width, depth, heads)


# ----------------------------------------------------------------- attention in einsums, a head of its own


class EinsumBlock(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q = nn.Parameter(torch.empty(dim, heads, head_dim))
        self.k = nn.Parameter(torch.empty(dim, heads, head_dim))
        self.v = nn.Parameter(torch.empty(dim, heads, head_dim))
        self.o = nn.Parameter(torch.empty(heads, head_dim, dim))
        for weight in (self.q, self.k, self.v, self.o):
            nn.init.normal_(weight, std=0.02)
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.ReLU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (torch.einsum("btd,dhe->bhte", h, weight) for weight in (self.q, self.k, self.v))
        scores = torch.einsum("bhie,bhje->bhij", q, k) * q.shape[-1] ** -0.5
        mixed = torch.einsum("bhij,bhje->bhie", scores.softmax(-1), v)
        x = x + torch.einsum("bhte,hed->btd", mixed, self.o)
        return x + self.net(x)


class EinsumEncoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList([EinsumBlock(dim, heads, 8) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def einsum(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return EinsumEncoder(width, depth, heads)


# ----------------------------------------------------------------- recurrent ones


class RecurrentLM(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], dim: int, layers: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, 24)
        self.rnn = kind(24, dim, layers, batch_first=True)
        self.decoder = nn.Linear(dim, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(ids))[0])


def lstm(width: int = 20, depth: int = 1, heads: int = 1) -> nn.Module:
    return RecurrentLM(nn.LSTM, width, depth)


def gru(width: int = 20, depth: int = 1, heads: int = 1) -> nn.Module:
    return RecurrentLM(nn.GRU, width, depth)


# ----------------------------------------------------------------- one module for several layers; one that never runs


class SharedBlock(nn.Module):
    """The same block is applied again and again; the head is the embedding."""

    def __init__(self, dim: int, times: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.block, self.times = GPTBlock(dim, heads), times
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(self.times):
            x = self.block(x)
        return F.linear(self.norm(x), self.embed.weight)


def shared(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return SharedBlock(width, depth, heads)


class Unused(nn.Module):
    """A head for another task lies beside the one that runs."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.body = GPT(dim, depth, heads)
        self.other_head = nn.Linear(dim, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids)


def unused(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return Unused(width, depth, heads)
