"""ViT and ResNet with timm's parameter names, to run checkpoints of timm's without timm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from lemonx.models.resnet import TorchvisionResNetConfig, TorchvisionResNetForImageClassification

_EPS = 1e-6  # of every LayerNorm
_STEM = 64  # channels of a ResNet's first convolution


class TimmViTConfig(PreTrainedConfig):
    """A ViT as timm's config.json says it: `architecture` names it, `model_args` has its sizes; ViT-B/16 by default."""

    model_type = "timm_vit"

    architecture: str = "vit_base_patch16_224"
    num_classes: int = 1000
    num_features: int = 768
    num_channels: int = 3
    global_pool: str = "token"
    model_args: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        implied = {"embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_ratio": 4.0, "img_size": 224, "patch_size": 16}
        self.model_args = {**implied, "init_values": None, **(self.model_args or {})}
        self.image_size = self.model_args["img_size"]
        super().__post_init__(**{**kwargs, "num_labels": self.num_classes})


class TimmResNetConfig(TorchvisionResNetConfig):
    """A ResNet as timm's config.json says it; ResNet-50 by default."""

    model_type = "timm_resnet"

    architecture: str = "resnet50"
    num_classes: int = 1000
    num_features: int = 2048
    model_args: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        implied = {"layers": [3, 4, 6, 3], "channels": [64, 128, 256, 512], "base_width": 64}
        self.model_args = implied | (self.model_args or {})
        three, channels, self.width = self.block == "bottleneck", self.model_args["channels"], _STEM
        self.layers = self.model_args["layers"]
        self.stage_width = [4 * n if three else n for n in channels]
        self.inner_width = [n * self.model_args["base_width"] // 64 if three else n for n in channels]
        super().__post_init__(**{**kwargs, "num_labels": self.num_classes})


class TimmResNetForImageClassification(TorchvisionResNetForImageClassification):
    """A ResNet of timm's: the names are torchvision's."""

    config_class = TimmResNetConfig


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _Scale(nn.Module):
    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, scale: float | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = _Attention(width, heads)
        self.ls1 = nn.Identity() if scale is None else _Scale(width, scale)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = _Mlp(width, hidden)
        self.ls2 = nn.Identity() if scale is None else _Scale(width, scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _PatchEmbed(nn.Module):
    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimmViTForImageClassification(PreTrainedModel):
    """A ViT with timm's parameter names: the class token, or the mean over patches, and a linear classifier."""

    config_class = TimmViTConfig
    main_input_name = "pixel_values"

    def __init__(self, config: TimmViTConfig) -> None:
        super().__init__(config)
        args = config.model_args or {}
        width, tokens = args["embed_dim"], (args["img_size"] // args["patch_size"]) ** 2 + 1
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        self.patch_embed = _PatchEmbed(config.num_channels, width, args["patch_size"])
        sizes = width, args["num_heads"], int(width * args["mlp_ratio"]), args["init_values"]
        self.blocks = nn.ModuleList(_Block(*sizes) for _ in range(args["depth"]))
        self.norm, self.fc_norm = nn.Identity(), nn.Identity()
        last = "fc_norm" if config.global_pool == "avg" else "norm"
        self.add_module(last, nn.LayerNorm(width, eps=_EPS))
        self.head = nn.Linear(width, config.num_classes)
        self.post_init()

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """Returns the logits, and the cross-entropy where labels are given."""
        x = self.patch_embed(pixel_values)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        pooled = x[:, 1:].mean(1) if self.config.global_pool == "avg" else x[:, 0]
        logits = self.head(self.fc_norm(pooled))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)  # pyright: ignore[reportArgumentType]
