"""Second names of config fields: read as transformers reads them, and kept; two that disagree are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import lemonx
import pico
from lemonx import architectures, models
from lemonx.errors import BadCheckpoint
from lemonx.planning.request import Target, target_config
from lemonx.specs.config import Config

models.register()
FAMILIES = architectures.families()
# Second names that a config class reads in its code, beside its attribute_map.
IN_CODE = {("bloom", "n_embed")}
DECLARED = [(name, second, first) for name in FAMILIES for second, first in FAMILIES[name].aliases.items()]


def sizes(model_type: str) -> set[str]:
    return {name for names in FAMILIES[model_type].sizes.values() for name in names}


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_second_name_of_a_size_is_known(model_type: str) -> None:
    theirs = {
        second: first
        for second, first in type(AutoConfig.for_model(model_type)).attribute_map.items()
        if first in sizes(model_type)
    }
    ours = FAMILIES[model_type].aliases
    assert theirs.items() <= ours.items()
    assert {(model_type, second) for second in ours.keys() - theirs.keys()} <= IN_CODE


@pytest.mark.parametrize(("model_type", "second", "first"), DECLARED)
def test_transformers_reads_a_second_name(model_type: str, second: str, first: str) -> None:
    """Where both are there and disagree, one wins: in most classes the second, in some the first."""
    config = AutoConfig.for_model(model_type)
    value = getattr(config, first)
    other = [2 * n for n in value] if isinstance(value, list) else 2 * value
    assert getattr(type(config).from_dict({second: other}), first) == other
    assert getattr(type(config).from_dict({first: value, second: other}), first) in (value, other)


# ----------------------------------------------------------------- a file that has them

CASES: dict[str, dict[str, Any]] = {
    "gpt2-lm": {"width": 72, "depth": 3, "set": {"n_positions": 80}},
    "gptj": {"width": 96, "depth": 3},
    "bloom": {"width": 96, "depth": 3},
    "distilbert-base": {"width": 96, "depth": 3},
    "t5": {"width": 72, "set": {"num_layers": 3, "d_kv": 16}},
    "whisper": {"width": 96, "set": {"encoder_layers": 3}},
    "qwen3-moe": {"width": 72, "set": {"num_local_experts": 8, "num_experts_per_tok": 4}},
    "olmoe": {"width": 72, "set": {"num_experts": 8, "num_experts_per_tok": 4}},
    "swinv2-cls": {"width": 48},
}


@pytest.fixture
def renamed(tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, str]]]:
    """A checkpoint whose config.json has second names only, and what they are names of."""

    def make(name: str) -> tuple[Path, dict[str, str]]:
        folder = pico.save(pico.PICO[name](), tmp_path / "source")
        values = json.loads((folder / "config.json").read_text())
        first = {a: b for a, b in FAMILIES[values["model_type"]].aliases.items() if a != "num_key_value_heads"}
        # As saved, a file has one name of each: the second of one class may be the first of another.
        values |= {second: values.pop(native) for second, native in first.items() if native in values}
        (folder / "config.json").write_text(json.dumps(values))
        return folder, {second: native for second, native in first.items() if second in values}

    return make


@pytest.mark.parametrize("name", CASES)
def test_second_names_alone_are_enough(name: str, renamed: Any, tmp_path: Path) -> None:
    folder, names = renamed(name)
    before = json.loads((folder / "config.json").read_text())
    large = lemonx.expand(folder, tmp_path / "large", **CASES[name]).path  # verified
    written = json.loads((large / "config.json").read_text())
    assert names.keys() <= written.keys() and written.keys().isdisjoint(names.values())
    assert any(written[second] != before[second] for second in names)
    loaded = AutoConfig.from_pretrained(large)
    assert all(getattr(loaded, first) == written[second] for second, first in names.items())


def test_a_size_can_be_set_by_its_second_name(renamed: Any) -> None:
    folder, _ = renamed("gpt2-lm")
    made = lemonx.plan(folder, set={"hidden_size": 96, "num_attention_heads": 8, "num_hidden_layers": 4})
    assert made.target_spec.spaces["residual"].size == 96
    assert {made.target_config[name] for name in ("hidden_size", "num_hidden_layers")} == {96, 4}


def test_both_names_are_written_where_both_were() -> None:
    family = FAMILIES["bloom"]
    values = {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "vocab_size": 61, "n_head": 4}
    both = values | {"num_attention_heads": 4}
    new = target_config(family, both, Target(width=96))
    assert (new["n_head"], new["num_attention_heads"], new["hidden_size"]) == (8, 8, 96)
    assert "n_embed" not in new and "num_hidden_layers" not in new
    like = target_config(family, values, Target(like={**new, "n_embed": 96}))
    assert like == values | {"hidden_size": 96, "n_head": 8}


def test_two_names_that_disagree_are_refused() -> None:
    """Tensors would not show which is right: any number of heads fits them."""
    values = {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "vocab_size": 61, "n_head": 4}
    with pytest.raises(BadCheckpoint, match=r"^'config.json' says n_head = 4 and num_attention_heads = 8, .*: remove"):
        FAMILIES["bloom"].spec({**values, "num_attention_heads": 8})


def test_config_reads_either_name() -> None:
    assert Config({"second": 3}, {"first": 2}, {"second": "first"})["first"] == 3
    assert Config({"first": 4}, {"first": 2}, {"second": "first"})["first"] == 4
    assert Config({}, {"first": 2}, {"second": "first"})["first"] == 2
    assert Config({"first": None}, {"first": 2}, {"second": "first"})["first"] is None
