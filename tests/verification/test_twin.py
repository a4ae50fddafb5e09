"""A target whose roundings its model amplifies is certified by a twin that is not rounded; a wrong wire never is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version

import lemonx
import pico
from commands import assert_shown, runner
from lemonx import api
from lemonx.algebra.recipes import Vector
from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.errors import BadOutput, CannotVerify
from lemonx.execution.runner import run_plan
from lemonx.planning.exactness import ROUNDED
from lemonx.planning.plan import Plan
from lemonx.verification import outputs
from lemonx.verification.comparison import FAR, Comparison
from lemonx.verification.outputs import compare
from lemonx.verification.rounding import EXACT_TOLERANCE, WIRING, Rounding
from lemonx.verification.verify import measure

_TEXTS: dict[str, Any] = dict(vocab_size=61, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
_EXPERTS: dict[str, Any] = dict(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    intermediate_size=48,
    num_local_experts=4,
    num_experts_per_tok=2,
)
_WIDER: dict[str, Any] = dict(width=56, heads=4, kv_heads=2, ffn=96)


def t5() -> hf.PreTrainedModel:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=6,
            d_kv=8,
            d_ff=37,
            num_heads=1,
            num_layers=4,
            num_decoder_layers=1,
            vocab_size=51,
            relative_attention_num_buckets=8,
            feed_forward_proj="gated-gelu",
            pad_token_id=3,
            eos_token_id=5,
        )
    )


def gpt_oss() -> hf.PreTrainedModel:
    return hf.GptOssForCausalLM(hf.GptOssConfig(**_TEXTS, **_EXPERTS, head_dim=8, sliding_window=4))


def mixtral() -> hf.PreTrainedModel:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_TEXTS, **_EXPERTS))


def saved(make: Callable[[], hf.PreTrainedModel], seed: int, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    model = make()
    with torch.no_grad():
        pico.randomise(model, seed)
    return pico.save(model, folder, dtype)


# Models of which one rounding moves the outputs by more than any tolerance; each was refused before there was a twin.
AMPLIFYING: list[tuple[Callable[[], hf.PreTrainedModel], int, dict[str, Any]]] = [
    *((t5, seed, dict(width=10, heads=1, ffn=74)) for seed in (0, 14, 24)),
    *((gpt_oss, seed, _WIDER) for seed in (0, 3, 4)),
    *((mixtral, seed, _WIDER) for seed in (0, 10)),
]


@pytest.mark.parametrize(("make", "seed", "sizes"), AMPLIFYING, ids=lambda value: getattr(value, "__name__", None))
def test_amplified_roundings_are_told_from_a_wrong_wire(
    make: Callable[[], hf.PreTrainedModel], seed: int, sizes: dict[str, Any], tmp_path: Path
) -> None:
    source = saved(make, seed, tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", **sizes)
    found = target.verified.outputs
    assert found and found.twin and target.verified.proven
    # The figure of the stored model is there, and beyond what was expected of it.
    assert found.difference > found.tolerance > 100 * EXACT_TOLERANCE and found.amplified
    assert found.twin.difference < 1e-12 and found.twin.tolerance == EXACT_TOLERANCE
    written = json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]
    assert written["difference"] == found.difference and written["twin"]["difference"] == found.twin.difference
    assert written["passed"] and written["twin"]["passed"]
    assert "which this model amplifies" in (target / "README.md").read_text()


@pytest.mark.parametrize(("make", "seed", "sizes"), AMPLIFYING[:5], ids=lambda value: getattr(value, "__name__", None))
def test_block_by_block_no_less(
    make: Callable[[], hf.PreTrainedModel], seed: int, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """There the streams of the twin are compared with the source's, too."""
    source = saved(make, seed, tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", verify=False, **sizes)
    found = lemonx.verify(source, target, layerwise=True)
    assert found.proven and found.outputs and found.outputs.amplified and found.layers
    assert found.outputs.twin and found.outputs.twin.difference < 1e-12
    assert found.layers.places and all(place.difference < 1e-12 for place in found.layers.places)


def test_the_command_says_which_comparison_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capfd, tmp_path)
    lemonx.expand(saved(mixtral, 0, tmp_path / "source"), tmp_path / "target", verify=False, **_WIDER)
    result = run("verify", "source", "target")
    assert_shown(result.out)
    assert result.code == 0 and "the same function, up to the rounding of the stored weights" in result.out
    assert "made again in float64, nothing is" in result.out and "which this model amplifies" in result.out
    told = json.loads(run("verify", "source", "target", "--json").out)["outputs"]
    assert (
        told["difference"] > told["tolerance"]
        and told["twin"]["difference"] < EXACT_TOLERANCE == told["twin"]["tolerance"]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2-lm", "bert-cls", "gpt-oss", "t5", "vit-cls", "dinov2-cls"])
def test_every_rounded_target_has_a_twin(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The tensors that are not rounded are the stored ones: damage to any of them is seen to 1e-10 by outputs alone."""
    source = pico.save(pico.PICO[name](), tmp_path / "source", dtype)
    sizes: dict[str, Any] = {"width": 72, "depth": 3} if name in ("llama-tied", "gpt2-lm", "gpt-oss") else {"width": 72}
    target = lemonx.expand(source, tmp_path / "target", **sizes)
    found, plan = target.verified.outputs, target.plan
    assert plan.is_rounded and found and found.twin and found.twin.tensors == len(outputs.remade(plan))
    assert {step.name for step in plan.steps if step.exactness == ROUNDED} <= outputs.remade(plan)
    assert found.twin.difference <= found.twin.tolerance < 1e-3 * found.tolerance and not found.amplified


def test_a_target_that_is_exact_has_none(tmp_path: Path) -> None:
    source = saved(mixtral, 0, tmp_path / "source")
    several: list[dict[str, Any]] = [{"ffn": 96}, {"width": 56, "heads": 4, "kv_heads": 2, "dtype": "float64"}]
    for sizes in several:
        found = lemonx.expand(source, tmp_path / str(len(sizes)), **sizes).verified.outputs
        assert found and found.twin is None and found.difference <= found.tolerance == EXACT_TOLERANCE


# ----------------------------------------------------------------- wires that are wrong


def written(plan: Plan, source: Path, folder: Path, **fields: Any) -> Path:
    """What a plan makes of a source, with other fields in config.json."""
    with Checkpoint.open(source) as checkpoint:
        entries = [(step.name, step.dtype, step.shape) for step in plan.steps]
        with CheckpointWriter(folder, entries, max_shard_size=10**9) as writer:
            run_plan(plan, checkpoint, writer)
            writer.add_text("config.json", json.dumps({**plan.target_config, **fields}))
            for name in checkpoint.companions:
                with checkpoint.open_companion(name) as file:
                    writer.add_file(file, name)
    return folder


def outputs_of(plan: Plan, source: Path, target: Path) -> Comparison:
    """The outputs alone, as if tensors and structure had passed."""
    rounding = Rounding(cap=WIRING)
    with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
        return compare(small, large, plan, rounding=rounding, twin=True)[0]


# Older releases compute without these fields, so a wrong one changes nothing.
_READ = pytest.mark.skipif(Version(version("transformers")) < Version("5.20"), reason="not read by this transformers")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-tied", {"rms_norm_eps": 1.02e-5}),
        ("llama-tied", {"rope_theta": 10010.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10010.0}}),
        pytest.param("gemma2", {"attn_logit_softcapping": 50.1}, marks=_READ),
        ("granite", {"logits_scaling": 5.001}),
        pytest.param("gpt-oss", {"swiglu_limit": 6.9}, marks=_READ),
    ],
)
def test_a_wrong_field_hides_in_the_tolerance_and_not_from_the_twin(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source", torch.bfloat16)
    plan = lemonx.plan(source, width=72)
    assert all(plan.target_config.get(key) != value for key, value in fields.items())
    right = outputs_of(plan, source, written(plan, source, tmp_path / "right"))
    assert right.passed and right.twin and right.twin.difference < 1e-12
    wrong = outputs_of(plan, source, written(plan, source, tmp_path / "wrong", **fields))
    assert wrong.difference <= wrong.tolerance and wrong.twin and not wrong.twin.passed and not wrong.passed
    assert "wired otherwise than its source: even with every rounded tensor" in wrong.reason()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wrong_rule_that_the_tensors_obey(dtype: torch.dtype, tmp_path: Path) -> None:
    """A table that is wrong of a norm by 0.1 %: target and algebra follow it alike, and rounding is larger."""
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source", dtype)
    plan = lemonx.plan(source, width=72)
    norms = {step.name for step in plan.steps if step.name.endswith("input_layernorm.weight")}

    def by(times: float) -> Plan:
        steps = list(plan.steps)
        for i, step in enumerate(steps):
            if step.name in norms:
                assert isinstance(step.recipe, Vector)
                steps[i] = replace(step, recipe=replace(step.recipe, factor=step.recipe.factor * times))
        return replace(plan, steps=tuple(steps))

    for times in (1.0, 1.001):
        with (
            Checkpoint.open(source) as small,
            Checkpoint.open(written(by(times), source, tmp_path / str(times))) as large,
        ):
            found = measure(by(times), small, large)
        assert found.algebra and found.algebra.passed and found.structure and found.structure.passed
        assert found.outputs and found.outputs.difference <= found.outputs.tolerance
        assert found.passed == (times == 1.0), found.reason()


def test_swapped_tensors_that_the_tensors_obey(tmp_path: Path) -> None:
    """A table that takes two tensors for one another, in a model whose outputs move more for one rounding."""
    source = saved(gpt_oss, 0, tmp_path / "source")
    plan = lemonx.plan(source, **_WIDER)
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}

    def swapped(name: str) -> str:
        part = name.split(".")[-2]
        return name.replace(part, other.get(part, part))

    wrong = replace(plan, steps=tuple(replace(step, source=swapped(step.source)) for step in plan.steps))
    with (
        Checkpoint.open(source) as small,
        Checkpoint.open(written(wrong, source, tmp_path / "target")) as large,
    ):
        found = measure(wrong, small, large)
        by_block = measure(wrong, small, large, by_layer=True)
    assert found.algebra and found.algebra.passed and not found.passed and "wired otherwise" in found.reason()
    assert not by_block.passed and by_block.layers and by_block.layers.first
    assert by_block.layers.first.block == "model.layers.0" and by_block.layers.first.tolerance == EXACT_TOLERANCE


def test_what_is_stored_must_run_too(tmp_path: Path) -> None:
    """A right twin does not speak for a file that its model does not take, nor for outputs that are nothing like it."""
    source = saved(mixtral, 0, tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", **_WIDER)
    found = target.verified.outputs
    assert found and found.passed
    assert not replace(found, odd_keys=("model.norm.weight",)).passed
    assert not replace(found, not_finite=("logits of the target",)).passed
    far = replace(found, difference=FAR * 1.01)
    assert not far.passed and "give --dtype float32" in far.reason()
    assert not replace(found, difference=float("nan")).passed
    assert found.twin and not replace(found, twin=replace(found.twin, difference=float("nan"))).passed


# ----------------------------------------------------------------- no room for a twin


def test_without_room_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise BadOutput("'twin' needs 1 GB, and the disk is full", "make room, start again")

    monkeypatch.setattr(outputs, "CheckpointWriter", full)
    source = saved(mixtral, 0, tmp_path / "source")
    unknown = r"outputs differ by .* it may be by rounding alone, .* no room for .*: set TMPDIR to a larger one"
    with pytest.raises(CannotVerify, match=unknown):
        lemonx.expand(source, tmp_path / "target", **_WIDER)
    assert not (tmp_path / "target").exists()
    target = lemonx.expand(source, tmp_path / "target", verify=False, **_WIDER)
    with pytest.raises(CannotVerify, match=unknown):
        api.verify(source, target)
    # Where what is stored passes by itself, that will do.
    steady = pico.save(pico.PICO["llama-tied"](), tmp_path / "steady", torch.bfloat16)
    found = lemonx.expand(steady, tmp_path / "larger", width=72).verified.outputs
    assert found and found.passed and found.twin is None and found.difference <= found.tolerance
