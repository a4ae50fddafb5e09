"""Sizes that a user leaves out are chosen: near the proportions, lossless, and as the class accepts them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import lemonx
from lemonx.checkpoints.safetensors_file import encode_header
from lemonx.errors import BadTarget, LemonxError, Refused
from lemonx.planning.notices import notes
from pico import PICO, save

# The proportions of models that people have: heads, key-value heads, entries of a head, inner size.
SHAPES = {
    "SmolLM2-135M": dict(num_attention_heads=9, num_key_value_heads=3, head_dim=4, intermediate_size=96),
    "Gemma 3 270M": dict(num_attention_heads=4, num_key_value_heads=1, head_dim=16, intermediate_size=128),
    "Qwen2.5-0.5B": dict(num_attention_heads=14, num_key_value_heads=2, head_dim=4, intermediate_size=304),
    "Llama-3.2-1B": dict(num_attention_heads=32, num_key_value_heads=8, head_dim=4, intermediate_size=512),
    "odd": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=37),
}
WIDTH = {"SmolLM2-135M": 36, "Gemma 3 270M": 40, "Qwen2.5-0.5B": 56, "Llama-3.2-1B": 128, "odd": 32}


def llama(name: str, folder: Path) -> Path:
    config = LlamaConfig(hidden_size=WIDTH[name], num_hidden_layers=2, vocab_size=61, **SHAPES[name])
    return save(LlamaForCausalLM(config), folder)


def headers_only(config: PreTrainedConfig, kind: type[PreTrainedModel], folder: Path) -> Path:
    """A checkpoint of full size, whose file of weights has a header and a hole."""
    with torch.device("meta"):
        model = kind(config)
    folder.mkdir()
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)
    tied = set(model.all_tied_weights_keys)
    shapes = [(name, "BF16", tuple(t.shape)) for name, t in model.state_dict().items() if name not in tied]
    header = encode_header(shapes)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(2 * math.prod(shape) for _, _, shape in shapes))
    return folder


def llama_of(width: int, ffn: int, heads: int, kv_heads: int, layers: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=True,
    )


SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("num_hidden_layers", "vocab_size"),
)


def real(name: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The sizes of an open model."""
    if name == "SmolLM2-135M":
        return llama_of(576, 1536, 9, 3, 30, 49152), LlamaForCausalLM
    if name == "Llama-3.2-1B":
        return llama_of(2048, 8192, 32, 8, 16, 128256), LlamaForCausalLM
    if name == "BERT-base":
        return BertConfig(), BertModel
    if name == "Qwen2.5-0.5B":
        sizes = llama_of(896, 4864, 14, 2, 24, 151936).to_diff_dict()
        return Qwen2Config(**{name: sizes[name] for name in SIZES}), Qwen2ForCausalLM
    sizes = llama_of(640, 2048, 4, 1, 18, 262144).to_diff_dict()
    return Gemma3TextConfig(**{name: sizes[name] for name in SIZES}), Gemma3ForCausalLM


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Gemma 3 270M", "Qwen2.5-0.5B", "BERT-base", "Llama-3.2-1B"])
def test_models_that_people_have_get_a_plan_at_once(name: str, tmp_path: Path) -> None:
    config, kind = real(name)
    source = headers_only(config, kind, tmp_path / "source")
    # From 768 to 896 no change of basis leads that both norms of a Post-LN layer allow.
    for width in ("1.5x", "1.25x") if name == "BERT-base" else ("1.5x", "1.25x", "+128"):
        plan = lemonx.plan(source, width=width)
        assert plan.policy.lossless
        type(config)(**{key: value for key, value in plan.target_config.items() if key != "model_type"})


