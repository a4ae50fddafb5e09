"""What was asked for -> the target's config: what follows the width, what is refused, what is advised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemonx import architectures
from lemonx.errors import BadTarget, LemonxError
from lemonx.options.declared import Growth, declared
from lemonx.options.former import present
from lemonx.options.sizes import Relative, parse_size
from lemonx.planning.advice import tried
from lemonx.planning.request import Target, asked, target_config
from lemonx.planning.typecheck import check, with_tied
from lemonx.specs import config as specs

Config = Mapping[str, Any]
GPT2: Config = dict(
    model_type="gpt2", n_embd=48, n_head=4, n_layer=2, n_inner=None, vocab_size=61, n_positions=64, bos_token_id=1
)
LLAMA: Config = dict(
    model_type="llama",
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    intermediate_size=100,
    vocab_size=61,
)
MISTRAL: Config = {**LLAMA, "model_type": "mistral", "head_dim": 8}
SWINV2: Config = dict(
    model_type="swinv2", embed_dim=24, depths=[2, 2], num_heads=[2, 4], image_size=32, patch_size=4, window_size=4
)
SMOLLM2: Config = {**LLAMA, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
                   "intermediate_size": 1536, "num_hidden_layers": 30}  # fmt: skip
BERT: Config = dict(
    model_type="bert", hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96, vocab_size=61,
    max_position_embeddings=64, type_vocab_size=2, architectures=["BertForMaskedLM"],
)  # fmt: skip
RESNET: Config = dict(model_type="resnet", embedding_size=8, hidden_sizes=[16, 24], depths=[2, 2])
TORCHVISION: Config = dict(
    model_type="torchvision_resnet", width=8, stage_width=[8, 16], inner_width=[8, 16], layers=[2, 2], block="basic"
)
ALL = {c["model_type"]: c for c in (GPT2, LLAMA, MISTRAL, SWINV2, RESNET, TORCHVISION)}


def grown(config: Config, **wanted: Any) -> dict[str, Any]:
    return target_config(architectures.find(config), config, asked(Growth(**wanted)))


def assert_grown(config: Config, sizes: Config, **wanted: Any) -> None:
    """These fields get these values, and no other field of config.json changes."""
    found = grown(config, **wanted)
    for name, value in sizes.items():
        assert found[name] == value, name
    for name in config.keys() - sizes.keys():
        assert found[name] == config[name], name


def assert_refused(config: Config, *words: str, **wanted: Any) -> str:
    with pytest.raises(BadTarget) as refusal:
        grown(config, **wanted)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def assert_passes_the_check(config: Config, **wanted: Any) -> None:
    family = architectures.find(config)
    source, target = family.spec(config), family.spec(grown(config, **wanted))
    rows = [name for name, row in source.rows.items() if not row.optional]
    check(source, target, with_tied(source, rows), family.config(config))


def advised(config: Config, **wanted: Any) -> str:
    """The advice for sizes that are refused. Each part of it passes the check, typed as it stands."""
    family = architectures.find(config)
    source = family.spec(config)
    rows = [name for name, row in source.rows.items() if not row.optional]

    def checked(target: Target) -> specs.Config:
        new = family.config(target_config(family, config, target))
        check(source, family.spec(new.values_on_disk), with_tied(source, rows), family.config(config))
        family.build(new)
        return new

    family.build(built := family.config(config))
    with pytest.raises(LemonxError):
        checked(asked(Growth(**wanted)))
    advice = tried(family, built, asked(Growth(**wanted)), checked, tie=bool(source.ties))
    assert advice
    for options in advice.removeprefix("try ").split(" or "):
        words = options.split()
        sizes = zip((word[2:].replace("-", "_") for word in words[::2]), words[1::2], strict=True)
        checked(asked(Growth(**dict(sizes))))
    return advice


# ----------------------------------------------------------------- what follows the width


def test_width_takes_heads_and_ffn_along() -> None:
    assert_grown(GPT2, {"n_embd": 72, "n_head": 6, "n_inner": None}, width=72)
    assert_grown({**GPT2, "n_inner": 100}, {"n_embd": 96, "n_head": 8, "n_inner": 200}, width=96)
    sizes = {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 200}
    assert_grown(LLAMA, sizes, width=96)


def test_depth_follows_nothing() -> None:
    assert_grown(GPT2, {"n_layer": 5}, depth=5)
    assert_grown(LLAMA, {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
                         "intermediate_size": 200, "num_hidden_layers": 3}, width=96, depth=3)  # fmt: skip


def test_what_is_given_does_not_follow() -> None:
    assert_grown(
        LLAMA,
        {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 101},
        width=96,
        heads=12,
        ffn=101,
    )
    assert_grown(
        LLAMA,
        {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 111},
        width=96,
        set={"num_key_value_heads": 2, "intermediate_size": 111},
    )


def test_what_is_given_need_not_be_whole_in_proportion() -> None:
    """101 * 5/4 is not whole, but it does not have to follow."""
    config = {**GPT2, "n_inner": 101}
    assert_refused(config, "n_inner", width=60)
    assert_grown(config, {"n_embd": 60, "n_head": 5, "n_inner": 130}, width=60, set={"n_inner": 130})
    assert_grown(config, {"n_embd": 60, "n_head": 5, "n_inner": 131}, width=60, ffn=131)


def test_nothing_follows_without_a_width() -> None:
    assert_grown(LLAMA, {"num_attention_heads": 8}, heads=8)
    assert_grown(LLAMA, {"intermediate_size": 128}, ffn=128)
    assert_grown(LLAMA, {"num_key_value_heads": 4}, kv_heads=4)
    assert_grown(GPT2, {"n_inner": 200}, ffn=200)


def test_a_size_that_follows_by_itself_stays_unsaid() -> None:
    """num_key_value_heads and n_inner may be None: as many as heads, four times the width."""
    assert_grown({**LLAMA, "num_key_value_heads": None}, {"hidden_size": 96, "num_attention_heads": 8,
                 "num_key_value_heads": None, "intermediate_size": 200}, width=96)  # fmt: skip


def test_derived_head_dim_is_written_down() -> None:
    """hidden_size / heads is a head's size until one of them grows alone; then config.json must say it."""
    assert grown(LLAMA, width=96, heads=4)["head_dim"] == 12
    assert grown(MISTRAL, width=96, heads=4)["head_dim"] == 8


