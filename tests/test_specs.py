"""Every registered family: its spec is complete and short, its defaults are those of transformers."""

from __future__ import annotations

import ast
import importlib
import json
import math
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from lemonx import architectures, models
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, UnknownArchitecture
from lemonx.planning.request import Target, target_config
from lemonx.specs.config import Config, flat_fields, with_fields
from lemonx.specs.family import Architecture
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Grouped
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import Dropped, Linear

models.register()
FAMILIES = sorted(architectures.families())
LONGEST = 39  # under 40
# Spaces that no row uses. None is left.
UNUSED: dict[str, set[str]] = {}
# Defaults that are None here, for `derived`, where the config class puts the derived number in.
DERIVED = {("llama", "num_key_value_heads"), ("llama", "head_dim"), ("mistral", "head_dim")}
DERIVED |= {
    ("granite", "num_key_value_heads"),
    ("olmo2", "num_key_value_heads"),
    ("vit", "pooler_output_size"),
    ("deit", "pooler_output_size"),
}
DERIVED |= {(name, "num_key_value_heads") for name in ("cohere", "cohere2", "olmo", "olmoe", "phi", "phi3")}
DERIVED |= {("falcon", "num_kv_heads"), ("falcon", "ffn_hidden_size"), ("opt", "word_embed_proj_dim")}
DERIVED |= {("siglip_text_model", "projection_size"), ("t5", "num_decoder_layers"), ("mt5", "num_decoder_layers")}
DERIVED |= {("mamba", "time_step_rank"), ("marian", "decoder_vocab_size")}
# What a config must say for a field to count: only this Falcon has groups of queries.
NEEDED = {
    "num_kv_heads": {"new_decoder_architecture": True, "hidden_size": 64},
    "decoder_vocab_size": {"share_encoder_decoder_embeddings": False},
}
# Variants whose specs have other rows than the default config's.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "resnet": [{"layer_type": "basic"}, {"downsample_in_first_stage": True}],
    "llama": [{"tie_word_embeddings": True}],
    "gpt2": [{"tie_word_embeddings": False}],
    "bert": [{"tie_word_embeddings": False}],
    "pre-ln-bert": [{"tie_word_embeddings": False}],
    "torchvision_resnet": [{"shortcut": "A"}, {"block": "basic"}],
    "falcon": [
        {"new_decoder_architecture": True, "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8},
        {"multi_query": False, "alibi": True, "parallel_attn": False},
    ],
    "opt": [
        {"word_embed_proj_dim": 512},
        {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
        {"do_layer_norm_before": False},
    ],
    "cohere": [{"use_qk_norm": True}],
    "phi": [{"qk_layernorm": True}],
    "stablelm": [{"qk_layernorm": True, "use_parallel_residual": True}],
    "olmo": [{"clip_qkv": 8.0}],
    "electra": [{"embedding_size": 256}],
    "t5": [{"tie_word_embeddings": False}, {"architectures": ["T5EncoderModel"]}, {"architectures": ["T5Model"]}],
    "bart": [{"architectures": ["BartForSequenceClassification"]}, {"tie_word_embeddings": False}],
    "marian": [{"share_encoder_decoder_embeddings": False}, {"architectures": ["MarianModel"]}],
    "whisper": [{"architectures": ["WhisperForAudioClassification"]}, {"architectures": ["WhisperModel"]}],
}
VARIANTS |= {
    "dinov2": [{"use_swiglu_ffn": True}],
    "clip": [{"architectures": ["CLIPForImageClassification"]}],
    "siglip": [{"architectures": ["SiglipForImageClassification"]}],
    "convnext": [{"layer_scale_init_value": 0.0}],
    "beit": [{"layer_scale_init_value": 0.0}],
}


@cache
def default(model_type: str) -> PreTrainedConfig:
    """The config class, built with no arguments."""
    return AutoConfig.for_model(model_type)


def on_disk(model_type: str) -> dict[str, Any]:
    """config.json as save_pretrained writes it for the default config."""
    return json.loads(default(model_type).to_json_string())


def specs(model_type: str) -> Iterator[Spec]:
    family = architectures.families()[model_type]
    for changes in ({}, *VARIANTS.get(model_type, [])):
        yield family.spec({**on_disk(model_type), **changes})


def axes(row: Row) -> set[str]:
    """Every axis that a row mentions, in its signature and in its tensors."""
    sides = [row.reads, row.writes, *(axis.side for tensor in row.tensors().values() for axis in tensor)]
    return {name for side in sides for name in side.axes}


every_family = pytest.mark.parametrize("model_type", FAMILIES)


@every_family
def test_axes_are_known(model_type: str) -> None:
    """An axis is a space, a fixed size, a number or `_`; and no name means two things."""
    for spec in specs(model_type):
        assert not spec.spaces.keys() & spec.fixed.keys()
        for name, row in spec.rows.items():
            for axis in axes(row):
                known = axis in spec.spaces or axis in spec.fixed or axis.isdigit() or axis == "_"
                assert known, f"{name}: {axis}"
                size = spec.axis_size(axis)
                assert size is None or size > 0
            for side in (row.reads, row.writes):
                sizes = [[spec.axis_size(axis) for axis in part] for part in side.parts]
                known = all(None not in part for part in sizes)
                whole = sum(math.prod(filter(None, part)) for part in sizes)
                assert spec.side_size(side) == (whole if known else None)
                assert set(side.by) <= spec.spaces.keys()


@every_family
def test_every_space_is_used(model_type: str) -> None:
    """By some row of some variant: a space that is not would be checked and printed for nothing."""
    spaces, used = set(), set()
    for spec in specs(model_type):
        spaces |= spec.spaces.keys()
        used |= {axis for row in spec.rows.values() for axis in axes(row)}
        assert all(not isinstance(space, Grouped) or space.under in spec.spaces for space in spec.spaces.values())
        assert set(spec.acts) <= spec.spaces.keys()
    assert spaces - used == UNUSED.get(model_type, set())


@every_family
def test_every_stack_writes_its_stream(model_type: str) -> None:
    for spec in specs(model_type):
        assert spec.stacks
        for name, stack in spec.stacks.items():
            inside = [row for key, row in spec.rows.items() if key.startswith(f"{name}.*.")]
            assert inside, name
            writers = [row for row in inside if stack.stream in row.writes.axes]
            assert writers, f"nothing in {name} writes {stack.stream}"
            readers = [row for row in inside if stack.stream in row.reads.axes]
            assert readers, f"nothing in {name} reads {stack.stream}"
            assert stack.size >= 1


@every_family
def test_stars_belong_to_stacks(model_type: str) -> None:
    for spec in specs(model_type):
        starred = [name for name in spec.rows if "*" in name]
        for name in starred:
            assert name.count("*") == 1
            assert any(name.startswith(f"{stack}.*.") for stack in spec.stacks), name


@every_family
def test_tied_rows_name_an_embedding_of_the_same_shape(model_type: str) -> None:
    for spec in specs(model_type):
        for row in spec.rows.values():
            if isinstance(row, Linear) and row.tied:
                other = spec.rows[row.tied]
                assert other.reads == row.writes
                assert spec.side_size(other.writes) == spec.side_size(row.reads)


@every_family
def test_fixed_sizes_are_used_or_guard_a_coupling(model_type: str) -> None:
    """What must not change is an axis of some row, the size of a kernel, or what a model computes something from."""
    used = {axis for spec in specs(model_type) for row in spec.rows.values() for axis in axes(row)}
    fixed = {name for spec in specs(model_type) for name in spec.fixed}
    assert fixed - used <= {"width"}


@every_family
def test_prefix_starts_rows(model_type: str) -> None:
    for spec in specs(model_type):
        assert not spec.prefix or any(name.startswith(spec.prefix) for name in spec.rows)
        assert not spec.prefix or spec.prefix.endswith(".")


@every_family
def test_sizes_are_fields_that_decide(model_type: str) -> None:
    """Every config field behind an option changes the spec: a space, a stack, or a fixed size."""
    family = architectures.families()[model_type]
    for name in {name for names in family.sizes.values() for name in names}:
        assert any(
            decides(family, {**on_disk(model_type), **changes}, name) for changes in ({}, *VARIANTS.get(model_type, []))
        ), name


def decides(family: Architecture, values: Mapping[str, Any], name: str) -> bool:
    value = family.config(values)[name]
    twice = [2 * v for v in value] if isinstance(value, list) else 2 * (value or 12)
    try:
        return sized(family.spec(values)) != sized(family.spec(with_fields(values, {name: twice})))
    except LemonxError:  # a size that another one must follow
        return True


def sized(spec: Spec) -> tuple[Mapping[str, Any], Mapping[str, int], Mapping[str, int]]:
    return (
        {name: (space.size, getattr(space, "chosen", 0)) for name, space in spec.spaces.items()},
        {name: stack.size + stack.stored for name, stack in spec.stacks.items()},
        spec.fixed,
    )


@every_family
def test_what_is_no_size_is_not_set(model_type: str) -> None:
    """A number that a spec reads beside its sizes (pixels of an image, channels) is refused before anything is read."""
    family = architectures.families()[model_type]
    config = family.config(on_disk(model_type))
    family.build(config)
    sizes = {name for names in family.sizes.values() for name in names}
    others = {name for name in config.asked - sizes if isinstance(config[name], int | float)}
    for name in others:
        with pytest.raises(BadTarget, match=rf"^{name!r} cannot grow: set one of .*{family.sizes['width'][0]}"):
            target_config(family, on_disk(model_type), Target(fields={name: 2 * config[name]}))


@every_family
def test_family_is_described(model_type: str) -> None:
    family = architectures.families()[model_type]
    assert family.kind in ("vision", "language")
    assert len(family.title) > 5
    assert "width" in family.sizes
    assert "depth" in family.sizes
    assert architectures.find({"model_type": model_type}) is family


# ----------------------------------------------------------------- defaults


@every_family
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A field that config.json leaves out has the value that transformers gives it."""
    family, config = architectures.families()[model_type], default(model_type)
    for name, value in family.defaults.items():
        theirs = reduce(lambda part, field: getattr(part, field, None), name.split("."), config)
        assert theirs == value or (value is None and (model_type, name) in DERIVED), f"{name}: {theirs}"


@pytest.mark.parametrize(("model_type", "name"), sorted(DERIVED))
def test_derived_defaults(model_type: str, name: str) -> None:
    """Left out of config.json, the field is what transformers would have put there, also with other heads."""
    family = architectures.families()[model_type]
    assert family.defaults[name] is None
    more = NEEDED.get(name, {})
    heads = "encoder_attention_heads" if model_type == "marian" else "num_attention_heads"
    for changes in (more | {heads: 4}, more | {heads: 2}):
        values = json.loads(AutoConfig.for_model(model_type, **changes).to_json_string())
        assert values[name] is not None
        derived = family.spec({key: value for key, value in values.items() if key != name})
        assert sized(derived) == sized(family.spec(values))
        assert sized(derived) != sized(family.spec({**values, name: values[name] * 2}))


@every_family
def test_default_config_on_disk_is_enough(model_type: str) -> None:
    """What save_pretrained writes has every field that the spec asks for; defaults fill the rest."""
    family = architectures.families()[model_type]
    config = family.config(on_disk(model_type))
    spec = family.build(config)
    assert isinstance(spec, Spec)
    for name in config.asked - flat_fields(on_disk(model_type)).keys():
        assert name in family.defaults


@every_family
def test_lists_with_an_entry_a_block_exist(model_type: str) -> None:
    for spec in specs(model_type):
        for stack in spec.stacks.values():
            for name in stack.lists:
                held = on_disk(model_type).get(name)
                assert held is None or len(held) == stack.size


# ----------------------------------------------------------------- short


def functions() -> Iterator[tuple[str, int]]:
    """Every function under architectures/, and how many lines it has."""
    for module in pkgutil.iter_modules(architectures.__path__):
        source = importlib.import_module(f"{architectures.__name__}.{module.name}").__file__
        assert source
        for node in ast.walk(ast.parse(Path(source).read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                yield f"{module.name}.{node.name}", node.end_lineno - node.lineno + 1


@pytest.mark.parametrize(("name", "lines"), list(functions()))
def test_spec_functions_are_short(name: str, lines: int) -> None:
    assert lines <= LONGEST, name


# ----------------------------------------------------------------- the registry and configs


def test_unknown_families() -> None:
    with pytest.raises(UnknownArchitecture, match="did you mean 'llama'"):
        architectures.find({"model_type": "llama4"})
    with pytest.raises(UnknownArchitecture, match="lemonx architectures"):
        architectures.find({"model_type": "zzz"})
    for config in ({}, {"model_type": None}, {"model_type": 3}):
        with pytest.raises(BadCheckpoint, match="model_type"):
            architectures.find(config)


def test_config_remembers_and_fills_in() -> None:
    config = Config({"a": 1, "b": None}, {"b": 2, "c": 3})
    assert (config["a"], config["b"], config["c"]) == (1, None, 3)
    assert config.asked == {"a", "b", "c"}
    assert dict(config) == {"a": 1, "b": None, "c": 3}
    assert len(config) == 3
    with pytest.raises(BadCheckpoint, match="'d'"):
        config["d"]


@pytest.mark.parametrize(
    ("names", "headless"),
    [
        (["LlamaModel"], True),
        (["LlamaForCausalLM"], False),
        (["GPT2LMHeadModel"], False),
        (["GPT2DoubleHeadsModel"], False),
        (["BertModel"], True),
    ],
)
def test_headless(names: list[str], headless: bool) -> None:
    """A bare model's last stream is its output, which a tied decoder would rescale."""
    assert Config({"architectures": names}, {}).headless == headless


def test_is_a() -> None:
    """Which head a class has decides what its last layer reads."""
    tagger = Config({"architectures": ["BertForTokenClassification"]}, {})
    assert tagger.is_a("ForTokenClassification") and tagger.is_a("ForMaskedLM", "Classification")
    assert not tagger.is_a("ForSequenceClassification")
    assert not Config({}, {}).is_a("ForTokenClassification")


def test_unnamed_class_has_a_head() -> None:
    for values in ({}, {"architectures": None}, {"architectures": []}):
        assert not Config(values, {}).headless


def test_dropped_rows_are_optional() -> None:
    for model_type in FAMILIES:
        for spec in specs(model_type):
            assert all(row.optional for row in spec.rows.values() if isinstance(row, Dropped))


def test_spec_sizes() -> None:
    spec = Spec({}, {}, {"layers": Stack(2, "a")}, fixed={"vocab": 7})
    assert spec.axis_size("_") is None
    assert spec.axis_size("3") == 3
    assert spec.axis_size("vocab") == 7
    with pytest.raises(KeyError):
        spec.axis_size("nothing")
    assert isinstance(architectures.families()["gpt2"], Architecture)
