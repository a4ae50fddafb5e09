"""Plain PyTorch models in the ways that people copy, each at any size, with inputs: what `lemonx.grow` is measured on.

`ZOO["nanogpt"].model(width=96)` is a model in float64 and eval mode with every parameter random; `.inputs(seed)` are
inputs for it; `.growths` names larger sizes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lemonx_lab.survey.randomise import randomise
from zoo import language, others, torch_modules, vision

Inputs = tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """One model: how it is built, what it is given, and the larger sizes of it, by what they are called."""

    build: Callable[..., nn.Module]
    inputs: Callable[..., Inputs]
    growths: dict[str, dict[str, int]] = field(default_factory=dict)

    def model(self, seed: int = 0, **sizes: int) -> nn.Module:
        """A random model in float64 and eval mode; the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build(**sizes).double().eval()
        randomise(model, seed)
        return model


def run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Every output of a model, in order."""
    with torch.no_grad():
        found: Any = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return list(found.values()) if isinstance(found, dict) else [found]


def _heads(width: int = 48, heads: int = 4, depth: int = 2) -> dict[str, dict[str, int]]:
    """Growths of a model whose heads make up its width."""
    return {
        "width x2": {"width": 2 * width, "heads": 2 * heads},
        "width x1.5": {"width": width * 3 // 2, "heads": heads * 3 // 2},
        "depth": {"depth": depth + 2},
        "all": {"width": 2 * width, "heads": 2 * heads, "depth": depth + 1},
    }


def _plain(width: int, depth: int | None) -> dict[str, dict[str, int]]:
    """Growths of a model without heads; without a depth, if it has none to grow."""
    found = {"width x2": {"width": 2 * width}, "width x1.5": {"width": width * 3 // 2}}
    return (
        found
        if depth is None
        else {**found, "depth": {"depth": depth + 2}, "all": {"width": 2 * width, "depth": depth + 1}}
    )


ZOO: dict[str, Entry] = {
    "nanogpt": Entry(language.nanogpt, language.tokens, _heads()),
    "llama": Entry(language.llama, language.tokens, {**_heads(), "heads": {"heads": 8}}),
    "einsum": Entry(language.einsum, language.tokens, {**_heads(), "heads": {"heads": 8}}),
    "lstm": Entry(language.lstm, language.tokens, _plain(20, None)),
    "gru": Entry(language.gru, language.tokens, _plain(20, None)),
    "shared": Entry(language.shared, language.tokens, {k: v for k, v in _heads().items() if k.startswith("width")}),
    "unused": Entry(language.unused, language.tokens, _heads()),
    "pre-norm encoder": Entry(torch_modules.pre_norm_encoder, torch_modules.sequences, _heads()),
    "post-norm encoder": Entry(torch_modules.post_norm_encoder, torch_modules.sequences, _heads()),
    "pre-norm decoder": Entry(torch_modules.pre_norm_decoder, torch_modules.pairs, _heads()),
    "post-norm decoder": Entry(torch_modules.post_norm_decoder, torch_modules.pairs, _heads()),
    "attention pool": Entry(torch_modules.attention_pool, torch_modules.sequences, _heads()),
    "vit": Entry(vision.vit, vision.pictures, _heads()),
    "resnet": Entry(vision.resnet, vision.pictures, _plain(8, 2)),
    "timm resnet": Entry(vision.timm_resnet, vision.pictures, _plain(8, 2)),
    "convnext": Entry(vision.convnext, vision.pictures, _plain(12, 2)),
    "mixer": Entry(vision.mixer, vision.pictures, _plain(24, 2)),
    "unet": Entry(vision.unet, vision.pictures, _plain(8, 1)),
    "mlp": Entry(others.mlp, others.vectors, _plain(16, 2)),
    "vae": Entry(others.vae, others.with_noise, _plain(16, None)),
    "autoencoder": Entry(others.autoencoder, vision.pictures, _plain(8, None)),
    "diffusion mlp": Entry(others.diffusion_mlp, others.at_times, _plain(24, 2)),
    "dit": Entry(others.dit, others.latents, _heads()),
    "gnn": Entry(others.gnn, others.graphs, _plain(24, 2)),
    "two towers": Entry(others.two_towers, others.visits, _plain(24, 1)),
}