@pytest.mark.parametrize(("factor", "heads"), [("2", 8), ("3/2", 6), ("5/4", 5), ("1", 4)])
def test_width_factor(factor: str, heads: int) -> None:
    ratio = Fraction(factor)
    sizes = {"n_embd": 48 * ratio, "n_head": heads, "n_inner": 100 * ratio}
    assert_grown({**GPT2, "n_inner": 100}, sizes, width=f"{ratio}x")


def test_width_factor_scales_lists() -> None:
    assert_grown(RESNET, {"embedding_size": 12, "hidden_sizes": [24, 36]}, width="3/2x")
    assert_grown(SWINV2, {"embed_dim": 36, "num_heads": [3, 6]}, width="3/2x")
    twice = {"width": 16, "stage_width": [16, 32], "inner_width": [16, 32]}
    assert_grown(TORCHVISION, twice, width="2x")
    assert_grown(RESNET, {"embedding_size": 16, "hidden_sizes": [40, 48]}, width="2x",
                 set={"hidden_sizes": [40, 48]})  # fmt: skip


def test_what_the_spec_adds_is_written() -> None:
    assert grown(SWINV2, width=48)["hidden_size"] == 96


def test_what_is_equal_stays_equal() -> None:
    """Embeddings as wide as the stream follow it, unless they are given; others stay as they are."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2}
    electra = {"model_type": "electra", "vocab_size": 61, "max_position_embeddings": 64, **sizes}
    assert grown({**electra, "embedding_size": 48}, width=96)["embedding_size"] == 96
    assert grown({**electra, "embedding_size": 48}, depth=3)["embedding_size"] == 48
    assert grown({**electra, "embedding_size": 48}, set={"embedding_size": 60})["embedding_size"] == 60
    assert grown({**electra, "embedding_size": 24}, width=96)["embedding_size"] == 24


def test_source_is_left_alone() -> None:
    before = {**RESNET, "hidden_sizes": list(RESNET["hidden_sizes"])}
    grown(RESNET, width="2x")
    assert before == RESNET


# ----------------------------------------------------------------- what cannot be, and what could


def test_two_ways_to_say_the_width() -> None:
    with pytest.raises(BadTarget, match="width and width_factor both set the width"):
        present({"width": 96, "width_factor": 2}, declared(Growth))


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (LLAMA, {"depth": 9}, {"num_hidden_layers": 8}),
        (LLAMA, {"depth": "+4"}, {"num_hidden_layers": 8}),
        (LLAMA, {"width": 96}, {"hidden_size": 72}),
        (LLAMA, {"width": "2x"}, {"hidden_size": 72}),
        (LLAMA, {"ffn": 200}, {"intermediate_size": 201}),
        (SWINV2, {"depth": "2x"}, {"depths": [4, 5]}),
        (GPT2, {"set": {"n_head": 8}}, {"num_attention_heads": 9}),
    ],
)
def test_two_values_for_one_field(config: Config, first: Config, second: Config) -> None:
    """An option and --set, or --set under two names of a field: both are named, and the field; one value is fine."""
    (field,) = second
    fields = {**first.get("set", {}), **second}
    said = assert_refused(config, f"--set {field}=", "two values: give one of them", **{**first, "set": fields})
    assert len(re.findall("--", said)) == 2
    agreed = grown(config, **first)[architectures.find(config).aliases.get(field, field)]
    assert grown(config, **{**first, "set": {**fields, field: agreed}}) == grown(config, **first)


@settings(deadline=None, max_examples=60)
@given(width=st.integers(49, 200), n_inner=st.integers(1, 300), heads=st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_advised_widths_work(width: int, n_inner: int, heads: int) -> None:
    """Where a follower is not whole, the advised widths pass the check, and no width between them does."""
    config = {**GPT2, "n_inner": n_inner, "n_head": heads}
    if (heads * width) % 48 == 0 and (n_inner * width) % 48 == 0:
        assert grown(config, width=width)["n_inner"] * 48 == n_inner * width
        return
    assert_refused(config, "is not a whole number", "--set", width=width)
    options = advised(config, width=width)
    sizes = [int(n) for n in re.findall(r"--width (\d+)(?: or|$)", options)]
    assert sizes
    for size in sizes:
        assert size > 48
        assert_passes_the_check(config, width=size)
    below, above = ([n for n in sizes if n < width] or [0])[-1], max(sizes)
    assert above > width
    # Nothing nearer would have done.
    between = [w for w in range(max(below, 48) + 1, above) if w != width]
    assert all((heads * w) % 48 or (n_inner * w) % 48 for w in between)


@pytest.mark.parametrize("config", [RESNET, TORCHVISION], ids=lambda config: config["model_type"])
def test_advised_factors_work(config: Config) -> None:
    """Several sizes are the width here: no --width could be given, so a factor is advised."""
    message = assert_refused(config, "is not a whole number", "--set", width="10/7x")
    assert "widths that work" not in message
    step = re.search(r"1/(\d+)", message)
    assert step
    for times in (1, 3, 5):
        assert_passes_the_check(config, width=f"{1 + times * Fraction(1, int(step[1]))}x")


def test_factor_that_is_not_whole_for_a_list() -> None:
    assert_refused(SWINV2, "num_heads", "is not a whole number", width="5/4x")
    assert advised(SWINV2, width="5/4x") == "try --width 48"


@pytest.mark.parametrize(
    ("config", "wanted", "options"),
    [
        # Heads, then key-value heads, then the inner size.
        (SMOLLM2, {"width": 864}, "try --width 768 or --width 960 or --width 864 --heads 12 --kv-heads 4"),
        ({**SMOLLM2, "intermediate_size": 1535}, {"width": 768}, "try --width 1152 or --width 768 --ffn 2047"),
        (LLAMA, {"kv_heads": 3}, "try --heads 6 --kv-heads 3 or --kv-heads 4"),
        (LLAMA, {"heads": 5}, "try --heads 6"),
        # Post-LN at a width that is no multiple: either that width is, or the MLP makes room for it.
        (BERT, {"width": 72}, "try --width 96 or --width 72 --ffn 192"),
        (BERT, {"width": 72, "depth": 3}, "try --width 96 --depth 3 or --width 72 --depth 3 --ffn 192"),
    ],
)
def test_the_first_advice_is_all_that_is_needed(config: Config, wanted: dict[str, int], options: str) -> None:
    assert advised(config, **wanted) == options


@pytest.mark.parametrize("width", [0, -3, 1, 20, 47])
def test_width_cannot_shrink(width: int) -> None:
    message = assert_refused(GPT2, str(width), width=width)
    assert "lemonx only grows models" in message or "at least 1" in message


@pytest.mark.parametrize("option", ["depth", "heads", "kv_heads", "ffn"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(option: str, value: int) -> None:
    assert_refused(LLAMA, f"--{option.replace('_', '-')}", "at least 1", str(value), **{option: value})


def test_options_that_a_family_has_not() -> None:
    assert_refused(GPT2, "gpt2", "--kv-heads", kv_heads=4)
    assert_refused(SWINV2, "swinv2", "--ffn", ffn=100)


def test_options_with_several_sizes_behind_them() -> None:
    message = assert_refused(RESNET, "--width 2x", "--set embedding_size=16", "--set hidden_sizes=[32,48]", width=16)
    assert " [" not in message.partition("give")[2]  # can be pasted into a shell
    assert_refused(RESNET, "--depth 2x", "--set depths=[2,2]", depth=3)
    assert_refused(SWINV2, "--heads 2x", "--set num_heads=[2,4]", heads=4)


T5: Config = dict(
    model_type="t5", d_model=48, num_layers=2, num_decoder_layers=3, num_heads=4, d_kv=12, d_ff=96, vocab_size=61
)


def test_sizes_in_terms_of_the_source() -> None:
    assert_grown(LLAMA, {"num_hidden_layers": 6}, depth="+4")
    assert_grown(LLAMA, {"intermediate_size": 150}, ffn="3/2x")
    assert_grown(LLAMA, grown(LLAMA, width=96), width="+48")
    assert_grown(RESNET, {"depths": [4, 4]}, depth="2x")
    assert_grown(T5, {"num_layers": 4, "num_decoder_layers": 5}, depth="+2")
    assert_grown(T5, {"num_layers": 8, "num_decoder_layers": 8}, depth=8)
    assert_refused(LLAMA, "num_hidden_layers = 2 times 5/4 is not a whole number", "--depth 2", depth="5/4x")
    assert_refused(RESNET, "--depth 2x", "--set depths=[2,2]", depth="+1")
    assert_refused(GPT2, "config.json gives no n_inner", "--ffn 4096", ffn="2x")
    assert_refused(LLAMA, "at most", depth="+1000000000")


@given(st.integers(1, 10**6), st.integers(1, 40), st.integers(1, 40))
def test_sizes_as_they_are_typed(number: int, above: int, below: int) -> None:
    assert parse_size("--depth", str(number)) == number == parse_size("--depth", number)
    assert parse_size("--depth", f"+{number}") == Relative(plus=number)
    if above >= below:
        assert parse_size("--depth", f"{above}/{below}x") == Relative(Fraction(above, below))


@pytest.mark.parametrize("text", ["", "x", "1.5", "-1x", "2X2", "1e3x", "nanx", "1/0x", "+", "+1.5", "0.5x", True, 1.5])
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(BadTarget, match=r"want a number, a ratio|at least 1x"):
        parse_size("--depth", text)


# ----------------------------------------------------------------- --set


def test_set() -> None:
    assert_grown(RESNET, {"depths": [3, 2]}, set={"depths": [3, 2]})
    assert_grown(GPT2, {"n_inner": 193}, set={"n_inner": 193})
    assert_grown(GPT2, {"n_embd": 96, "n_head": 8, "n_inner": 500}, width=96, set={"n_inner": 500})


@pytest.mark.parametrize(
    "name", ["n_embed", "bos_token_id", "layer_norm_epsilon", "tie_word_embeddings", "model_type", ""]
)
def test_set_takes_sizes_only(name: str) -> None:
    message = assert_refused(GPT2, repr(name), "n_embd", set={name: 3})
    for other in ("n_head", "n_inner", "n_layer"):
        assert other in message


@pytest.mark.parametrize("value", [0, -4, 1.5, 64.0, "64", True, [64, 64], [], {}, None])
def test_set_wants_a_whole_number(value: Any) -> None:
    assert_refused(LLAMA, "hidden_size", "whole number", set={"hidden_size": value})


@pytest.mark.parametrize("value", [32, [16], [16, 24, 32], [16, 0], [16, 24.0], [16, None], [[16], [24]], [], None])
def test_set_wants_a_list_of_the_same_length(value: Any) -> None:
    assert_refused(RESNET, "hidden_sizes", set={"hidden_sizes": value})


def test_set_may_leave_open_what_is_open() -> None:
    """n_inner is None in the source: it follows the width, and may say so."""
    assert_grown(GPT2, {"n_inner": None}, set={"n_inner": None})


# ----------------------------------------------------------------- --like


@pytest.mark.parametrize("name", ALL)
def test_like_itself_is_the_same(name: str) -> None:
    assert_grown(ALL[name], {}, like=ALL[name])


def test_like_takes_the_sizes_and_nothing_else() -> None:
    like = {**GPT2, "n_embd": 96, "n_head": 8, "n_layer": 3, "n_inner": 400, "bos_token_id": 7, "vocab_size": 99}
    assert_grown(GPT2, {"n_embd": 96, "n_head": 8, "n_layer": 3, "n_inner": 400, "vocab_size": 99}, like=like)
    assert_grown(RESNET, {"depths": [3, 4]}, like={**RESNET, "depths": [3, 4]})


def test_like_is_overruled_by_what_is_given() -> None:
    like = {**GPT2, "n_embd": 96, "n_head": 8, "n_layer": 3}
    assert_grown(GPT2, {"n_embd": 96, "n_head": 8, "n_layer": 4}, like=like, depth=4)


def test_like_must_be_of_the_family() -> None:
    assert_refused(GPT2, "--like", "llama", "gpt2", like=LLAMA)
    assert_refused(GPT2, "--like", like={})


def test_like_takes_the_width_of_heads_and_the_vocabulary() -> None:
    """Taking the number of heads and leaving their width would not be like it."""
    like = {**LLAMA, "head_dim": 2 * grown(LLAMA, depth=9)["head_dim"], "vocab_size": 2 * LLAMA["vocab_size"]}
    assert grown(LLAMA, like=like)["head_dim"] == like["head_dim"]
    assert grown(LLAMA, like=like)["vocab_size"] == like["vocab_size"]


@pytest.mark.parametrize("config", [RESNET, SWINV2], ids=lambda config: config["model_type"])
def test_like_with_other_stages_is_refused(config: Config) -> None:
    """Three stages are not a larger two: what would fill the third?"""
    like = {**config}
    for name in config:
        if isinstance(config[name], list):
            like[name] = [*config[name], config[name][-1]]
    for source, target in ((config, like), (like, config)):
        with pytest.raises(LemonxError):
            assert_passes_the_check(source, like=target)
