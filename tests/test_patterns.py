"""What transformers makes of a layer's index stays with the layer: windows, types and switches of a deeper model.

Files of older versions leave `layer_types`, `no_rope_layers` and the like out, and the config class derives them. The
sources here do; outputs are compared on a text far longer than any window, with transformers and torch alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import lemonx
import pico
from lemonx import architectures, models
from lemonx.checkpoints import Checkpoint
from lemonx.errors import NotVerified, Refused
from lemonx.models.building import config_fields
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.request import Target
from lemonx.verification.structure import Structure, check_structure

EXACT = 1e-10
LISTS = ("layer_types", "no_rope_layers")
WINDOW, TOKENS = 4, 40
FULL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Source:
    """A class and the sizes of its config; `says`: fields that files of older versions have, and new ones have not."""

    kind: Any
    sizes: dict[str, Any]
    says: dict[str, Any]

    def save(self, folder: Path) -> Path:
        """A checkpoint with all parameters random, whose config.json has none of the lists."""
        config = self.kind.config_class(**self.sizes, **self.says)
        with torch.random.fork_rng(devices=[]):
            model = self.kind(config).double().eval()
        pico.randomise(model, seed=0)
        pico.save(model, folder)
        newer = (*LISTS, "_sliding_window_pattern")
        write(folder, {name: value for name, value in (read(folder) | self.says).items() if name not in newer})
        return folder


FOUR = {**pico._LLAMA, "num_hidden_layers": 4, "sliding_window": WINDOW}
HEADS = {**FOUR, "head_dim": 12}
GEMMA = {**HEADS, "query_pre_attn_scalar": 16}
QWEN = {"use_sliding_window": True, "max_window_layers": 2}
MODERN = {**pico._BERT, "num_hidden_layers": 4, "local_attention": 2 * WINDOW, "cls_token_id": 1, "sep_token_id": 2}
SOURCES = {
    "gemma2": Source(hf.Gemma2ForCausalLM, GEMMA, {}),
    "gemma3_text": Source(hf.Gemma3ForCausalLM, GEMMA, {"sliding_window_pattern": 2}),
    "gemma3_text-six": Source(hf.Gemma3ForCausalLM, {**GEMMA, "num_hidden_layers": 6}, {}),
    "qwen2": Source(hf.Qwen2ForCausalLM, FOUR, QWEN),
    "qwen3": Source(hf.Qwen3ForCausalLM, HEADS, QWEN),
    "gpt_oss": Source(hf.GptOssForCausalLM, {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "cohere2": Source(hf.Cohere2ForCausalLM, FOUR, {}),
    "cohere2-two": Source(hf.Cohere2ForCausalLM, FOUR, {"sliding_window_pattern": 2}),
    "smollm3": Source(hf.SmolLM3ForCausalLM, FOUR, {"no_rope_layer_interval": 2}),
    "smollm3-windows": Source(hf.SmolLM3ForCausalLM, FOUR, {"no_rope_layer_interval": 3, "use_sliding_window": True}),
    "modernbert": Source(hf.ModernBertForMaskedLM, MODERN, {"global_attn_every_n_layers": 2}),
    "modernbert-three": Source(hf.ModernBertForMaskedLM, {**MODERN, "num_hidden_layers": 5}, {}),
}


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def logits(kind: Any, folder: Path) -> torch.Tensor:
    """In float64, from disk; added layers add nothing, so even norms that compute in float32 agree to the bit."""
    model, info = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    ids = torch.randint(3, model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def difference(kind: Any, source: Path, target: Path) -> float:
    before, after = logits(kind, source), logits(kind, target)
    return float((before - after).abs().max() / before.abs().max())


@pytest.mark.parametrize("name", SOURCES)
def test_a_deeper_model_keeps_the_layers_that_its_file_leaves_out(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    folder, layers = source.save(tmp_path / "source"), source.sizes["num_hidden_layers"]
    assert not any(field in read(folder) for field in LISTS)
    for depth in (layers + 2, 2 * layers):
        target = lemonx.expand(folder, tmp_path / str(depth), depth=depth, verify=False).path
        assert difference(source.kind, folder, target) <= EXACT
        written = [field for field in LISTS if field in read(target)]
        assert written and all(len(read(target)[field]) == depth for field in written)
    # Without them the target is another model, so that this text and these weights show it.
    write(target, {field: value for field, value in read(target).items() if field not in LISTS} | source.says)
    assert difference(source.kind, folder, target) > 1e-3


@pytest.mark.parametrize("name", ["gemma2", "cohere2-two", "smollm3"])
def test_verification_names_the_list_that_is_wrong(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    folder = source.save(tmp_path / "source")
    target = lemonx.expand(folder, tmp_path / "target", depth=8, verify=False).path
    with Checkpoint.open(folder) as small:
        plan = make_plan(small, Target(depth=8), as_read=config_fields)
    assert check(plan, folder, target).passed
    good = read(target)
    for bad in ({}, {field: good[field][::-1] for field in LISTS if field in good}):
        write(target, {field: value for field, value in good.items() if field not in LISTS} | bad)
        assert any(field in fault for field in LISTS for fault in check(plan, folder, target).wrong)


def check(plan: Plan, source: Path, target: Path) -> Structure:
    with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
        return check_structure(plan, small, large)


def test_a_wrong_list_in_the_plan_itself_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Structure compares the models of the two configs, whatever the plan holds to be right."""
    folder = SOURCES["smollm3"].save(tmp_path / "source")
    wrong = {"no_rope_layers": [0, 1, 0, 1], "layer_types": [FULL] * 4}
    monkeypatch.setattr("lemonx.workflows.planning.as_read", lambda config: wrong)
    with pytest.raises(NotVerified, match=r"no_rope_layers .* does not follow the source's .*block by block"):
        lemonx.expand(folder, tmp_path / "target", depth=8)


