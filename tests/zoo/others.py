"""Diffusion, autoencoders, graphs, two towers, and a plain MLP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES = 10


def vectors(seed: int, rows: int = 3, length: int = 11) -> tuple[Tensor]:
    """As many vectors as a batch of texts has tokens."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows * length, FEATURES, generator=generator, dtype=torch.float64),)


# ----------------------------------------------------------------- plain ones


class MLP(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def mlp(width: int = 16, depth: int = 2, heads: int = 1) -> nn.Module:
    return MLP(width, depth)


class VAE(nn.Module):
    """An autoencoder whose code has a mean and a spread; the noise is an input, so that two runs agree."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.ELU())
        self.mu, self.logvar = nn.Linear(width, 6), nn.Linear(width, 6)
        self.decoder = nn.Sequential(nn.Linear(6, width), nn.Softplus(), nn.Linear(width, FEATURES))

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return {"reconstruction": self.decoder(mu + noise * torch.exp(0.5 * logvar)), "mu": mu, "logvar": logvar}


def vae(width: int = 16, depth: int = 1, heads: int = 1) -> nn.Module:
    return VAE(width, depth)


def with_noise(seed: int, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    x = vectors(seed, rows, length)[0]
    generator = torch.Generator().manual_seed(seed + 1000)
    return {"x": x, "noise": torch.randn(len(x), 6, generator=generator, dtype=torch.float64)}


class ConvAutoencoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.BatchNorm2d(2 * width),
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def autoencoder(width: int = 8, depth: int = 1, heads: int = 1) -> nn.Module:
    return ConvAutoencoder(width, depth)


# ----------------------------------------------------------------- diffusion


def timesteps(t: Tensor, dim: int) -> Tensor:
    """Sinusoids of the time."""
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2)).to(torch.float64)
    angles = t[:, None] * freqs[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class DiffusionMLP(nn.Module):
    """Noise of points, told the time by its sinusoids."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])
        self.out = nn.Linear(width, FEATURES)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time, h = self.time(timesteps(t, 32)), self.inp(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + F.silu(layer(norm(h) + time))
        return self.out(h)


def diffusion_mlp(width: int = 24, depth: int = 2, heads: int = 1) -> nn.Module:
    return DiffusionMLP(width, depth)


def at_times(seed: int, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    x = vectors(seed, rows, length)[0]
    generator = torch.Generator().manual_seed(seed + 1000)
    return {"x": x, "t": 1000 * torch.rand(len(x), generator=generator, dtype=torch.float64)}


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """Norms without gains of their own, which the time and the class shift and scale."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attend(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def attend(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class DiT(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, side: int = 8, patch: int = 2) -> None:
        super().__init__()
        self.patch, self.grid = patch, side // patch
        self.x_embedder = nn.Conv2d(4, dim, patch, patch)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid**2, dim))
        self.t_embedder = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embedder = nn.Embedding(6, dim)
        self.blocks = nn.ModuleList([DiTBlock(dim, heads) for _ in range(depth)])
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.linear = nn.Linear(dim, patch * patch * 4)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(timesteps(t, 32)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = self.linear(modulate(self.norm_final(x), shift, scale))
        x = x.reshape(len(x), self.grid, self.grid, self.patch, self.patch, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), 4, self.grid * self.patch, self.grid * self.patch)


def dit(width: int = 48, depth: int = 2, heads: int = 4) -> nn.Module:
    return DiT(width, depth, heads)


def latents(seed: int, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 4, 8, 8, generator=generator, dtype=torch.float64),
        "t": 1000 * torch.rand(rows, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 6, (rows,), generator=generator),
    }


# ----------------------------------------------------------------- graphs


class GraphLayer(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.update = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(torch.cat([x[source], x[target]], dim=-1))
        arrived = torch.zeros_like(x).index_add(0, target, messages)
        return x + self.norm(F.relu(self.update(torch.cat([x, arrived], dim=-1))))


class GNN(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, dim)
        self.layers = nn.ModuleList([GraphLayer(dim) for _ in range(depth)])
        self.readout = nn.Linear(dim, 4)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, graphs: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, edges)
        pooled = torch.zeros(len(graphs), h.shape[-1], dtype=h.dtype)
        return self.readout(pooled.scatter_add(0, graph[:, None].expand_as(h), h))


def gnn(width: int = 24, depth: int = 2, heads: int = 1) -> nn.Module:
    return GNN(width, depth)


def graphs(seed: int, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    """`rows` graphs with `length` nodes each, and edges inside them."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, length, (2, rows, 2 * length), generator=generator)
    edges = (ends + length * torch.arange(rows)[None, :, None]).flatten(1)
    x = torch.randn(rows * length, FEATURES, generator=generator, dtype=torch.float64)
    return {"x": x, "edges": edges, "graph": torch.arange(rows).repeat_interleave(length), "graphs": torch.arange(rows)}


# ----------------------------------------------------------------- two towers


class TwoTowers(nn.Module):
    """Users and items, each through a tower of its own; the answer is how alike they are."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.users, self.items = nn.EmbeddingBag(40, width, mode="mean"), nn.Embedding(50, width)
        self.user_tower, self.item_tower = self.tower(width, depth), self.tower(width, depth)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    @staticmethod
    def tower(width: int, depth: int) -> nn.Sequential:
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, 12))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u = F.normalize(self.user_tower(self.users(user)), dim=-1)
        i = F.normalize(self.item_tower(self.items(item)), dim=-1)
        return self.logit_scale.exp() * u @ i.T


def two_towers(width: int = 24, depth: int = 1, heads: int = 1) -> nn.Module:
    return TwoTowers(width, depth)


def visits(seed: int, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    user = torch.randint(0, 40, (rows, length), generator=generator)
    return {"user": user, "item": torch.randint(0, 50, (2 * rows + 1,), generator=generator)}
