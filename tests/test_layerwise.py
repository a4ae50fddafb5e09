"""`verify --layerwise`: the same verdict as in memory, with less than a block of weights there, and the block named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import faults
import lemonx
import pico
from lemonx import api, architectures, cli
from lemonx.algebra.expansions import expansion
from lemonx.errors import NotVerified
from lemonx.verification import by_module, outputs, running, streams, verify


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def make(name: str, dtype: torch.dtype = torch.float64) -> Path:
        return pico.save(pico.PICO[name](), tmp_path_factory.mktemp(name) / name, dtype)

    return make


def damage(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Streams on the last axis and channels on the second; names that differ from the modules'; Post-LN, where only the
# last block of a group can be compared; shifted windows in periods; blocks with rows of their own; a tied decoder.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "llama-tied": ({"width": 72, "depth": 5}, 5),
    "gpt2-base": ({"width": 72, "depth": 3}, 3),
    "bert-mlm": ({"width": 96, "depth": 5}, 2),
    "vit-cls": ({"width": 72, "depth": 5, "free": {"depth_type": 2}}, 5),
    "swinv2-cls": ({"width": "2x", "set": {"depths": [6, 3]}}, 9),
    "resnet-basic": ({"width": "1.5x", "set": {"depths": [3, 5]}}, 8),
    "olmo2": ({"width": 72, "depth": 3}, 3),
    # Texts in pairs, of which it chooses one.
    "modernbert-choice": ({"width": 96, "depth": 5}, 5),
}


@pytest.mark.parametrize("name", CASES)
def test_every_block_agrees(name: str, source: Callable[..., Path], tmp_path: Path) -> None:
    sizes, places = CASES[name]
    large = lemonx.expand(source(name), tmp_path / "large", verify=False, **sizes).path
    measured = api.verify(source(name), large, layerwise=True)
    layers = measured.layers
    assert measured.passed and layers is not None and layers.skipped is None
    assert len(layers.places) == places and layers.first is None
    assert all(0 <= place.difference <= place.tolerance == 1e-10 or name == "bert-mlm" for place in layers.places)
    # Never more than one block in memory, of models that have several.
    assert 0 < layers.weights <= layers.block < layers.model / 2
    if name == "llama-tied":  # the same outputs as with everything in memory, where more views are looked at
        whole = api.verify(source(name), large).outputs
        assert measured.outputs and whole and measured.outputs.largest_output <= whole.largest_output
        assert measured.outputs.difference <= whole.difference


# The first model of every type. A timm ResNet three times as wide: twice, its first stage would lose a shortcut.
TYPES: dict[str, str] = {}
for _name, _builder in pico.PICO.items():
    if isinstance(_builder, partial):
        TYPES.setdefault(_builder.args[1].model_type, _name)
ELSE = {"timm_resnet": {"width": "3x"}}
# Its positions are computed, and in no file.
COMPUTED = {"marian"}


@pytest.mark.parametrize("model_type", sorted(architectures.families().keys() - COMPUTED))
def test_every_family_agrees_at_twice_the_width(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every weight that can be read in strips read in strips."""
    monkeypatch.setattr(by_module, "STRIP", 1 << 11)
    small = pico.save(pico.PICO[TYPES[model_type]](), tmp_path / "small")
    sizes = ELSE.get(model_type, {"width": "2x"})
    measured = api.verify(small, lemonx.expand(small, tmp_path / "large", verify=False, **sizes).path, layerwise=True)
    layers = measured.layers
    assert measured.passed and layers is not None and layers.skipped is None
    assert layers.places and layers.first is None
    assert 0 < layers.weights <= layers.block < layers.model


