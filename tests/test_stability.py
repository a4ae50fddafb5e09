"""Frames on models as they are: gains of 0, and nothing that rounding adds grows, forth or back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import lemonx
import pico
from lemonx.errors import NotVerified
from lemonx.frames import construction, solution
from lemonx.verification.float64 import Float64
from lemonx.verification.stability import Figures, Stability

# Every family whose norms feed the stream, and sizes that frames carry it to.
FED: dict[str, dict[str, Any]] = {
    "bert-base": {"width": 72},
    "roberta-cls": {"width": 72},
    "mpnet-base": {"width": 72},
    "electra-cls": {"width": 72},
    "distilbert-cls": {"width": 72, "ffn": 200},
    "albert-apart": {"width": 72},
    "opt-post-ln-untied": {"width": 72, "ffn": 196},
    "clip-vision": {"width": 72},
    "swin-base": {"width": 36},
    "modernbert-base": {"width": 72},
}
SMALL = (0.0, 0.0, 1e-33, -6e-33, 1.5e-9, -1e-6, 1e-4)
# What the framed models here have been seen to have, at most, times their source's.
SEEN = 4.0


def with_dead_gains(model: hf.PreTrainedModel, seed: int) -> hf.PreTrainedModel:
    """Gains near 0 at random places of random norms, at least of one."""
    rng, gains = np.random.default_rng(seed), list[Tensor]()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            assert isinstance(module.weight, Tensor), name
            gains.append(module.weight)
    chosen = [gain for gain in gains if rng.random() < 0.7] or gains
    with torch.no_grad():
        for gain in chosen:
            at = rng.choice(len(gain), 1 + rng.integers(len(gain) // 8), replace=False)
            gain[torch.from_numpy(at)] = torch.from_numpy(rng.choice(SMALL, len(at))).to(gain.dtype)
    return model


def stability(target: Path) -> dict[str, Any]:
    return json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]["stability"]


@pytest.mark.parametrize("name", FED)
def test_dead_channels_are_carried(name: str, tmp_path: Path) -> None:
    source = pico.save(with_dead_gains(pico.PICO[name](), seed=len(name)), tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", **FED[name]).path
    outputs = json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]
    assert outputs["difference"] < 1e-12 and outputs["tolerance"] == 1e-10
    assert outputs["stability"]["noise_ratio"] < SEEN and outputs["stability"]["gradient_ratio"] < SEEN


# A deep ALBERT: one set of weights, twelve times over


@pytest.fixture(scope="module")
def albert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and gains as large as trained ones are: a stream that its norms make three times smaller."""
    config = hf.AlbertConfig(
        vocab_size=97, embedding_size=32, hidden_size=64, num_hidden_layers=12, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=40, num_labels=5, hidden_act="gelu_new", pad_token_id=0,
    )  # fmt: skip
    model = hf.AlbertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "orm." in name and name.endswith("weight"):
                weight.copy_(0.3 * torch.exp(0.25 * drawn))
            else:
                weight.copy_(drawn * (0.15 if "orm." in name else 0.05 if name.endswith("bias") else 0.1))
    return pico.save(model, tmp_path_factory.mktemp("albert") / "source")


def growth(folder: Path, beside: Tensor | None = None) -> float:
    """By how much a disturbance of the stream grows over all blocks; `beside`: outside of the columns of a matrix."""
    model = hf.AlbertForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    encoder, generator = model.albert.encoder, torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (4, 20), generator=generator)
    with Float64(), torch.no_grad():
        stream = encoder.embedding_hidden_mapping_in(model.albert.embeddings(ids))
        disturbance = torch.randn(stream.shape, generator=generator, dtype=torch.float64)
        if beside is not None:
            basis = torch.linalg.qr(beside)[0]
            disturbance -= disturbance @ basis @ basis.T
        disturbance *= 1e-7 / disturbance.norm()
        ends = []
        for state in (stream, stream + disturbance):
            for _ in range(model.config.num_hidden_layers):
                state = encoder.albert_layer_groups[0](state)
                state = state[0] if isinstance(state, tuple) else state
            ends.append(state)
    return float((ends[1] - ends[0]).norm()) / 1e-7


