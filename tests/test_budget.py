"""Shapes for a number of parameters: near it, near the source's proportions, lossless, and what their options say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import lemonx
import pico
from commands import BAD_TARGET, Run, assert_refused, runner
from lemonx.checkpoints.safetensors_file import encode_header
from lemonx.errors import BadTarget
from lemonx.planning.summary import human, parameters
from lemonx.workflows.budget import parse_budget
from lemonx_lab.training.recipe import parse_recipe

MODELS = [
    "llama-tied",
    "qwen3",
    "gemma3",
    "mixtral",
    "bert-mlm",
    "t5",
    "whisper",
    "resnet-basic",
    "swin-cls",
    "vit-cls",
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_proposed(name: str, run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    before = parameters(lemonx.plan(source, depth="2x"))[0]
    for budget in (2, 5):
        try:
            found = lemonx.shapes(source, f"{budget}x")
        except BadTarget as refusal:  # sizes of toys have coarse steps: then the nearest shape is named
            options, _, has = refusal.remedy.removeprefix("the nearest is ").partition(", with ")
            said = json.loads(run("plan", source, *shlex.split(options), "--json").out)["parameters"][1]
            assert human(said) == has and abs(said / (budget * before) - 1) > 0.1
            continue
        assert len({shape.options for shape in found}) == len(found)
        for shape in found:
            assert shape.plan.policy.lossless and shape.parameters > before
            assert 0.5 <= shape.proportion <= 2.001
            assert abs(shape.parameters / (budget * before) - 1) <= 0.1
            # The options alone say it all.
            said = run("plan", source, *shlex.split(shape.options), "--json")
            assert json.loads(said.out)["parameters"][1] == shape.parameters, (shape.options, said)


def test_expand_takes_the_first(run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    first = lemonx.shapes(source, "4x")[0]
    done = run("expand", source, "out", "--params", "4x", "--json")
    certificate = json.loads(done.out)
    assert done.code == 0 and certificate["verified"]["proven"], done
    assert certificate["target"]["parameters"] == first.parameters
    shown = run("expand", source, "again", "--params", "4x", "--no-verify").out
    changed = first.plan.target_config
    assert f"width 48 -> {changed['hidden_size']}, depth 2 -> {changed['num_hidden_layers']}" in shown
    table = run("plan", source, "--params", "4x").out
    assert first.options in table.splitlines()[2] and "takes the first" in table
    assert lemonx.plan(source, params=4 * certificate["source"]["parameters"]).target_config == first.plan.target_config


def test_a_size_that_is_given_stays(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    assert {shape.plan.target_config["num_hidden_layers"] for shape in lemonx.shapes(source, "4x", depth=4)} == {4}
    assert {shape.plan.target_config["hidden_size"] for shape in lemonx.shapes(source, "4x", width=72)} == {72}
    with pytest.raises(BadTarget, match="not more than the source's"):
        lemonx.shapes(source, "1x")
    with pytest.raises(BadTarget, match=r"with the sizes given has .* within 10%: the nearest is --width 72 --depth 3"):
        lemonx.shapes(source, "4x", width=72, depth=3)
    with pytest.raises(BadTarget, match=r": try --width 72 or --width 96$"):
        lemonx.shapes(source, "4x", width=73)


STORIES = Path(__file__).parent / "data" / "stories260K"


@pytest.mark.parametrize(
    ("config", "budget", "given", "options"),
    [
        ({}, "1B", {}, "--width 1024 --depth 86"),
        ({}, "1M", {"width": 96}, "--width 96 --depth 9"),
        ({}, "1M", {"width": 64}, "--width 64 --depth 21"),
        ({"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
          "num_hidden_layers": 30, "vocab_size": 49152, "head_dim": 64}, "1.5B", {}, "--width 1536 --depth 57"),
    ],
)  # fmt: skip
def test_budgets_far_away(
    config: dict[str, int], budget: str, given: dict[str, Any], options: str, tmp_path: Path
) -> None:
    """Sizes of stories260K, and of SmolLM2 with headers alone: near the budget, near the proportions."""
    if config:
        values = {**json.loads((STORIES / "config.json").read_text()), **config}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        tensors = [(name, "BF16", tuple(one.shape)) for name, one in model.named_parameters()]
        header = encode_header(tensors)
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + 2 * sum(one.numel() for _, one in model.named_parameters()))
    found = lemonx.shapes(tmp_path if config else STORIES, budget, **given)
    wanted = parse_budget(budget, 0)
    assert options in [shape.options for shape in found], [shape.options for shape in found]
    assert all(abs(shape.parameters / wanted - 1) <= 0.1 for shape in found)
    assert given or all(0.5 <= shape.proportion <= 2 for shape in found)
    assert not given or {shape.plan.target_config["hidden_size"] for shape in found} == {given["width"]}


def test_one_value_for_each_field(run: Run, tmp_path: Path) -> None:
    """--set twice, set= beside fields=, and the same in a file: two values are refused, one value is fine."""
    source, says = pico.save(pico.PICO["llama-tied"](), tmp_path / "source"), "num_hidden_layers two values"
    assert_refused(run("plan", source, "--set", "num_hidden_layers=8", "--depth", 9), BAD_TARGET, says)
    twice = ("--set", "intermediate_size=200", "--set", "intermediate_size=201")
    assert_refused(run("plan", source, *twice), BAD_TARGET, "intermediate_size two values")
    Path("growth.yaml").write_text("depth: 9\nset: {num_hidden_layers: 8}\n")
    assert_refused(run("plan", source, "--from", "growth.yaml"), BAD_TARGET, says)
    with pytest.raises(BadTarget, match="set and fields give num_hidden_layers two values"):
        lemonx.plan(source, set={"num_hidden_layers": 8}, fields={"num_hidden_layers": 9})
    assert run("plan", source, "--set", "num_hidden_layers=9", "--depth", 9).code == 0


def test_dtypes_may_be_short(run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    for short, full in (("fp64", "float64"), ("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        Path("growth.yaml").write_text(f"depth: 9\ndtype: {short}\n")
        for options in (("--depth", 9, "--dtype", short), ("--from", "growth.yaml")):
            said = run("plan", source, *options, "--json").out
            assert said == run("plan", source, "--depth", 9, "--dtype", full, "--json").out
        assert lemonx.plan(source, depth=9, dtype=cast(Any, short)).dtype == full
    recipe = {"task": "causal-lm", "source": "s", "data": {}, "steps": 1, "batch_size": 1, "learning_rate": 1e-3}
    assert parse_recipe({**recipe, "precision": "bf16"}).precision == "bfloat16"


def test_set_has_one_name(run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    grown = {"intermediate_size": 200}
    new, old = lemonx.plan(source, set=grown), lemonx.plan(source, set=grown)
    assert new.target_config == old.target_config and new.target_config["intermediate_size"] == 200
    said = json.loads(run("plan", source, "--set", "intermediate_size=200", "--json").out)
    assert said["config"]["intermediate_size"] == [100, 200]