def test_a_list_that_the_file_has_wins(tmp_path: Path) -> None:
    source = SOURCES["gemma2"]
    folder = source.save(tmp_path / "source")
    write(folder, read(folder) | {"layer_types": [FULL, LOCAL, LOCAL, FULL]})
    target = lemonx.expand(folder, tmp_path / "target", depth=8, verify=False).path
    assert read(target)["layer_types"] == [FULL, FULL, LOCAL, LOCAL, LOCAL, LOCAL, FULL, FULL]
    assert difference(source.kind, folder, target) <= EXACT


@pytest.mark.parametrize(("first", "becomes"), [(0, 0), (1, 2), (3, 6), (4, 8), (28, 28)])
def test_max_window_layers_counts_the_target_s_layers(first: int, becomes: int, tmp_path: Path) -> None:
    """Readers other than transformers have no layer_types: they count."""
    folder = SOURCES["qwen2"].save(tmp_path / "source")
    write(folder, read(folder) | {"max_window_layers": first})
    target = lemonx.expand(folder, tmp_path / "target", depth=8, verify=False).path
    assert read(target)["max_window_layers"] == becomes
    plain = {name: value for name, value in read(target).items() if name != "layer_types"}
    assert hf.Qwen2Config(**plain).layer_types == read(target)["layer_types"]


def test_width_alone_needs_no_lists(tmp_path: Path) -> None:
    source = SOURCES["gemma2"]
    folder = source.save(tmp_path / "source")
    target = lemonx.expand(folder, tmp_path / "target", ffn=150, verify=False).path
    assert "layer_types" not in read(target)
    assert difference(source.kind, folder, target) <= EXACT


def test_a_plan_without_transformers_refuses_what_only_transformers_knows(tmp_path: Path) -> None:
    folder = SOURCES["gemma2"].save(tmp_path / "source")
    with Checkpoint.open(folder) as checkpoint:
        with pytest.raises(Refused, match=r"leaves out layer_types.*add layer_types, with one entry per layer"):
            make_plan(checkpoint, Target(depth=8))
        assert make_plan(checkpoint, Target(ffn=150)).blocks