def test_the_meter_counts_what_is_there(source: Callable[..., Path], tmp_path: Path) -> None:
    """A model that is in memory whole is counted whole, so a small count means something."""
    from lemonx.verification.inputs import views
    from lemonx.verification.running import floating_outputs

    model = pico.load(source("llama-untied")).model
    visits = by_module.Visits(model)
    floating_outputs(model, views(model)[0])
    assert visits.peak == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "sizes", "tensor", "block"),
    [
        ("llama-tied", {"width": 72, "depth": 6}, "model.layers.3.mlp.down_proj.weight", "model.layers.3"),
        ("bert-mlm", {"depth": 5}, "bert.encoder.layer.3.output.dense.bias", "bert.encoder.layer.4"),
        ("resnet-basic", {"width": "2x", "set": {"depths": [2, 6]}},
         "resnet.encoder.stages.1.layers.3.layer.0.convolution.weight", "resnet.encoder.stages.1.layers.3"),
    ],
    ids=["llama", "bert-group", "resnet"],
)  # fmt: skip
def test_the_first_block_that_differs_is_named(
    name: str, sizes: dict[str, Any], tensor: str, block: str, source: Callable[..., Path], tmp_path: Path
) -> None:
    large = lemonx.expand(source(name), tmp_path / "large", verify=False, **sizes).path
    weights = load_file(large / "model.safetensors")
    # An added block writes zeros: only what it writes can show, a kept one shows anything.
    assert tensor in weights
    damage(large, tensor, lambda w: w.view(-1)[7].add_(1e-6))
    if name == "resnet-basic":  # silent in an added block, so let it speak: the last norm of the block
        damage(large, tensor.replace("layer.0.convolution", "layer.1.normalization"), lambda w: w[3].add_(1e-6))
    measured = api.verify(source(name), large, layerwise=True)
    assert not measured.passed and measured.layers is not None
    first = measured.layers.first
    assert first is not None and first.block == block
    assert f"the first block that differs is {block}" in measured.reason()
    # What comes before it agrees.
    before = measured.layers.places[: measured.layers.places.index(first)]
    assert before and all(place.passed for place in before)


def test_a_damaged_embedding_shows_at_the_first_block(source: Callable[..., Path], tmp_path: Path) -> None:
    large = lemonx.expand(source("llama-tied"), tmp_path / "large", verify=False, width=72).path
    damage(large, "model.embed_tokens.weight", lambda w: w[:, 50].add_(1e-6))
    measured = api.verify(source("llama-tied"), large, layerwise=True)
    assert measured.layers is not None and measured.layers.first is not None
    assert measured.layers.first.block == "model.layers.0" and not measured.passed


def test_rounded_weights_are_measured_by_the_sources_noise(source: Callable[..., Path], tmp_path: Path) -> None:
    """bf16 at an indivisible width: eta rounds, so each block has its own tolerance, and damage still shows."""
    small = source("llama-tied", torch.bfloat16)
    large = lemonx.expand(small, tmp_path / "large", verify=False, width=72, depth=5).path
    damage(large, "model.layers.3.self_attn.o_proj.weight", lambda w: w.fill_(0.3))
    measured = api.verify(small, large, layerwise=True)
    assert not measured.passed and measured.layers is not None and measured.layers.first is not None
    assert measured.outputs.noise is not None and measured.outputs.tolerance == min(4 * measured.outputs.noise, 2**-3)
    assert measured.layers.first.block == "model.layers.3"
    good = measured.layers.places[:3]
    assert len({place.tolerance for place in good}) > 1
    assert all(1e-10 < place.difference <= place.tolerance < 0.2 for place in good)


