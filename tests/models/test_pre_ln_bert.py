"""The paper's Pre-LN BERT: the same encoder as transformers' MegatronBert, with a head of one layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from torch.nn import functional as F

import pico
from lemonx import models
from lemonx.models.pre_ln_bert import PreLnBertConfig, PreLnBertForMaskedLM, PreLnBertForSequenceClassification

models.register()
# What MegatronBert calls each part of a block.
MEGATRON = {
    "layers.": "encoder.layer.",
    "attention_norm": "attention.ln",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "mlp_norm": "ln",
    "mlp.intermediate": "intermediate.dense",
    "mlp.output": "output.dense",
    "final_norm": "encoder.ln",
}


def test_the_encoder_is_megatron_berts() -> None:
    """An independent implementation with the same weights has the same hidden states, padded and not."""
    ours, theirs = pico.PICO["pre-ln-base"](), pico.PICO["megatron-base"]()
    renamed = {}
    for name, value in ours.state_dict().items():
        for old, new in MEGATRON.items():
            name = name.replace(old, new, 1) if "attention.ln" not in name or old == "layers." else name
        renamed[name] = value
    odd = theirs.load_state_dict(renamed, strict=False)
    assert not odd.unexpected_keys
    assert all(name.startswith("pooler.") or "_ids" in name for name in odd.missing_keys)
    for padded in (False, True):
        batch = pico.inputs(ours, seed=3, padded=padded)
        a, b = (pico.named_outputs(model, batch)["last_hidden_state"] for model in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_head_is_the_embedding_and_a_bias() -> None:
    model = pico.PICO["pre-ln-mlm"]()
    assert isinstance(model, PreLnBertForMaskedLM)
    batch = pico.inputs(model, seed=1)
    with torch.no_grad():
        hidden = model.bert(**batch).last_hidden_state
        table = model.bert.embeddings.word_embeddings.weight
        torch.testing.assert_close(model(**batch).logits, hidden @ table.T + model.lm_head.bias, rtol=0, atol=1e-12)


def test_the_masked_loss_is_the_mean_over_marked_tokens() -> None:
    model = pico.PICO["pre-ln-mlm"]().float()
    batch = pico.inputs(model, seed=1)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 2:5] = batch["input_ids"][0, 2:5]
    with torch.no_grad():
        result = model(**batch, labels=labels)
        summed = model(**batch, labels=labels, num_items_in_batch=6).loss
    expected = F.cross_entropy(result.logits[0, 2:5], labels[0, 2:5])
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(summed, expected / 2)


@pytest.mark.parametrize(("count", "kind"), [(1, "regression"), (3, "single_label_classification")])
def test_the_classifier_follows_the_number_of_labels(count: int, kind: str) -> None:
    config = PreLnBertConfig(**{**pico._MEGATRON, "num_labels": count})
    model = PreLnBertForSequenceClassification(config).eval()
    batch = pico.inputs(model, seed=1)
    labels = torch.tensor([0.5, 2.0]) if count == 1 else torch.tensor([2, 0])
    with torch.no_grad():
        result = model(**batch, labels=labels)
    expected = F.mse_loss(result.logits[:, 0], labels) if count == 1 else F.cross_entropy(result.logits, labels)
    torch.testing.assert_close(result.loss, expected)
    assert model.config.problem_type == kind


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("pre-ln-mlm", hf.AutoModelForMaskedLM),
        ("pre-ln-mlm-untied", hf.AutoModelForMaskedLM),
        ("pre-ln-cls", hf.AutoModelForSequenceClassification),
        ("pre-ln-base", hf.AutoModel),
    ],
)
def test_auto_classes_load_what_was_saved(name: str, auto: type, tmp_path: Path) -> None:
    model = pico.PICO[name]()
    folder = pico.save(model, tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (name == "pre-ln-mlm-untied")  # noqa: SIM118
    loaded, info = auto.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)  # pyright: ignore
    assert not any(info.values())
    assert type(loaded) is type(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(value.equal(model.state_dict()[key]) for key, value in loaded.state_dict().items())
    # Weights in a mapped file are aligned otherwise than fresh ones, and sums may then round otherwise.
    batch = pico.inputs(model, seed=1)
    torch.testing.assert_close(pico.outputs(loaded.eval(), batch), pico.outputs(model, batch), rtol=0, atol=1e-12)
    if name == "pre-ln-mlm":
        assert loaded.lm_head.weight is loaded.bert.embeddings.word_embeddings.weight


def test_a_classifier_takes_the_encoder_of_a_masked_lm(tmp_path: Path) -> None:
    """Fine-tuning begins so: only the head is new."""
    model = pico.PICO["pre-ln-mlm"]()
    folder = pico.save(model, tmp_path)
    loaded, info = PreLnBertForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert info["missing_keys"] == {"pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"}
    for name, value in loaded.bert.state_dict().items():
        assert value.equal(model.state_dict()[f"bert.{name}"])


def test_dropout_only_in_training() -> None:
    config = PreLnBertConfig(**{**pico._MEGATRON, "hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5})
    model = PreLnBertForMaskedLM(config)
    batch = pico.inputs(model, seed=1)
    with torch.no_grad():
        assert not model.train()(**batch).logits.equal(model(**batch).logits)
        assert model.eval()(**batch).logits.equal(model(**batch).logits)


def test_config_round_trip_and_refusal(tmp_path: Path) -> None:
    config = PreLnBertConfig(**pico._MEGATRON)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "pre-ln-bert"
    assert hf.AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
    with pytest.raises(ValueError, match="multiple of the 5 attention heads"):
        PreLnBertConfig(**{**pico._MEGATRON, "num_attention_heads": 5})


def test_find_knows_only_our_classes() -> None:
    assert models.find("PreLnBertForMaskedLM") is PreLnBertForMaskedLM
    assert models.find("BertForMaskedLM") is None
