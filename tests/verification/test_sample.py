"""Each branch of the sample of inputs sees a fault of the wiring that no other branch sees.

Two models with the same weights, of which the second is wired wrongly in one place: their outputs must differ. Each of
the faults is invisible to a sample without the branch that is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

import lemonx
import pico
from lemonx.errors import CannotVerify
from lemonx.guards.limits import MOST_PIXELS
from lemonx.verification import inputs as sample
from lemonx.verification.comparison import largest_difference
from lemonx.verification.float64 import Float64
from lemonx.verification.inputs import View
from lemonx.verification.running import Loaded, generated, observe

SEEN = 1e-6


def built(kind: Any, sizes: dict[str, Any], **more: Any) -> Any:
    with Float64():
        return pico._build(kind, kind.config_class, sizes, **more)


def found(model: PreTrainedModel, given: list[View] | None = None) -> tuple[list[View], dict[Any, Tensor]]:
    """What a model makes of these inputs, or of its own sample, and of its own text when it goes on writing."""
    loaded = Loaded(model.eval(), frozenset(), frozenset(), (), Path("here"))
    with Float64(), torch.no_grad():
        used, outputs = observe(loaded, given, 0)
        if model.can_generate() and "input_ids" in used[0].inputs:
            outputs |= generated(model, used[0])[1]
    return used, outputs


def seen_by(one: PreTrainedModel, other: PreTrainedModel) -> set[str]:
    """The views in which two models with the same weights differ on the first one's sample; none if they do not."""
    other.load_state_dict(one.state_dict(), strict=False)
    used, before = found(one)
    _, after = found(other, used)
    assert before.keys() == after.keys()
    return {name[1] for name in before if largest_difference({name: before[name]}, {name: after[name]}) > SEEN}


def pair(kind: type[PreTrainedModel], sizes: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]) -> set[str]:
    """The same for two configs."""
    assert not seen_by(built(kind, sizes, **right), built(kind, sizes, **right))
    return seen_by(built(kind, sizes, **right), built(kind, sizes, **wrong))


# ----------------------------------------------------------------- length

GEMMA = {**pico._LLAMA, "head_dim": 12, "query_pre_attn_scalar": 16, "max_position_embeddings": 600}
LOCAL = ["sliding_attention", "full_attention"]


def test_a_text_longer_than_the_window() -> None:
    """Longer than other texts are: 23 tokens would not tell 30 from 31."""
    assert sample.LENGTH < 30
    window = {"sliding_window": 30, "layer_types": LOCAL}
    assert "" in pair(hf.Gemma2ForCausalLM, GEMMA, window, {**window, "sliding_window": 31})


def test_a_window_that_is_too_long_is_made_short(tmp_path: Path) -> None:
    """A layer without one is then seen; that both have the same window is for the structure to say."""
    right, wrong = (
        pico.save(built(hf.Gemma2ForCausalLM, GEMMA, sliding_window=400, layer_types=types), tmp_path / str(number))
        for number, types in enumerate((LOCAL, LOCAL[::-1]))
    )
    one, other = pico.load(right), pico.load(wrong)
    assert one.shortened == other.shortened == ("sliding_window",)
    assert seen_by(one.model, other.model)


def rope(factor: float, original: int, dim: int = 12) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * (dim // 2), "long_factor": [factor] * (dim // 2)}
    return {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original, **factors
        },
        "original_max_position_embeddings": original,
    }  # fmt: skip


def test_a_text_longer_than_the_first_positions() -> None:
    """Behind them a rotation turns otherwise; a few tokens at the last positions show less of it than a long text."""
    assert sample.LENGTH < 40
    sizes = {**pico._LLAMA, "max_position_embeddings": 400, "sliding_window": None}
    assert "" in pair(hf.Phi3ForCausalLM, sizes, rope(2.0, 40), rope(3.0, 40))


def test_first_positions_that_are_too_many_are_made_few(tmp_path: Path) -> None:
    sizes = {**pico._LLAMA, "max_position_embeddings": 4000, "sliding_window": None}
    models = [built(hf.Phi3ForCausalLM, sizes, **rope(factor, 400)) for factor in (2.0, 3.0)]
    one, other = (pico.load(pico.save(model, tmp_path / str(i))) for i, model in enumerate(models))
    assert "original_max_position_embeddings" in one.shortened
    assert seen_by(one.model, other.model)


# ----------------------------------------------------------------- tables