@pytest.mark.parametrize("width", ["1.5x", "1.25x"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_grows_by_a_fraction_at_once(name: str, width: str, tmp_path: Path) -> None:
    grown = lemonx.expand(llama(name, tmp_path / "source"), tmp_path / "target", width=width)
    assert grown.verified.proven
    new = grown.plan.target_config
    LlamaConfig(**{key: value for key, value in new.items() if key != "model_type"})  # the class accepts them
    told = "\n".join(notes(grown.plan))
    for field, why in grown.plan.chosen.items():
        assert f"{field} is {new[field]}, since {why}" in told


def test_what_is_chosen_is_said(tmp_path: Path) -> None:
    plan = lemonx.plan(llama("SmolLM2-135M", tmp_path / "source"), width="1.5x")
    sizes = {name: plan.target_config[name] for name in ("num_attention_heads", "num_key_value_heads")}
    assert plan.chosen == {"num_attention_heads": "13.5 is not whole", "num_key_value_heads": "4.5 is not whole"}
    assert sizes == {"num_attention_heads": 18, "num_key_value_heads": 6}


def test_what_is_whole_and_lossless_is_in_proportion(tmp_path: Path) -> None:
    plan = lemonx.plan(llama("Llama-3.2-1B", tmp_path / "source"), width="1.5x")
    assert not plan.chosen and plan.target_config["num_attention_heads"] == 48


def test_both_sides_of_an_encoder_decoder(tmp_path: Path) -> None:
    """Both have one inner size, and one number of heads, which are no whole numbers in proportion."""
    sides = {f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in (("ffn_dim", 50), ("layers", 1))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(d_model=24, vocab_size=61, max_position_embeddings=32, **sides, **heads)
    plan = lemonx.plan(save(BartForConditionalGeneration(config), tmp_path / "source"), width="2x", heads=None, ffn=101)
    assert plan.target_config["encoder_ffn_dim"] == plan.target_config["decoder_ffn_dim"] == 101


def test_a_list_of_sizes(tmp_path: Path) -> None:
    """Each number of a list is rounded the same way."""
    source = save(PICO["swinv2-cls"](), tmp_path / "source")
    plan = lemonx.plan(source, width="2x")
    assert not plan.chosen


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heads": 4, "kv_heads": 3}, "4 query heads do not fit 3"),
        ({"set": {"num_attention_heads": 5, "num_key_value_heads": 2}}, "5 query heads do not fit 2|not a multiple"),
        ({"width": 31}, "smaller than the source's 32"),
    ],
)
def test_what_is_given_is_obeyed_or_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((BadTarget, Refused), match=says):
        lemonx.plan(llama("odd", tmp_path / "source"), **given)


def test_a_depth_alone_chooses_nothing(tmp_path: Path) -> None:
    plan = lemonx.plan(llama("odd", tmp_path / "source"), depth=3)
    assert not plan.chosen and plan.target_config["intermediate_size"] == 37
    with pytest.raises(LemonxError, match="would lose layers"):
        lemonx.plan(llama("odd", tmp_path / "again"), depth=1)


def test_key_value_heads_follow_heads_that_are_given(tmp_path: Path) -> None:
    """9 heads read 3; 12 can read 4, and not 3, since each would then serve 4 where it served 3."""
    plan = lemonx.plan(llama("SmolLM2-135M", tmp_path / "source"), heads=12)
    assert plan.target_config["num_attention_heads"] == 12
    assert 12 % int(str(plan.target_config["num_key_value_heads"])) == 0


def test_shapes_for_a_budget_keep_the_proportions(tmp_path: Path) -> None:
    source = llama("SmolLM2-135M", tmp_path / "source")
    assert all(not shape.plan.chosen for shape in lemonx.shapes(source, "4x"))


@pytest.mark.parametrize(("heads", "width", "chosen"), [(3, "1.5x", 3), (5, "1.5x", 5)])
def test_heads_divide_the_width(heads: int, width: str, chosen: int, tmp_path: Path) -> None:
    """GPT-2 cannot be built otherwise: 4.5 heads become 3, as 45 is no multiple of 4."""
    config = GPT2Config(n_embd=30, n_head=heads, n_layer=1, vocab_size=61, n_positions=32)
    grown = lemonx.expand(save(GPT2LMHeadModel(config), tmp_path / "source"), tmp_path / "target", width=width)
    assert grown.verified.proven and grown.plan.target_config["n_head"] == chosen


def test_nothing_far_from_the_proportions_is_chosen(tmp_path: Path) -> None:
    """A wider Post-LN stream needs neurons that pass it on: at 7/6 they would be more than twice of what is asked."""
    source = save(PICO["bert-base"](), tmp_path / "source")
    with pytest.raises(Refused, match="new MLP neurons that only pass activations on"):
        lemonx.plan(source, width=56)
