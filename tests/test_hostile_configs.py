"""Configs that a random search (random_configs.py) found to be handled wrongly, each as small as it could be made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.activations import ACT2FN

import lemonx
import pico
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, Refused
from lemonx.models.resnet import TorchvisionResNetConfig, TorchvisionResNetForImageClassification
from lemonx.models.timm import TimmResNetConfig, TimmResNetForImageClassification, TimmViTForImageClassification
from lemonx.planning.notices import notes
from lemonx.specs.spaces import CALM
from lemonx.training.advice import growth
from lemonx.verification.float64 import Float64


def saved(model_class: Any, folder: Path, dtype: torch.dtype = torch.float64, **fields: Any) -> Path:
    """A pico model of a class with these fields."""
    with Float64():
        model = pico.of_class(model_class, **fields)
    return pico.save(model, folder / "source", dtype)


def verified(source: Path, **sizes: Any) -> dict[str, Any]:
    """What a verified expansion measured."""
    target = lemonx.expand(source, source.parent / "target", **sizes).path
    return json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]


# ----------------------------------------------------------------- what verification could not run


@pytest.mark.parametrize(
    ("model_class", "fields", "sizes"),
    [
        # A text may end in several ways.
        (hf.LlamaForCausalLM, {"eos_token_id": [2, 4]}, {"ffn": 200}),
        (hf.BartForSequenceClassification, {"eos_token_id": 0, "pad_token_id": 1}, {"width": "2x"}),
        # Without a token for padding a classifier takes one text at a time.
        (hf.LlamaForSequenceClassification, {"pad_token_id": None}, {"ffn": 200}),
        # Tokens in chunks of a size that does not divide the sample.
        (hf.BertForMaskedLM, {"chunk_size_feed_forward": 7}, {"ffn": 200}),
        # A cache that transformers makes too small for the decoder: it cannot write, and runs all the same.
        (hf.WhisperForCausalLM, {"encoder_layers": 1}, {"width": "2x"}),
    ],
    ids=["two-ends", "first-token-ends", "no-padding", "chunks", "no-cache"],
)
def test_it_runs(model_class: Any, fields: dict[str, Any], sizes: dict[str, Any], tmp_path: Path) -> None:
    assert verified(saved(model_class, tmp_path, **fields), **sizes)["difference"] <= 1e-10


# ----------------------------------------------------------------- what verification took for a difference


def test_the_first_block_of_a_t5_may_be_copied(tmp_path: Path) -> None:
    """It has the table of distances, which serves all blocks; a copy of it has none."""
    source = saved(hf.T5ForConditionalGeneration, tmp_path, num_layers=1, num_decoder_layers=1)
    assert verified(source, set={"num_layers": 3, "num_decoder_layers": 2})["difference"] <= 1e-10


def test_blocks_are_dropped_in_training_only(tmp_path: Path) -> None:
    """The first block of a ConvNeXt is never dropped, and so has another module where others have one for it."""
    source = saved(hf.ConvNextForImageClassification, tmp_path, drop_path_rate=0.5)
    assert verified(source, set={"depths": [3, 3]})["difference"] <= 1e-10


def test_stages_that_were_equally_wide_by_chance(tmp_path: Path) -> None:
    """The first block of a stage reads the stage before it, the others their own: 96 channels became 144 and 192."""
    args = {"layers": [1, 2], "channels": [24, 24]}
    config = TimmResNetConfig(model_args=args, architecture="resnet50", block="bottleneck", num_classes=2)
    with Float64():
        model = TimmResNetForImageClassification(config)
    pico.randomise(model, seed=0)
    source = pico.save(model, tmp_path / "source", torch.float64)
    assert verified(source, set={"model_args.channels": [36, 48]})["difference"] <= 1e-10


@pytest.mark.parametrize("count", [8, 12])
def test_several_experts_in_one_tensor_are_groups_of_copies_each(count: int, tmp_path: Path) -> None:
    """Also where the stream does not grow, so that the rows of several experts follow one another."""
    source = saved(hf.GptOssForCausalLM, tmp_path)
    sizes = {"num_local_experts": count, "num_experts_per_tok": count // 2}
    assert verified(source, set=sizes, free="vision")["difference"] <= 1e-10


def test_a_changed_expert_is_still_seen(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = saved(hf.GptOssForCausalLM, tmp_path)
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 4}
    target = lemonx.expand(source, tmp_path / "target", set=sizes, free="vision", verify=False).path
    weights = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    weights[name][6, 3, 5] *= 1.001
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    found = lemonx.verify(source, target)
    assert not found.passed and name in found.reason()


def test_numbers_below_the_normal_ones_of_fp16_round_by_more(tmp_path: Path) -> None:
    with Float64():
        model = pico.of_class(hf.Olmo2ForCausalLM)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight *= 1e-5  # a norm reads what they write
    source = pico.save(model, tmp_path / "source", torch.float16)
    assert lemonx.expand(source, tmp_path / "target", width="3/2x", free="vision").path.is_dir()


def test_noise_is_that_of_what_is_compared(tmp_path: Path) -> None:
    """Where the file lacks the head, what lies below it is compared: the logits of a head of zeros have no noise."""
    source = saved(hf.Dinov2Model, tmp_path, torch.float32)
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["Dinov2ForImageClassification"]
    (source / "config.json").write_text(json.dumps(config))
    found = verified(source, width="3/2x")
    assert 0 < found["noise"] < 1e-5 and found["difference"] <= found["tolerance"] <= 1e-4


def test_another_token_is_another_text(tmp_path: Path) -> None:
    """In bf16 a rounding may turn a near tie between two tokens; what is written then is not compared."""
    for seed in range(6):  # in most of them a token is another one
        fields = {"num_hidden_layers": 4, "head_dim": 12, "vocab_size": 300}
        source = saved(hf.MistralForCausalLM, tmp_path / str(seed), torch.bfloat16, **fields)
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100}
        verified(source, width=64, set=sizes, seed=seed)


@pytest.mark.parametrize("out", [[0, 1], [0, 2]])
def test_maps_of_a_backbone_may_be_in_another_basis(out: list[int], tmp_path: Path) -> None:
    """At x4/3 frames carry its streams, as they do a base model's, and the plan says so."""
    fields = {"embed_dim": 12, "num_heads": [3, 3], "depths": [2, 1], "image_size": 16, "patch_size": 2}
    source = saved(hf.SwinBackbone, tmp_path, **fields, window_size=2, out_indices=out)
    assert "the source's in another basis" in " ".join(notes(lemonx.plan(source, width="4/3x")))
    assert verified(source, width="4/3x")["difference"] <= 1e-10


