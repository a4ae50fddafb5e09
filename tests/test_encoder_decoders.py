"""Encoders and encoder-decoders beyond their outputs: rows of one block's own, repeated tables, verification."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
import pico
from lemonx import api, architectures
from lemonx.algebra.recipes import Vector
from lemonx.checkpoints import Checkpoint
from lemonx.diagnostics.why import diagnose
from lemonx.errors import BadCheckpoint, BadTarget, NotVerified
from lemonx.options.declared import Growth
from lemonx.planning.request import asked, target_config
from lemonx.verification.inputs import views
from lemonx_lab.data.tasks import task_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: pico.save(pico.PICO[name](), tmp_path_factory.mktemp(name) / name))


def edit(folder: Path, output: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint with other weights."""
    output.mkdir()
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    for name in {"config.json", "lemonx.json"} & {path.name for path in folder.iterdir()}:
        (output / name).write_text((folder / name).read_text())
    return output


# ----------------------------------------------------------------- rows of one block's own


def test_a_first_blocks_own_table_stays_in_the_first_block(source: Any) -> None:
    made = lemonx.plan(source("t5"), set={"num_layers": 5, "num_decoder_layers": 3})
    tables = [step.name for step in made.steps if "relative_attention_bias" in step.name]
    wanted = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert tables == [f"decoder.{wanted}", f"encoder.{wanted}"]
    assert "encoder.block.4.layer.0.SelfAttention.q.weight" in {step.name for step in made.steps}


def test_a_last_blocks_own_norm_goes_to_the_last_block(source: Any) -> None:
    """It takes the scale of the tied decoder, and the norm that was last is now an identity like any other."""
    made = lemonx.plan(source("bart"), width=96, set={"decoder_layers": 4})
    last = "model.decoder.layers.{}.final_layer_norm.weight"
    recipes = [next(step.recipe for step in made.steps if step.name == last.format(i)) for i in range(4)]
    assert all(isinstance(recipe, Vector) for recipe in recipes)
    # 0 and its copy, 1 and its copy: the affine part is that of the last of each.
    assert [recipe.constant for recipe in recipes] == [1.0, None, 1.0, None]  # type: ignore[union-attr]
    factors = [set(np.unique(recipe.factor)) for recipe in recipes]  # type: ignore[union-attr]
    assert factors == [{1.0}, {1.0}, {1.0}, {0.5}]


# ----------------------------------------------------------------- tables that repeat another


def test_a_table_that_repeats_another_is_not_written(source: Any, tmp_path: Path) -> None:
    twice = edit(
        source("t5"),
        tmp_path / "twice",
        lambda w: w.update({"encoder.embed_tokens.weight": w["shared.weight"].clone()}),
    )
    made = lemonx.plan(twice, width=72)
    assert made.dropped == {"encoder.embed_tokens.weight": "tied to transformer.shared"}
    large = lemonx.expand(twice, tmp_path / "large", width=72, verify=True).path
    assert "encoder.embed_tokens.weight" not in load_file(large / "model.safetensors")
    other = edit(twice, tmp_path / "other", lambda w: w["encoder.embed_tokens.weight"].add_(1.0))
    with pytest.raises(BadCheckpoint, match=r"encoder\.embed_tokens\.weight"):
        lemonx.expand(other, tmp_path / "never", width=72)


def test_a_decoder_is_tied_unless_the_file_has_it(source: Any) -> None:
    """T5 v1.1: config.json is the same, but one file has a decoder of its own."""
    tied, own = (lemonx.plan(source(name), width=96) for name in ("t5-gated", "t5-untied"))
    for made, scale in ((tied, 0.5), (own, 1.0)):
        norm = next(step.recipe for step in made.steps if step.name == "decoder.final_layer_norm.weight")
        assert isinstance(norm, Vector) and set(np.unique(norm.factor)) == {scale}
    assert "lm_head.weight" in {step.name for step in own.steps}
    assert not own.tied and "lm_head.weight" not in {step.name for step in tied.steps}


def test_second_names_of_sizes_follow(source: Any, tmp_path: Path) -> None:
    """transformers reads num_hidden_layers over encoder_layers, and hub files have both."""
    both = edit(source("bart"), tmp_path / "both", lambda w: None)
    config = json.loads((both / "config.json").read_text()) | {"num_hidden_layers": 2, "hidden_size": 48}
    (both / "config.json").write_text(json.dumps(config))
    large = lemonx.expand(both, tmp_path / "large", width=96, set={"encoder_layers": 4}, verify=True).path
    written = json.loads((large / "config.json").read_text())
    assert (written["num_hidden_layers"], written["hidden_size"]) == (4, 96)
    assert "num_attention_heads" not in written
    for name, second, sizes in (("t5", "num_hidden_layers", {"set": {"num_layers": 3}}),
                                ("distilbert-base", "num_hidden_layers", {"depth": 3}),
                                ("whisper", "num_hidden_layers", {"set": {"encoder_layers": 3}}),
                                ("marian", "num_hidden_layers", {"set": {"encoder_layers": 3}})):  # fmt: skip
        config = json.loads((source(name) / "config.json").read_text()) | {second: 2}
        family = architectures.find(config)
        assert target_config(family, config, asked(Growth(**sizes)))[second] == 3, name


