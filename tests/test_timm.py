"""Checkpoints of timm's: recognised without a model_type, expanded, and run without timm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import lemonx
import pico
from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.diagnostics.why import diagnose
from lemonx.errors import BadCheckpoint
from lemonx.models.building import skeleton


def timm_folder(name: str, folder: Path, **changes: Any) -> Path:
    """A pico model with a config.json as timm writes it."""
    pico.save(pico.PICO[name](), folder)
    config = json.loads((folder / "config.json").read_text())
    kept = ("architecture", "num_classes", "num_features", "global_pool", "model_args")
    cfg = {"tag": "in1k", "input_size": [3, 16, 16], "num_classes": 7, "first_conv": "conv1", "classifier": "fc"}
    written = {key: config[key] for key in kept if key in config} | {"pretrained_cfg": cfg} | changes
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.parametrize(
    ("name", "options", "args"),
    [
        ("timm-vit", {"width": 72, "depth": 3}, {"embed_dim": 72, "depth": 3, "num_heads": 6, "mlp_ratio": 2.0}),
        ("timm-resnet", {"width": "3x"}, {"channels": [24, 48], "layers": [2, 2], "base_width": 64}),
    ],
)
def test_a_checkpoint_of_timms(name: str, options: dict[str, Any], args: dict[str, Any], tmp_path: Path) -> None:
    """It is verified as it is written, and its config.json stays timm's: create_model takes model_args."""
    source = timm_folder(name, tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", **options).path
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert before.keys() == after.keys() and "model_type" not in after
    assert args.items() <= after["model_args"].items()
    assert after["num_features"] != before["num_features"]
    assert {**before, "model_args": 0, "num_features": 0} == {**after, "model_args": 0, "num_features": 0}
    assert lemonx.verify(source, target).passed
    layers = lemonx.verify(source, target, layerwise=True).layers
    assert layers is not None and layers.places and layers.first is None
    with Checkpoint.open(source) as checkpoint:
        found = diagnose(checkpoint)
    assert found.known and found.family == name.replace("-", "_") and found.reason is None


def test_a_vit_of_timms_computes_what_transformers_does(tmp_path: Path) -> None:
    """The reference is right: the same weights under transformers' names give the same logits."""
    model = pico.load(timm_folder("timm-vit", tmp_path / "timm")).model
    weights = dict(model.state_dict())
    for name in [name for name in weights if ".qkv." in name]:
        tensor = weights.pop(name)
        for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
            weights[name.replace("attn.qkv", f"attention.attention.{part}")] = piece
    names = {
        "blocks.": "vit.encoder.layer.", "norm1": "layernorm_before", "norm2": "layernorm_after",
        "attn.proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
        "cls_token": "vit.embeddings.cls_token", "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    }  # fmt: skip
    renamed = {}
    for name, tensor in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[re.sub(r"^norm\.", "vit.layernorm.", re.sub(r"^head\.", "classifier.", name))] = tensor.contiguous()
    config = hf.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=4,
        layer_norm_eps=1e-6, num_labels=7,
    )  # fmt: skip
    from safetensors.torch import save_file

    folder = tmp_path / "transformers"
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(folder)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = pico.load(folder)
    assert not loaded.odd and not loaded.missing
    pixels = pico.inputs(model, seed=1)
    assert torch.allclose(pico.outputs(loaded.model, pixels), pico.outputs(model, pixels), atol=1e-12)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "deit_tiny_patch16_224", "vit_large_patch32_384"])
def test_sizes_that_a_name_implies(name: str) -> None:
    """A config.json without model_args has the tensors of the architecture that it names."""
    config = {"architecture": name, "num_classes": 7, "global_pool": "token"}
    spec = architectures.find(config).spec(config)
    width, depth = spec.spaces["residual"].size, spec.stacks["blocks"].size
    assert (width, depth, spec.spaces["heads"].size) == {
        "vit_small_patch16_224": (384, 12, 6),
        "deit_tiny_patch16_224": (192, 12, 3),
        "vit_large_patch32_384": (1024, 24, 16),
    }[name]
    shapes = {key: tuple(value.shape) for key, value in skeleton(config).state_dict().items()}
    assert shapes["blocks.0.attn.qkv.weight"] == (3 * width, width)
    assert f"blocks.{depth - 1}.norm1.weight" in shapes and f"blocks.{depth}.norm1.weight" not in shapes


@pytest.mark.parametrize(("name", "inner"), [("resnet50", 64), ("wide_resnet50_2", 128)])
def test_a_resnet_by_its_name(name: str, inner: int) -> None:
    config = {"architecture": name, "num_classes": 10}
    spec = architectures.find(config).spec(config)
    assert [spec.stacks[f"layer{i}"].size for i in (1, 2, 3, 4)] == [3, 4, 6, 3]
    assert spec.spaces["inner1"].size == inner and spec.spaces["stage4"].size == 2048
    assert spec.config["model_args.base_width"] == inner


@pytest.mark.parametrize("changes", [{"architecture": "resnet50d"}, {"architecture": 3}, {"architecture": None}])
def test_other_architectures_of_timms(changes: dict[str, Any], tmp_path: Path) -> None:
    source = timm_folder("timm-resnet", tmp_path / "source", **changes)
    with pytest.raises(BadCheckpoint, match=r"nor an architecture of timm that lemonx supports: give"):
        lemonx.expand(source, tmp_path / "target", width="3x")


def test_a_file_that_is_not_what_its_config_names(tmp_path: Path) -> None:
    """Sizes come from a name, so the shapes of the tensors must agree."""
    source = timm_folder("timm-vit", tmp_path / "source", model_args=None)
    with pytest.raises(BadCheckpoint, match=r"config.json( makes it|' says 12 layers)"):
        lemonx.plan(source, width=1536)
    assert load_file(source / "model.safetensors")