# ----------------------------------------------------------------- what the check did not know


@pytest.mark.parametrize("model_class", [hf.GPTNeoXForCausalLM, hf.StableLmForCausalLM, hf.PhiForCausalLM])
def test_an_odd_number_of_entries_that_turn_is_refused(model_class: Any, tmp_path: Path) -> None:
    """A quarter of 12 entries are 3; transformers then turns 4 of them, at speeds that 24 entries do not have."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    source = saved(model_class, tmp_path, rope_parameters=rope)
    heads = {"num_attention_heads": 4} | ({} if model_class is hf.GPTNeoXForCausalLM else {"num_key_value_heads": 2})
    if model_class is hf.PhiForCausalLM:
        heads["head_dim"] = 24
    with pytest.raises(Refused, match="query: 3 of its entries turn, which make no whole pairs: keep it at 12"):
        lemonx.plan(source, width=96, set=heads)
    assert lemonx.plan(source, width="2x").steps  # heads of 12


@pytest.mark.parametrize("model_class", [hf.StableLmForCausalLM, hf.PhiForCausalLM, hf.CohereForCausalLM])
def test_heads_that_a_layer_norm_reads_keep_their_entries(model_class: Any, tmp_path: Path) -> None:
    """They were told to try the very size that was asked for."""
    qk = {"use_qk_norm": True} if model_class is hf.CohereForCausalLM else {"qk_layernorm": True}
    source = saved(model_class, tmp_path, **qk)
    config = hf.AutoConfig.from_pretrained(source)
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    entries = config.hidden_size // config.num_attention_heads
    own = {} if model_class is hf.StableLmForCausalLM else {"head_dim": 2 * entries}
    with pytest.raises(Refused, match=rf"a LayerNorm reads the entries of every head, .*: keep it at {entries}$"):
        lemonx.plan(source, width=2 * config.hidden_size, set=heads | own)
    assert lemonx.plan(source, width="2x").steps  # more heads


@pytest.mark.parametrize("model_class", [hf.MambaForCausalLM, hf.Mamba2ForCausalLM])
def test_a_branch_that_is_divided_by_the_depth_when_it_is_loaded(model_class: Any, tmp_path: Path) -> None:
    source = saved(model_class, tmp_path, rescale_prenorm_residual=True)
    with pytest.raises(Refused, match=r"depth would change from 2 to 3, and rescale_prenorm_residual divides.*at 2"):
        lemonx.plan(source, depth=3)
    assert verified(source, width="2x")["difference"] <= 1e-10


def test_the_state_of_a_mamba_grows_where_its_activation_keeps_zero(tmp_path: Path) -> None:
    source = saved(hf.Mamba2ForCausalLM, tmp_path, hidden_act="laplace")
    state = json.loads((source / "config.json").read_text())["state_size"]
    with pytest.raises(Refused, match=f"'laplace' does not take zero to zero, .* keep it at {state}"):
        lemonx.plan(source, set={"state_size": 2 * state})
    with pytest.raises(Refused, match="pass through a nonlinearity, so every new unit must duplicate an old one"):
        lemonx.plan(source, width="3/2x")
    assert verified(source, width="2x")["difference"] <= 1e-10


def test_activations_that_keep_zero_are_listed() -> None:
    calm = set[str]()
    for name in ACT2FN:
        act = ACT2FN[name]
        if not act(torch.zeros(1)).detach().any() and not any(True for _ in getattr(act, "parameters", list)()):
            calm.add(name)
    assert calm == CALM


def test_a_norm_that_is_not_run_is_not_counted(tmp_path: Path) -> None:
    """A decoder without its encoder skips the norm behind what it would ask: with small gains one more would show."""
    source = saved(hf.BartForCausalLM, tmp_path)
    found = verified(source, depth=3, free={"small_gains": True})
    assert found["difference"] <= 1e-10 and 0 < found["stream_loss"] < 1e-8


# ----------------------------------------------------------------- refusals that misled


@pytest.mark.parametrize(
    ("model_class", "fields"),
    [
        (hf.BertModel, {"is_decoder": True, "add_cross_attention": True}),
        (hf.ElectraForCausalLM, {"is_decoder": True, "add_cross_attention": True}),
        (hf.GPT2LMHeadModel, {"add_cross_attention": True}),
    ],
)
def test_blocks_that_read_another_model(model_class: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    source = saved(model_class, tmp_path, **fields)
    with pytest.raises(Refused, match="add_cross_attention is true, which lemonx does not support"):
        lemonx.plan(source, width="2x")


@pytest.mark.parametrize("activation", ["prelu", "xielu"])
def test_a_part_of_a_block_is_no_head(activation: str, tmp_path: Path) -> None:
    """An activation with weights: the base model has it too."""
    source = saved(hf.LlamaForCausalLM, tmp_path, hidden_act=activation)
    with pytest.raises(BadCheckpoint, match=r"does not know what the tensor 'model.layers.0.mlp.act_fn") as caught:
        lemonx.plan(source, width="2x")
    assert "base model" not in str(caught.value)


@pytest.mark.parametrize("ratio", [2.5, 1.3])
def test_a_ratio_need_not_be_whole(ratio: float, tmp_path: Path) -> None:
    source = saved(hf.SwinForImageClassification, tmp_path, mlp_ratio=ratio)
    assert verified(source, width="2x")["difference"] <= 1e-10
    assert lemonx.plan(source, set={"mlp_ratio": 3 * ratio}).steps
    with pytest.raises(BadTarget, match="mlp_ratio"):
        lemonx.plan(source, set={"mlp_ratio": float("nan")})


def test_a_part_of_a_base_model_is_no_head(tmp_path: Path) -> None:
    """To save the base model, as was advised, would save the same again."""
    source = saved(hf.ViTModel, tmp_path, pooler_act="prelu")
    with pytest.raises(BadCheckpoint, match=r"does not know what the tensor 'pooler.activation.weight'") as caught:
        lemonx.plan(source, width="2x")
    assert "base model" not in str(caught.value)


def test_a_field_that_config_json_lacks_is_written_by_saving(tmp_path: Path) -> None:
    source = saved(hf.BloomForCausalLM, tmp_path)
    config = json.loads((source / "config.json").read_text())
    assert config.pop("n_layer") == 2  # as many as there are by default
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=r"no field .n_layer.*: load the model with transformers and save"):
        lemonx.plan(source, width="2x")
    hf.BloomForCausalLM.from_pretrained(source).save_pretrained(source)
    assert lemonx.plan(source, width="2x").steps


def test_layers_without_experts_are_told_by_the_fields_that_make_them(tmp_path: Path) -> None:
    source = saved(hf.Qwen3MoeForCausalLM, tmp_path, decoder_sparse_step=2)
    with pytest.raises(Refused, match="decoder_sparse_step or mlp_only_layers leaves layers without experts, "):
        lemonx.plan(source, width="2x")


def test_an_option_that_a_model_has_no_size_for_says_which_it_has(tmp_path: Path) -> None:
    source = saved(hf.FalconForCausalLM, tmp_path, new_decoder_architecture=False, multi_query=True)
    with pytest.raises(BadTarget, match=r"a falcon has no size that --kv-heads sets: set one of .*num_hidden_layers"):
        lemonx.plan(source, kv_heads=2)


def test_heads_of_a_timm_vit_divide_its_width(tmp_path: Path) -> None:
    source = saved(TimmViTForImageClassification, tmp_path)
    width = json.loads((source / "config.json").read_text())["model_args"]["embed_dim"]
    with pytest.raises(BadTarget, match=rf"embed_dim {2 * width} is not a multiple of 5 heads"):
        lemonx.plan(source, width=2 * width, heads=5)


@pytest.mark.parametrize("model_class", [hf.MarianModel, hf.MarianMTModel])
def test_an_untied_marian_has_a_table_for_each_side(model_class: Any, tmp_path: Path) -> None:
    """share_encoder_decoder_embeddings does not tie them where tie_word_embeddings is false."""
    source = saved(model_class, tmp_path, tie_word_embeddings=False)
    assert verified(source, set={"decoder_ffn_dim": 200})["difference"] <= 1e-10


def test_more_sets_of_weights_than_blocks(tmp_path: Path) -> None:
    source = saved(hf.AlbertForMaskedLM, tmp_path, num_hidden_layers=1, num_hidden_groups=1)
    with pytest.raises(
        BadTarget, match=r"num_hidden_groups=2 asks for more sets of weights than .* 1: give --depth 2 too"
    ):
        lemonx.plan(source, set={"num_hidden_groups": 2})
    assert lemonx.plan(source, depth=2, set={"num_hidden_groups": 2}).steps


def test_advice_about_heads_says_how_wide_they_are(tmp_path: Path) -> None:
    """Where the width says how wide a head is, more heads alone would be narrower."""
    source = saved(hf.StableLmForCausalLM, tmp_path)
    with pytest.raises(Refused, match=r": try --kv-heads 4$"):
        lemonx.plan(source, kv_heads=8)
    with pytest.raises(LemonxError):
        lemonx.plan(source, kv_heads=8, heads=8)
    assert lemonx.plan(source, kv_heads=8, heads=8, width=96).steps


@pytest.mark.parametrize("classes", [{"F4": ""}, "LlamaForCausalLM", [["LlamaForCausalLM"]], [5], 3])
def test_classes_that_are_no_list_of_names(classes: Any, tmp_path: Path) -> None:
    source = saved(hf.LlamaForCausalLM, tmp_path)
    target = lemonx.expand(source, tmp_path / "target", ffn=200, verify=False).path
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": classes}))
    for command in (lambda: lemonx.plan(source, ffn=200), lambda: growth(source, target)):
        with pytest.raises(BadCheckpoint, match=r"has an architectures that is not a list of names: give the class"):
            command()


@pytest.mark.parametrize("model_class", [hf.AlbertForMaskedLM, hf.ElectraForMaskedLM, hf.BertForMaskedLM])
def test_heads_that_do_not_share_the_width(model_class: Any, tmp_path: Path) -> None:
    """Classes that may have an embedding_size do not ask for it, and cut off what is left over."""
    source = saved(model_class, tmp_path, **({} if model_class is hf.AlbertForMaskedLM else {"embedding_size": 48}))
    with pytest.raises(BadTarget, match=r"hidden_size 96 is not a multiple of 9 heads: try --width \d+ --heads 9"):
        lemonx.plan(source, width=96, heads=9)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_one_block_whose_number_divides_its_scores(depth: int, tmp_path: Path) -> None:
    """The added blocks have numbers of their own; with several blocks that was known."""
    source = saved(hf.GPT2LMHeadModel, tmp_path, n_layer=1, scale_attn_by_inverse_layer_idx=True)
    assert verified(source, depth=depth)["difference"] <= 1e-10


def test_a_stream_that_is_an_output_and_feeds_a_tied_decoder(tmp_path: Path) -> None:
    """The decoder reads copies that were scaled, and the logits of a choice would be scaled too."""
    source = saved(hf.GPT2DoubleHeadsModel, tmp_path, summary_use_proj=False)
    with pytest.raises(
        Refused, match=r"outputs final itself, .* scaled by 0.5: try --width 84 or --width 96 --set tie_word"
    ):
        lemonx.plan(source, width="2x")
    untied = verified(source, width="2x", depth=3, set={"tie_word_embeddings": False})
    assert untied["difference"] <= 1e-10


def test_layers_that_cannot_be_copied_come_before_an_option_for_added_ones(tmp_path: Path) -> None:
    """Leaving small_gains out would not help: the only layer of each stage changes the shape of its input."""
    source = saved(hf.ResNetForImageClassification, tmp_path, depths=[1, 1])
    with pytest.raises(Refused, match=r"so none can be copied: keep its depth at 1"):
        lemonx.plan(source, set={"depths": [4, 1]}, free={"small_gains": True})


def test_a_field_that_the_class_does_not_use_may_be_missing(tmp_path: Path) -> None:
    """The plan's table of sizes asks for every size of the family, and a decoder alone has no encoder's heads."""
    source = saved(hf.WhisperForCausalLM, tmp_path)
    config = json.loads((source / "config.json").read_text())
    del config["encoder_attention_heads"]
    (source / "config.json").write_text(json.dumps(config))
    assert verified(source, set={"decoder_ffn_dim": 200})["difference"] <= 1e-10


def test_one_channel_of_zeros_becomes_one_on_either_side(tmp_path: Path) -> None:
    """A shortcut from 7 channels to 8 pads behind, and one from 14 to 16 on both sides."""
    sizes = {"width": 4, "stage_width": [4, 7, 8], "inner_width": [4, 5, 6], "layers": [1, 1, 1]}
    config = TorchvisionResNetConfig(**sizes, block="basic", shortcut="A")
    with Float64():
        model = TorchvisionResNetForImageClassification(config)
    pico.randomise(model, seed=0)
    assert verified(pico.save(model, tmp_path / "source"), width="2x")["difference"] <= 1e-10


@pytest.mark.parametrize("fields", [{"vocab_size": 104}, {"decoder_vocab_size": 104}])
def test_a_decoder_alone_may_read_other_words_than_it_writes(fields: dict[str, int], tmp_path: Path) -> None:
    own = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    source = saved(hf.MarianForCausalLM, tmp_path, vocab_size=52, decoder_vocab_size=52, **own)
    assert verified(source, set=fields)["difference"] <= 1e-10