# ----------------------------------------------------------------- verification

# How many blocks have streams to compare: of Post-LN groups only the last.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "roberta-mlm": ({"width": 96, "depth": 3}, 2),
    "modernbert-mlm": ({"width": 96, "depth": 5}, 5),
    "electra-discriminator": ({"width": 96, "depth": 3}, 2),
    # One block that runs four times, and five that come from it.
    "albert-mlm": ({"width": 96}, 4),
    "albert-tokens": ({"width": 96, "depth": 5, "set": {"num_hidden_groups": 5}}, 4),
    "t5": ({"width": 72, "set": {"num_layers": 3, "num_decoder_layers": 4}}, 7),
    "t5-cls": ({"width": 72}, 4),
    "bart": ({"width": 96, "set": {"encoder_layers": 3, "decoder_layers": 4}}, 4),
    "bart-cls": ({"width": 96}, 4),
    "whisper": ({"width": 96, "set": {"decoder_layers": 3}}, 5),
    "whisper-cls": ({"width": 96}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_verified_whole_and_block_by_block(name: str, source: Any, tmp_path: Path) -> None:
    sizes, places = CASES[name]
    large = lemonx.expand(source(name), tmp_path / "large", verify=True, **sizes).path
    measured = api.verify(source(name), large, layerwise=True)
    layers = measured.layers
    assert measured.passed and layers is not None and layers.skipped is None and layers.first is None
    assert len(layers.places) == places


def test_positions_that_no_file_holds(source: Any, tmp_path: Path) -> None:
    """A Marian computes its positions: it is verified whole, and block by block the reason is told."""
    large = lemonx.expand(source("marian"), tmp_path / "large", verify=True, set={"encoder_layers": 3}).path
    with pytest.raises(NotVerified, match=r"no file holds.*without --layerwise$"):
        api.verify(source("marian"), large, layerwise=True)


def test_a_wrong_block_is_named(source: Any, tmp_path: Path) -> None:
    large = lemonx.expand(source("bart"), tmp_path / "large", width=96, verify=False).path
    wrong = edit(large, tmp_path / "wrong", lambda w: w["model.decoder.layers.1.final_layer_norm.bias"][0].add_(0.1))
    layers = api.verify(source("bart"), wrong, layerwise=True).layers
    assert layers is not None and layers.first is not None and layers.first.block == "model.decoder.layers.1"


@pytest.mark.parametrize(
    ("name", "begun"), [("t5", True), ("bart-cls", False), ("whisper", True), ("whisper-cls", False)]
)
def test_an_encoder_decoder_gets_a_text_to_go_on_with(name: str, begun: bool, source: Any) -> None:
    model = pico.load(source(name)).model
    batch = views(model)[0].inputs
    assert ("decoder_input_ids" in batch) == begun
    assert model.main_input_name in batch
    if begun and "attention_mask" in batch:
        assert batch["decoder_input_ids"].shape != batch["attention_mask"].shape


# ----------------------------------------------------------------- advice


WHY = ["albert-mlm", "bart", "distilbert-mlm", "electra-generator", "marian", "modernbert-mlm", "mpnet-mlm"]


@pytest.mark.parametrize("name", [*WHY, "roberta-mlm", "roberta-pre-ln-mlm", "t5-untied", "whisper"])
def test_why_says_that_nothing_is_lacking(name: str, source: Any) -> None:
    with Checkpoint.open(source(name)) as checkpoint:
        found = diagnose(checkpoint)
    assert found.known and found.reason is None and found.covered == found.tensors
    assert found.without_row == found.without_tensor == ()


def test_tasks() -> None:
    """What is trained here is found by its class; the rest is told in one line."""
    for name in ("RobertaForMaskedLM", "ModernBertForMaskedLM", "DistilBertForMaskedLM"):
        assert task_of({"architectures": [name]}) == "masked-lm"
    assert task_of({"architectures": ["BartForSequenceClassification"]}) == "sequence-classification"
    for name in (
        "T5ForConditionalGeneration",
        "MarianMTModel",
        "ElectraForPreTraining",
        "RobertaForTokenClassification",
    ):
        with pytest.raises(BadTarget, match=f"^lemonx cannot train the head of {name}: use a class that [^\n]+$"):
            task_of({"architectures": [name]})