def with_row(model: PreTrainedModel, table: str, row: int) -> PreTrainedModel:
    """The model with another row in a table."""

    def hook(_: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
        return out + (given[0] == row)[..., None] * torch.arange(out.shape[-1])  # a norm would remove a constant

    model.get_submodule(table).register_forward_hook(hook)
    return model


MANY = {**pico._BERT, "vocab_size": 5000, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("table", "row", "where"),
    [
        ("position_embeddings", 511, {"at the last positions"}),
        ("position_embeddings", 511 - sample.TAIL, set()),
        ("token_type_embeddings", 1, {""}),
        ("word_embeddings", 4998, {""}),
        ("word_embeddings", 4997, {""}),
        ("word_embeddings", 4999, {""}),
        ("word_embeddings", 4990, set()),
    ],
)
def test_rows_of_tables(table: str, row: int, where: set[str]) -> None:
    """Last positions, types and special tokens are used; other rows are for the algebra."""
    special = {"bos_token_id": 4997, "eos_token_id": 4998, "sep_token_id": 4999, "pad_token_id": 0}
    one, other = (built(hf.BertForMaskedLM, {**MANY, **special}) for _ in range(2))
    assert seen_by(one, with_row(other, f"bert.embeddings.{table}", row)) == where


def test_a_text_that_can_end_in_two_ways() -> None:
    config = built(hf.LlamaForCausalLM, {**pico._LLAMA, "vocab_size": 900, "eos_token_id": [870, 871]}).config
    assert {870, 871} <= sample._special_tokens(config)


# ----------------------------------------------------------------- padding, cache


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(side: str) -> None:
    """A model that reads the padding of one side as text."""

    def ignore(_: Any, args: Any, given: dict[str, Any]) -> Any:
        mask = given.get("attention_mask")
        if mask is None:
            return args, given
        half = mask.shape[1] // 2
        here = slice(None, half) if side == "left" else slice(half, None)
        mask = mask.clone()
        mask[:, here] = 1
        return args, {**given, "attention_mask": mask}

    one, other = (built(hf.BertForMaskedLM, pico._BERT) for _ in range(2))
    other.register_forward_pre_hook(ignore, with_kwargs=True)
    assert seen_by(one, other) == {""}


def test_the_cache() -> None:
    """A rotation that is one short as soon as there is a past."""

    def late(_: Any, args: Any, given: dict[str, Any]) -> Any:
        where = given["position_ids"]
        return args, ({**given, "position_ids": where - 1} if where.shape[1] == 1 else given)

    one, other = (built(hf.LlamaForCausalLM, pico._LLAMA) for _ in range(2))
    other.model.rotary_emb.register_forward_pre_hook(late, with_kwargs=True)
    assert seen_by(one, other) == {"with a cache"}


# ----------------------------------------------------------------- pictures, sound, two texts


def test_a_second_size_of_pictures() -> None:
    """Positions between those that the table has are put in some way or other."""
    one, other = (built(hf.ViTForImageClassification, pico._VIT) for _ in range(2))
    embeddings = other.vit.embeddings
    between = embeddings.interpolate_pos_encoding
    embeddings.interpolate_pos_encoding = lambda *given: between(*given).flip(1)
    assert seen_by(one, other) == {"of another size"}


def test_masked_patches() -> None:
    """What stands for them is read by this class alone, and only where some are masked."""
    model = built(hf.ViTForMaskedImageModeling, {**pico._VIT, "encoder_stride": 4})
    used, before = found(model)
    with torch.no_grad():
        model.vit.embeddings.mask_token.neg_()
    assert largest_difference(before, found(model, used)[1]) > SEEN


def test_pictures_that_are_not_square_and_pictures_that_are_too_large() -> None:
    model = built(hf.ViTForImageClassification, pico._VIT, image_size=[16, 24])
    assert [list(view.inputs["pixel_values"].shape[2:]) for view in sample.views(model)] == [[16, 24], [28, 36]]
    model.config.image_size = [MOST_PIXELS, 2]
    with pytest.raises(CannotVerify, match="too large to compare outputs on"):
        sample.views(model)


def test_large_pictures_are_few() -> None:
    model = built(hf.ViTForImageClassification, pico._VIT)
    for side, rows in ((16, 4), (400, 2), (1024, 1)):
        model.config.image_size = side
        assert {view.inputs["pixel_values"].shape[0] for view in sample.views(model)} == {rows}


def test_an_encoder_s_mask_is_not_taken_for_the_decoder_s() -> None:
    """The two texts differ in length, so a decoder that takes the wrong mask does not run."""
    inputs = sample.views(built(hf.BartForConditionalGeneration, pico._BART))[0].inputs
    assert inputs["decoder_input_ids"].shape[1] != inputs["attention_mask"].shape[1]


def test_classifiers_that_read_the_end_of_a_text() -> None:
    """One end each, as transformers asks for, and not at the end of the padded row."""
    model = built(hf.BartForSequenceClassification, pico._BART)
    ids = sample.views(model)[0].inputs["input_ids"]
    assert (ids == model.config.eos_token_id).sum(1).tolist() == [1] * len(ids)
    assert found(model)[1]


def test_choices_among_texts() -> None:
    inputs = sample.views(built(hf.BertForMultipleChoice, pico._BERT))[0].inputs
    assert {tuple(value.shape[:2]) for value in inputs.values()} == {(sample.SAMPLE // sample.CHOICES, sample.CHOICES)}


def test_an_output_as_wide_as_the_text_is_long_is_not_one_for_every_token(tmp_path: Path) -> None:
    """A projection of 23 entries for each of 4 texts, where texts would have 23 tokens."""
    model = hf.SiglipTextModel(
        hf.SiglipTextConfig(
            hidden_size=24,
            num_attention_heads=2,
            num_hidden_layers=1,
            intermediate_size=20,
            vocab_size=40,
            max_position_embeddings=48,
            projection_size=sample.LENGTH,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    source = pico.save(model, tmp_path / "source")
    assert lemonx.expand(source, tmp_path / "target", ffn=40, set={"projection_size": 34}).verified.proven