def test_what_leaves_a_frame_shrinks_as_the_source_shrinks_it(albert: Path, tmp_path: Path) -> None:
    target = lemonx.expand(albert, tmp_path / "target", width=96).path
    figures = stability(target)
    assert figures["noise_ratio"] < SEEN and figures["gradient_ratio"] < SEEN
    solved = lemonx.plan(albert, width=96).frames
    assert solved is not None
    carried = torch.from_numpy(solved.streams[0].entry.stream.forth.columns(0, 96))
    assert growth(target, beside=carried) < growth(albert) < 1


def test_a_frame_that_lets_rounding_grow_is_refused(
    albert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact to 1e-10 in float64, and useless: with gains of one the blocks amplify what leaves the frame."""
    exact = tmp_path / "float64"
    hf.AlbertForSequenceClassification.from_pretrained(albert, dtype=torch.float64).save_pretrained(exact)
    shutil.copy(albert / "config.json", exact)
    monkeypatch.setattr(solution, "damped", lambda gain, behind: np.ones(len(behind)))
    loose = lemonx.expand(exact, tmp_path / "loose", width=96, verify=False).path
    found = lemonx.verify(exact, loose)
    assert found.outputs and found.outputs.difference < 1e-9 and not found.outputs.passed
    assert found.outputs.stability and min(found.outputs.stability.noise, found.outputs.stability.gradient) > 100
    with pytest.raises(NotVerified, match=r"nothing was written: the target's float32 noise is .* choose a multiple"):
        lemonx.expand(exact, tmp_path / "target", width=96)
    assert not (tmp_path / "target").exists()


def test_either_figure_refuses() -> None:
    source = Figures(1e-7, 2.0)
    assert Stability(source, Figures(9e-7, 19.0)).passed
    assert "float32 noise is 1.1e-06" in Stability(source, Figures(1.1e-6, 2.0)).reason()
    assert "gradient norm is 2.1e+01" in Stability(source, Figures(1e-7, 21.0)).reason()
    for wrong in (Figures(1.1e-6, 2.0), Figures(1e-7, 21.0), Figures(float("nan"), 2.0), Figures(1e-7, float("nan"))):
        assert not Stability(source, wrong).passed


def test_a_gradient_is_that_of_the_same_function(tmp_path: Path) -> None:
    """The source beside itself, and outputs in another basis: a model without a head gives out a frame."""
    from lemonx.checkpoints import Checkpoint
    from lemonx.verification.outputs import compare

    source = pico.save(pico.PICO["roberta-pre-ln-base"](), tmp_path / "source")
    plan = lemonx.plan(source, width=72)
    assert plan.frames is not None
    with Checkpoint.open(source) as checkpoint:
        found = compare(checkpoint, checkpoint, plan, rounding=None)[0].stability
    assert found and found.noise == pytest.approx(1.0) and found.gradient == pytest.approx(1.0)


def test_the_certificate_says_so(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["bert-cls"](), tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", width=72).path
    assert stability(target).keys() >= {"source", "target", "noise_ratio", "gradient_ratio", "limit"}
    assert "In float32 its noise is" in (target / "README.md").read_text()
    by_block = lemonx.verify(source, target, layerwise=True)
    assert by_block.passed and by_block.outputs and by_block.outputs.stability
    assert "block by block" in (by_block.outputs.stability.skipped or "")
    # Copies are as steady as their source: nothing is measured where nothing can go wrong.
    copies = lemonx.expand(source, tmp_path / "copies", width=96).path
    assert stability(copies) is None
    assert stability(target)["limit"] == construction.LIMIT
