"""ViT and ResNet in timm's names: config.json names an architecture, and `model_args` what differs from it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lemonx.architectures.resnet import torchvision_resnet
from lemonx.architectures.rotary import head, head_width
from lemonx.errors import Refused
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm, scale
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, unscaled, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, linear, parameter

# (embed_dim, depth, num_heads) behind the size in a name.
VITS = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
VIT = re.compile(rf"(?:vit|deit|deit3)_({'|'.join(VITS)})_patch(\d+)_(?:\w+_)?(\d+)")
RESNETS = {
    "resnet18": ("basic", [2, 2, 2, 2], 64),
    "resnet34": ("basic", [3, 4, 6, 3], 64),
    "resnet26": ("bottleneck", [2, 2, 2, 2], 64),
    "resnet50": ("bottleneck", [3, 4, 6, 3], 64),
    "resnet101": ("bottleneck", [3, 4, 23, 3], 64),
    "resnet152": ("bottleneck", [3, 8, 36, 3], 64),
    "wide_resnet50_2": ("bottleneck", [3, 4, 6, 3], 128),
    "wide_resnet101_2": ("bottleneck", [3, 4, 23, 3], 128),
}
EPS = 1e-6  # of every LayerNorm, in timm's code
STEM = 64  # channels, in timm's code
# What else model_args may say: it bears on training alone.
TRAINING = {"drop_rate", "drop_path_rate", "drop_block_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate",
            "attn_drop_rate", "weight_init", "fix_init", "zero_init_last"}  # fmt: skip


def _vit_args(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json with every size that its architecture's name implies; None if it is none of these."""
    found = VIT.fullmatch(str(values.get("architecture")))
    if not found:
        return None
    width, depth, heads = VITS[found[1]]
    implied = {"embed_dim": width, "depth": depth, "num_heads": heads, "mlp_ratio": 4.0, "img_size": int(found[3]),
               "patch_size": int(found[2]), "init_values": 1e-6 if "deit3" in found[0] else None}  # fmt: skip
    return {"model_type": "timm_vit", **values, "model_args": implied | (values.get("model_args") or {})}


def _resnet_args(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if values.get("architecture") not in RESNETS:
        return None
    block, layers, base = RESNETS[values["architecture"]]
    implied = {"layers": layers, "channels": [64, 128, 256, 512], "base_width": base}
    args = implied | (values.get("model_args") or {})
    return {"model_type": "timm_resnet", **values, "block": block, "model_args": args}


def _check_args(c: Config, *known: str) -> None:
    """Refused where model_args ask timm for a model that the table does not know."""
    if unknown := sorted((c.maybe("model_args") or {}).keys() - set(known) - TRAINING):
        raise Refused(
            f"model_args has {unknown[0]}, which changes what timm builds in a way that lemonx does not support",
            "expand a model without it",
        )


@architecture(
    "timm_vit",
    width="model_args.embed_dim",
    depth="model_args.depth",
    heads="model_args.num_heads",
    ffn_ratio="model_args.mlp_ratio",
    kind="vision",
    completed=_vit_args,
)
def timm_vit(c: Config) -> Spec:
    """ViT, DeiT and DeiT III in timm's names: Pre-LN with a fixed eps, fused query, key and value."""
    args = {name: c[f"model_args.{name}"] for name in ("embed_dim", "depth", "num_heads", "mlp_ratio")}
    _check_args(c, *args, "img_size", "patch_size", "init_values")
    width, depth, heads, ratio = args.values()
    scaled = c["model_args.init_values"] is not None
    tokens = (c["model_args.img_size"] // c["model_args.patch_size"]) ** 2 + 1
    written = {f"model_args.{name}": value for name, value in args.items()} | {"num_features": width}
    return Spec(
        stacks={"blocks": Stack(depth, "residual")},
        config=written,
        spaces={
            "residual": avg(width, tokens),
            "normed": zero(width, tokens),
            "final": zero(width),
            **({name: unscaled(width, tokens) for name in ("attended", "computed")} if scaled else {}),
            "heads": circ(heads, tokens),
            **head(head_width(c, "model_args.embed_dim", "model_args.num_heads"), positions=tokens),
            "hidden": circ(int(ratio * width), tokens),
        },
        rows={
            "cls_token": parameter("1 1 residual"),
            "pos_embed": parameter("1 _ residual"),
            "patch_embed.proj": conv("_ -> residual"),
            **_blocks(scaled),
            # The mean over patches is normed behind the pooling.
            "fc_norm" if c.maybe("global_pool") == "avg" else "norm": layer_norm("residual -> final", eps=EPS),
            "head": linear("final -> _", optional=True),
        },
    )


def _blocks(scaled: bool) -> dict[str, Row]:
    attended, computed = ("attended", "computed") if scaled else ("residual", "residual")
    scales: dict[str, Row] = {
        "blocks.*.ls1": scale("attended -> residual", "gamma"),
        "blocks.*.ls2": scale("computed -> residual", "gamma"),
    }
    return {
        "blocks.*.norm1": layer_norm("residual -> normed", eps=EPS),
        "blocks.*.attn.qkv": linear("normed -> (heads query) + (heads key) + (heads value)"),
        "blocks.*.attn.proj": linear(f"(heads value) -> {attended}"),
        "blocks.*.norm2": layer_norm("residual -> normed", eps=EPS),
        "blocks.*.mlp.fc1": linear("normed -> hidden"),
        "blocks.*.mlp.fc2": linear(f"hidden -> {computed}"),
        **(scales if scaled else {}),
    }


@architecture(
    "timm_resnet",
    width="model_args.channels",
    depth="model_args.layers",
    inner="model_args.base_width",
    kind="vision",
    completed=_resnet_args,
)
def timm_resnet(c: Config) -> Spec:
    """ResNet and WideResNet in timm's names: its stem stays as wide as it is."""
    _check_args(c, "layers", "channels", "base_width")
    three, channels, base = c["block"] == "bottleneck", c["model_args.channels"], c["model_args.base_width"]
    sizes = {
        "block": c["block"],
        "layers": c["model_args.layers"],
        "width": STEM,
        "stage_width": [4 * n if three else n for n in channels],
        "inner_width": [n * base // 64 if three else n for n in channels],
        "num_channels": c.maybe("num_channels") or 3,
    } | {"stem": "imagenet", "shortcut": "B", "classifier": "fc"}
    args = {f"model_args.{name}": c[f"model_args.{name}"] for name in ("layers", "channels", "base_width")}
    return replace(torchvision_resnet(Config(sizes, {})), config=args | {"num_features": sizes["stage_width"][-1]})