@pytest.mark.parametrize("name", ["llama-tied", "llama-untied", "bert-cls", "gpt-oss", "mixtral", "t5"])
def test_strips_are_the_whole(
    name: str, source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same figures with less in memory, of stored weights that transformers leaves as they are or fuses."""
    small = source(name, torch.bfloat16)
    large = lemonx.expand(small, tmp_path / "large", verify=False, width=72).path
    whole = api.verify(small, large, layerwise=True)
    monkeypatch.setattr(by_module, "STRIP", 1 << 11)
    parts = api.verify(small, large, layerwise=True)
    assert whole.passed and parts.passed and whole.layers and parts.layers and whole.outputs and parts.outputs
    assert parts.outputs.difference == pytest.approx(whole.outputs.difference, rel=1e-6)
    # Rows are rounded by other numbers than they are as a whole, and by about as much.
    assert parts.outputs.noise and whole.outputs.noise
    assert 0.2 < parts.outputs.noise / whole.outputs.noise < 5
    assert parts.layers.weights <= whole.layers.weights
    if name.startswith("llama"):
        assert parts.layers.weights < whole.layers.weights / 3


def test_a_row_in_a_strip_that_is_wrong_is_seen(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_module, "STRIP", 1 << 11)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        large = lemonx.expand(source("llama-untied"), tmp_path / name, verify=False, width=72).path
        damage(large, name, lambda w: w[-1].mul_(1 + 1e-6) if len(w) > 61 else w.mul_(1 + 1e-6))
        measured = api.verify(source("llama-untied"), large, layerwise=True)
        assert measured.outputs and measured.outputs.difference > 1e-10 and not measured.outputs.passed


def test_a_lossy_target_is_compared_by_its_outputs(source: Callable[..., Path], tmp_path: Path) -> None:
    """Its certificate names the method, and that one promises nothing for streams."""
    large = lemonx.expand(source("llama-tied"), tmp_path / "large", method="stackbert", depth=4).path
    measured = api.verify(source("llama-tied"), large, layerwise=True)
    assert not measured.passed and measured.layers is not None
    assert not measured.layers.places and "not a lossless expansion" in str(measured.layers.skipped)


def test_another_lossless_method_is_compared_by_its_own_plan(source: Callable[..., Path], tmp_path: Path) -> None:
    large = lemonx.expand(source("llama-tied"), tmp_path / "large", method="hypercloning", width=96).path
    measured = api.verify(source("llama-tied"), large, layerwise=True)
    assert measured.passed and measured.layers is not None
    assert measured.layers.places and measured.layers.first is None


def test_without_a_spec_the_outputs_are_compared(tmp_path: Path) -> None:
    folder = faults.save_unknown(tmp_path / "unknown")
    measured = api.verify(folder, folder, layerwise=True)
    assert measured.passed and measured.outputs.difference == 0.0
    assert measured.layers is not None and measured.layers.skipped and not measured.layers.places


def test_expand_falls_back_on_it_where_memory_is_short(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with room for a block, and not for the model: the certificate says how it was verified."""
    monkeypatch.setattr(running, "memory_short", lambda *_: "too small")
    large = lemonx.expand(source("llama-tied"), tmp_path / "large", width=72, depth=3).path
    content = json.loads((large / "lemonx.json").read_text())["verified"]
    assert content["outputs"]["passed"] and content["skipped"] is None
    assert len(content["layers"]["places"]) == 3 and content["layers"]["first"] is None
    monkeypatch.setattr(verify, "memory_short", lambda *_, **__: "not even a block")
    monkeypatch.setattr(outputs, "memory_short", lambda *_, **__: "not even a block")
    large = lemonx.expand(source("llama-tied"), tmp_path / "larger", width=72).path
    assert json.loads((large / "lemonx.json").read_text())["verified"]["skipped"] == "not even a block"
    with pytest.raises(NotVerified, match="not even a block: verify on a larger machine"):
        api.verify(source("llama-tied"), large, layerwise=True)


def test_the_command(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: Any) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["lemonx", "verify", *map(str, arguments), "--layerwise"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, " ".join(capsys.readouterr().out.split())

    small = source("llama-tied")
    large = lemonx.expand(small, tmp_path / "large", verify=False, width=72, depth=5).path
    capsys.readouterr()
    code, printed = run(small, large)
    assert code == 0 and "the stream behind 5 blocks" in printed and "of weights in memory at once" in printed
    shutil.copytree(large, tmp_path / "broken")
    damage(tmp_path / "broken", "model.layers.3.mlp.down_proj.weight", lambda w: w[3, 4].add_(1e-3))
    code, printed = run(small, tmp_path / "broken")
    assert code == 1 and "the first block that differs is model.layers.3" in printed
    code, printed = run(small, tmp_path / "broken", "--json")
    content = json.loads(printed)
    assert code == 1 and not content["passed"] and content["layers"]["first"]["block"] == "model.layers.3"


def test_differences() -> None:
    """On any axis, against E x, and infinite where shapes do not fit or numbers are none."""
    x = np.random.default_rng(0).normal(size=(3, 4, 5))
    wide = expansion("zero", 4, 10)
    y = np.moveaxis(wide.expand(np.moveaxis(x, 1, -1)), -1, 1)
    assert streams.difference(x, y, wide) == 0.0
    y[0, 9, 0] = 0.5 * np.abs(x).max()  # in the remainder, which holds zeros
    assert streams.difference(x, y, wide) == 0.5
    assert streams.difference(x, x, None) == 0.0
    assert streams.difference(x, x[:2], None) == float("inf")
    y[0, 0, 0] = np.nan
    assert streams.difference(x, y, wide) == float("inf")
    free = expansion("rand", 5, 7)
    z = free.expand(x, fill=np.full((3, 4, 2), 9.0))
    assert streams.difference(x, z, free) == 0.0
