"""A deeper Post-LN model is compared with the source whose norms are applied as often: exactly, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
import pico
from lemonx.algebra.norm_chains import LIMIT, SHARE
from lemonx.errors import NotVerified, Refused
from lemonx.verification.blocks import deepened
from lemonx.verification.float64 import Float64
from lemonx.verification.rounding import EXACT_TOLERANCE

ENCODER_DECODER = {"encoder_layers": 4, "decoder_layers": 3}
# Every way in which blocks have norms in their stream: an own row for the last, sets that blocks share, a base model.
MODELS: dict[str, dict[str, Any]] = {
    "bert-cls": {"depth": 4},
    "bart": {"fields": ENCODER_DECODER},
    "bart-base": {"fields": ENCODER_DECODER},
    "albert-runs": {"set": {"num_hidden_layers": 7, "num_hidden_groups": 7}},
    "opt-post-ln-tied": {"depth": 5},
}


def saved(name: str, folder: Path, eps: float = 1e-5, dtype: torch.dtype = torch.float64) -> Path:
    """A tiny model whose eps, if it is a field, is not small."""
    save = pico.save(pico.PICO[name](), folder, dtype)
    file = save / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **({"layer_norm_eps": eps} if "layer_norm_eps" in config else {})}))
    return save


def outputs(folder: Path, plan: Any = None) -> tuple[torch.Tensor, float]:
    """The first output of a checkpoint, as the target of a plan must compute it, and how far that moved its stream."""
    with Float64():
        loaded = pico.load(folder)
        model = loaded.model
        assert not loaded.odd and not loaded.missing
        with deepened(model, plan) as moved:
            found = pico.outputs(model, pico.inputs(model, seed=4))
        assert not any(module._forward_hooks for module in model.modules())
    return found, moved.most


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= tolerance


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_what_the_target_computes(
    name: str, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As small as where fewer bits are stored: gains for 64 bits lose less than float64 can tell.
    monkeypatch.setattr("lemonx.planning.plan.SHARE_OF_64_BITS", SHARE)
    source, options = saved(name, tmp_path / "s"), {**MODELS[name], "small_gains": small}
    target = lemonx.expand(source, tmp_path / "t", verify=False, **options).path
    plan = lemonx.plan(source, solve=True, **options)
    (plain, still), (wanted, moved), (found, _) = outputs(source), outputs(source, plan), outputs(target)
    assert_near(found, wanted, 1e-14)
    assert still == 0 < moved <= 2 * plan.expected_loss
    with pytest.raises(AssertionError):
        assert_near(found, plain, 1e-11)  # or the test could not tell one from the other
    assert_near(found, plain, 10 * plan.expected_loss)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("bart")
    source = saved("bart", folder / "s")
    return source, lemonx.expand(source, folder / "t", set=ENCODER_DECODER).path


def test_what_is_measured_and_what_is_expected(bart: tuple[Path, Path]) -> None:
    """The tolerance is that of any other model; what eps costs is a figure of its own, and near the derived one."""
    source, target = bart
    measured = lemonx.verify(source, target).outputs
    assert measured.passed and measured.tolerance == EXACT_TOLERANCE
    assert measured.difference < 1e-14
    content = json.loads((target / "lemonx.json").read_text())
    expected = content["expected_loss"]
    assert expected["eps"] == 1e-5 and expected["places"] == 3
    assert expected["of_stream"] == pytest.approx(1.5e-5, rel=1e-3) and expected["at_each"] == pytest.approx(
        5e-6, rel=1e-3
    )
    assert 0.2 * expected["of_stream"] < measured.stream_loss < 2 * expected["of_stream"]
    assert 1e-7 < measured.output_loss < 1e-4
    assert content["verified"]["outputs"]["output_loss"] == measured.output_loss
    assert content["exactness"]["up to eps"] > 0
    card = (target / "README.md").read_text()
    assert "up to the eps of its norms, 1e-05" in card and f"{measured.output_loss:.1e}" in card


TAMPERED: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "an identity norm's gain": lambda w: w["model.encoder.layers.1.final_layer_norm.weight"].mul_(1 + 1e-8),
    "one entry of one": lambda w: w["model.encoder.layers.1.self_attn_layer_norm.weight"][5].add_(1e-8),
    "an identity norm's bias": lambda w: w["model.encoder.layers.0.final_layer_norm.bias"][0].add_(1e-8),
    "the norm that closes a group": lambda w: w["model.encoder.layers.1.final_layer_norm.weight"][3].mul_(1 + 1e-8),
    "a silent writer": lambda w: w["model.encoder.layers.1.fc2.weight"][0, 0].add_(1e-7),
    "a silent bias": lambda w: w["model.encoder.layers.1.fc2.bias"][2].add_(1e-8),
    "a weight of the source": lambda w: w["model.decoder.layers.0.fc1.weight"][1].add_(1e-7),
    "norms in the order of the paper": lambda w: w["model.encoder.layers.0.final_layer_norm.weight"].copy_(
        w["model.encoder.layers.1.final_layer_norm.weight"]
    ),
}


@pytest.mark.parametrize(
    ("name", "layerwise"), [*((name, False) for name in TAMPERED), ("a silent bias", True), ("one entry of one", True)]
)
def test_nothing_hides_behind_eps(bart: tuple[Path, Path], name: str, layerwise: bool, tmp_path: Path) -> None:
    """All of these are far below what eps costs."""
    source, target = bart
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    TAMPERED[name](weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    measured = lemonx.verify(source, tmp_path, layerwise=layerwise)
    assert not measured.passed
    assert measured.outputs.difference > 1e-10
    if layerwise:
        assert measured.layers is not None and measured.layers.first is not None


def test_block_by_block(bart: tuple[Path, Path]) -> None:
    source, target = bart
    measured = lemonx.verify(source, target, layerwise=True)
    assert measured.passed and measured.layers is not None
    assert len(measured.layers.places) == 4  # those that close a group
    assert all(place.difference < 1e-14 and place.tolerance == EXACT_TOLERANCE for place in measured.layers.places)
    assert measured.outputs.output_loss == pytest.approx(lemonx.verify(source, target).outputs.output_loss, rel=1e-6)


def test_noise_is_that_of_the_source_as_it_is(tmp_path: Path) -> None:
    """A rounded target's tolerance holds nothing of what eps costs: that would be hundreds of times float32's noise."""
    source = saved("bert-cls", tmp_path / "s", eps=2e-4, dtype=torch.float32)
    target = lemonx.expand(source, tmp_path / "t", depth=4, width=96, verify=False).path
    for layerwise in (False, True):
        measured = lemonx.verify(source, target, layerwise=layerwise)
        found = measured.outputs
        assert measured.passed and found.noise is not None
        assert 100 * found.noise < found.output_loss
        if measured.layers:
            assert all(place.tolerance < 0.1 * found.stream_loss for place in measured.layers.places)


def test_small_gains_in_float32(tmp_path: Path) -> None:
    """As a checkpoint is stored, they lose a thousandth, and the rounding of one gain."""
    source = saved("opt-post-ln-tied", tmp_path / "s", dtype=torch.float32)
    target = lemonx.expand(source, tmp_path / "t", depth=6, free={"small_gains": True}, verify=False).path
    (wanted, moved), (found, _) = (
        outputs(source, lemonx.plan(source, depth=6, free={"small_gains": True})),
        outputs(target),
    )
    assert_near(found, wanted, 5e-7)
    assert moved < 2e-8 < lemonx.plan(source, depth=6).expected_loss / 100


def test_small_gains_verify_where_eps_is_large(tmp_path: Path) -> None:
    """Without them its plan is refused, so `verify` must know of them first."""
    source = saved("bert-cls", tmp_path / "s", eps=1e-2)
    target = lemonx.expand(source, tmp_path / "t", depth=3, free={"small_gains": True}, verify=False).path
    measured = lemonx.verify(source, target).outputs
    assert measured.passed and measured.tolerance == EXACT_TOLERANCE and 0 < measured.stream_loss < 1e-5


def test_a_stream_of_little_variance_is_found(tmp_path: Path) -> None:
    """The derived loss is for streams that are not small beside eps, and no config says that they are not."""
    model = pico.PICO["bert-cls"]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention.output.LayerNorm." in name or (".output.dense." in name and "attention" not in name):
                parameter.mul_(0.01)
    source = pico.save(model, tmp_path / "s")
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_norm_eps": 1e-5}))
    assert lemonx.plan(source, depth=4).expected_loss < LIMIT / 10
    with pytest.raises(NotVerified, match=r"nothing was written: norms applied again move the stream by .*small_gains"):
        lemonx.expand(source, tmp_path / "t", depth=4)
    lemonx.expand(source, tmp_path / "t", depth=4, free={"small_gains": True})


def test_frames_and_depth_together(tmp_path: Path) -> None:
    """A stream that a frame carries has the variance of the source's, so the algebra is the same."""
    source = saved("roberta-cls", tmp_path / "s")
    target = lemonx.expand(source, tmp_path / "t", width=72, depth=3).path
    measured = json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]
    assert measured["difference"] <= measured["tolerance"] == EXACT_TOLERANCE
    assert measured["output_loss"] > 1e-7
    # Small gains make the gradient of what is added large, and a frame multiplies it: known before anything is run.
    with pytest.raises(Refused, match=r"small gains enlarge gradients.*: try --width 96 --depth 3"):
        lemonx.plan(source, width=72, depth=3, free={"small_gains": True})
