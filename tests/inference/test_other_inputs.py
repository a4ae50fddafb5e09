"""Models that read neither texts nor pictures: speech, found to take waves with padding, at two lengths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from commands import DIFFERS, Run, runner
from inference.unknown import save
from lemonx.inference.running import Runner, as_read
from lemonx.models.foreign import foreign
from lemonx.verification.float64 import Float64
from lemonx.verification.inputs import views
from lemonx_lab.survey.randomise import randomise

Source = Callable[[str, bool], Path]
_SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "conv_dim": [8, 8, 8],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 4, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 13,
}


def _model(name: str, stable: bool) -> Any:
    """A tiny model with norms before (`stable`) or behind its parts, all parameters random."""
    kind = getattr(transformers, name)
    norm = "layer" if stable else "group"
    model = kind(kind.config_class(**_SMALL, do_stable_layer_norm=stable, feat_extract_norm=norm))
    randomise(model, 0)
    return model.double().eval()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    made: dict[tuple[str, bool], Path] = {}

    def make(name: str, stable: bool) -> Path:
        if (name, stable) not in made:
            made[name, stable] = tmp_path_factory.mktemp("speech") / "small"
            with foreign("make a checkpoint", "mend the test"):
                _model(name, stable).save_pretrained(made[name, stable])
        return made[name, stable]

    return make


def _difference(name: str, small: Path, large: Path) -> float:
    """By how much outputs of two folders differ, of the largest, on a wave of a third length with padding behind it."""
    generator = torch.Generator().manual_seed(7)
    wave = torch.randn(2, 1900, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 1900, dtype=torch.long)
    mask[1, 1300:] = 0
    with foreign("load a checkpoint", "mend the test"), Float64(), torch.no_grad():
        one, other = (
            getattr(transformers, name)
            .from_pretrained(folder, dtype=torch.float64)
            .eval()(wave, attention_mask=mask)
            .logits
            for folder in (small, large)
        )
    return float((one - other).abs().max() / one.abs().max())


def test_waves_are_padded_and_come_in_two_lengths() -> None:
    whole, shorter = (view.inputs for view in views(_model("HubertForCTC", stable=True)))
    assert whole["input_values"].shape[1] > shorter["input_values"].shape[1] > 0
    for inputs in (whole, shorter):
        assert inputs["attention_mask"].shape == inputs["input_values"].shape
        assert len(set(inputs["attention_mask"].sum(1).tolist())) == 3


@pytest.mark.parametrize(
    ("name", "stable", "growth", "near"),
    [
        ("Wav2Vec2ForCTC", False, ("--width", "2x"), 1e-10),
        ("HubertForCTC", True, ("--width", "2x", "--depth", "+1"), 1e-10),
        ("Wav2Vec2ForSequenceClassification", False, ("--depth", "+1"), 1e-3),  # up to eps: its norms are behind
    ],
)
def test_speech_grows_through_the_command_line(
    name: str, stable: bool, growth: tuple[str, ...], near: float, source: Source, run: Run, tmp_path: Path
) -> None:
    small, large = source(name, stable), tmp_path / "large"
    result = run("expand", small, large, *growth)
    assert result.code == 0, result.err
    said = json.loads((large / "lemonx.json").read_text())
    outputs = said["verified"]["outputs"]
    assert said["table"] == "inferred" and said["verified"]["proven"] and outputs["difference"] < 1e-10
    assert outputs["inputs"] == "input_values [3, 4000]; input_values [3, 2500] of another length"
    assert _difference(name, small, large) < near
    assert (said["expected_loss"] is None) == (near < 1e-9)


def test_verify_finds_a_changed_weight(source: Source, run: Run, tmp_path: Path) -> None:
    small, large = source("Wav2Vec2ForCTC", False), tmp_path / "large"
    assert run("expand", small, large, "--width", "2x", "--no-verify").code == 0
    assert "was made to compute" in (large / "README.md").read_text()
    assert run("verify", small, large).code == 0
    tensors = load_file(large / "model.safetensors")
    tensors["wav2vec2.encoder.pos_conv_embed.conv.bias"][3] += 1e-6
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    assert run("verify", small, large).code == DIFFERS


def test_inputs_that_are_not_drawn_are_found_without_any_weights(tmp_path: Path) -> None:
    """Pictures that come as rows of patches, beside their shapes."""
    folder = save("siglip2_vision_model", tmp_path / "small")
    values = as_read(json.loads((folder / "config.json").read_text()))
    Runner.of(values, most=1000).check_sample(values)