def test_a_plan_imports_transformers_only_where_it_must(tmp_path: Path) -> None:
    """It takes seconds, and a plan a fraction of one."""
    bare, said = SOURCES["gemma2"].save(tmp_path / "bare"), SOURCES["gemma2"].save(tmp_path / "said")
    write(said, read(said) | {"layer_types": [LOCAL, FULL, LOCAL, FULL]})
    code = (
        "import sys, lemonx; seen = lambda: 'transformers' in sys.modules\n"
        f"lemonx.plan({str(said)!r}, depth=8); lemonx.plan({str(bare)!r}, ffn=200); print(seen())\n"
        f"lemonx.plan({str(bare)!r}, depth=8); print(seen())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_settings_of_single_layers_are_refused(tmp_path: Path) -> None:
    """transformers has them for every family: another window, or other sizes, for layer 1 alone."""
    folder = pico.save(pico.PICO["mistral"](), tmp_path / "source")
    write(folder, read(folder) | {"per_layer_config": {"1": {"sliding_window": 2}}})
    assert hf.AutoConfig.from_pretrained(folder).is_heterogeneous
    for sizes in ({"depth": 3}, {"ffn": 200}):
        with pytest.raises(Refused, match="per_layer_config"):
            lemonx.plan(folder, **sizes)


@pytest.mark.parametrize("sizes", [{"depth": 4}, {"depth": 7}, {"ffn": 250}, {"ffn": 250, "depth": 5}])
def test_scores_that_a_layer_s_number_divides(sizes: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2's layers keep their number, so all that is added stands behind them."""
    more = {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3}
    model = pico._build(hf.GPT2LMHeadModel, hf.GPT2Config, pico._GPT2, **more)
    folder = pico.save(model, tmp_path / "source")
    target = lemonx.expand(folder, tmp_path / "target", **sizes).path
    assert difference(hf.GPT2LMHeadModel, folder, target) <= EXACT


# Depths in config classes, and what a class derives from them besides lists: names of stages and, for a backbone, the
# last of them, which is the last stream of a deeper model too.
DERIVED = {"stage_names", "_out_features", "_out_indices", "out_features", "out_indices", "per_layer_config"}


def plain(config: Any) -> dict[str, Any]:
    """Everything that a config object says, whether transformers saves it or not."""
    names = [name for name in dir(config) if not name.startswith("__") and "dtype" not in name]
    return {name: value for name in names if not callable(value := getattr(config, name, None))}


@pytest.mark.parametrize("model_type", sorted(architectures.families()))
def test_every_list_that_a_config_class_derives_is_in_the_spec(model_type: str) -> None:
    """A class of the next version of transformers that derives another one fails here."""
    models.register()
    family, kind = architectures.families()[model_type], hf.CONFIG_MAPPING[model_type]
    for field in family.sizes["depth"]:
        part, _, last = field.rpartition(".")
        short, long = (plain(_with_depth(kind, part, last, more)) for more in (0, 1))
        changed = {name for name in short if str(short[name]) != str(long[name])}
        stacks = family.spec(kind().to_dict()).stacks.values()
        lists = {name for stack in stacks if stack.implied for name in stack.lists}
        fixed = {name for name in changed if isinstance(getattr(kind, name, None), property)}
        alias = {kind.attribute_map.get(last, last), last, part, "num_decoder_layers"}
        assert changed - DERIVED - alias - fixed == lists


def _with_depth(kind: Any, part: str, last: str, more: int) -> Any:
    fields = kind().to_dict()
    where = fields[part] if part else fields
    old = where[last]
    where[last] = [size + more for size in old] if isinstance(old, list | tuple) else old + more
    derived = ("layer_types", "no_rope_layers", "stage_names", "out_features", "out_indices", "num_decoder_layers")
    return kind.from_dict({name: value for name, value in fields.items() if name not in derived})
