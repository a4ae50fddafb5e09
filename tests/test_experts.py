"""Experts: copies used together are told apart by noise that cancels; dense models become experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lemonx
import pico
from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.checkpoints import Checkpoint
from lemonx.errors import LemonxError, Refused
from lemonx.verification.float64 import Float64
from lemonx.verification.symmetry import find_twins

TWICE = {"num_local_experts": 8, "num_experts_per_tok": 4}
THRICE = {"num_local_experts": 12, "num_experts_per_tok": 6}


def expanded(name: str, folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Path, Path]:
    source = pico.save(pico.PICO[name](), folder / "source", dtype)
    return source, lemonx.expand(source, folder / "target", verify=False, **options).path


def downs(folder: Path, layer: int = 0) -> torch.Tensor:
    """The weights of all experts that write the stream, (experts, ...)."""
    weights = load_file(folder / "model.safetensors")
    if (fused := weights.get(f"model.layers.{layer}.mlp.experts.down_proj")) is not None:
        return fused
    names = sorted((n for n in weights if f"layers.{layer}." in n and n.endswith(("w2.weight", "down_proj.weight"))),
                   key=lambda n: int(n.split("experts.")[1].split(".")[0]))  # fmt: skip
    return torch.stack([weights[n] for n in names])


@pytest.mark.parametrize("fields", [TWICE, THRICE], ids=["two", "three"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_copies_differ_and_sum_to_the_source_exactly(name: str, dtype: Any, fields: Any, tmp_path: Path) -> None:
    source, target = expanded(name, tmp_path, dtype, set=fields)
    before, after = downs(source).double(), downs(target).double()
    copies = after.unflatten(0, (-1, 4))
    assert len(copies) == fields["num_local_experts"] // 4
    assert copies.sum(0).equal(before * len(copies))
    for one in range(len(copies)):
        for other in range(one):
            differ = (copies[one] != copies[other]).double().mean()
            assert differ > 0.5, "noise that is cut away everywhere tells nothing apart"


@pytest.mark.parametrize("options", [{}, {"width": 72, "depth": 3}], ids=["alone", "wider-and-deeper"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "olmoe"])
def test_copies_of_experts_are_no_twins(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    size = "num_experts" if name == "olmoe" else "num_local_experts"
    options = {**options, "set": {size: 8, "num_experts_per_tok": 4}}
    source, target = expanded(name, tmp_path, **options)
    with Checkpoint.open(target) as written:
        symmetry = find_twins(lemonx.plan(source, **options), written)
    assert symmetry.copies >= 4 * 2 and symmetry.twins == 0, symmetry
    _, even = expanded(name, tmp_path / "even", free=EVEN, **options)
    with Checkpoint.open(even) as written:
        symmetry = find_twins(lemonx.plan(source, free=EVEN, **options), written)
    assert any("experts" in place for place in symmetry.where), symmetry


@pytest.mark.parametrize("free", ["language", EVEN], ids=["language", "even"])
def test_copies_separate_in_training(free: str | Free, tmp_path: Path) -> None:
    """Two steps of AdamW: the fan-in of two copies of an expert moves apart; after an even split it does not."""
    _, target = expanded("mixtral", tmp_path, set=TWICE, free=free)
    with Float64():
        model: Any = type(pico.PICO["mixtral"]()).from_pretrained(target, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for seed in (3, 4):
            batch = pico.inputs(model, seed=seed)
            logits = model(**batch).logits
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    fused = model.model.layers[0].mlp.experts.gate_up_proj.detach()
    moved = (fused[:4] - fused[4:]).abs().flatten(1).max(1).values
    if isinstance(free, Free):
        assert (moved < 1e-9).all(), moved
    else:
        assert (moved > 1e-4).all(), moved


def test_the_plan_says_what_is_unused_and_what_is_told_apart(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["gpt-oss"](), tmp_path / "oss")
    rules = {step.name: step.rule for step in lemonx.plan(source, set={"num_local_experts": 6}).steps}
    assert "unused" in rules["model.layers.0.mlp.experts.down_proj"]
    assert rules["model.layers.0.mlp.router.bias"] == "unpicked"
    source = pico.save(pico.PICO["mixtral"](), tmp_path / "mixtral")
    rules = {step.name: step.rule for step in lemonx.plan(source, set=TWICE).steps}
    assert "±Φ over copies" in rules["model.layers.0.block_sparse_moe.experts.7.w2.weight"]
    assert "Φ" not in rules["model.layers.0.block_sparse_moe.experts.7.w1.weight"]


UPCYCLED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("mistral", "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mistral-odd": ("mistral", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "mistral-all": ("mistral", "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "llama": ("llama-untied", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "llama-tied": ("llama-tied", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama-cls": ("llama-cls", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama-base": ("llama-base", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("qwen3", "qwen3_moe", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-tied": ("qwen3-tied", "qwen3_moe", {"num_local_experts": 6, "num_experts_per_tok": 4}),
}


@pytest.mark.parametrize("name", ["gpt-oss", "mixtral"])
def test_copies_of_experts_are_verified_in_one_tensor_or_in_many(name: str, tmp_path: Path) -> None:
    """Those of one expert add up to it, and to no other; a changed entry of a copy is seen."""
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", set=TWICE, verify=False).path
    assert lemonx.verify(source, target).passed
    tensors = load_file(target / "model.safetensors")
    last = max(tensor for tensor in tensors if "experts" in tensor and "bias" not in tensor)
    tensors[last].view(-1)[-1] += 1e-3
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    found = lemonx.verify(source, target)
    assert found.algebra is not None and not found.algebra.passed


@pytest.mark.parametrize("more", [{}, {"width": 72, "depth": 3, "free": {"depth_type": 1}}], ids=["alone", "larger"])
@pytest.mark.parametrize("case", UPCYCLED)
def test_dense_becomes_experts(case: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Exact after a reload by the class that config.json now names, generation included."""
    name, becomes, fields = UPCYCLED[case]
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    fields = {"model_type": becomes, **fields}
    target = lemonx.expand(source, tmp_path / "target", set=fields, verify=False, **more).path
    measured = lemonx.verify(source, target)
    assert measured.passed and measured.outputs.tolerance == 1e-10
    assert measured.symmetry is not None and measured.symmetry.twins == 0
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == becomes and config["num_local_experts"] == fields["num_local_experts"]


def test_what_two_classes_default_otherwise_is_written_down(tmp_path: Path) -> None:
    """A Mixtral turns 100 times slower than a Mistral by default, and has no window."""
    source = pico.save(pico.PICO["mistral"](), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for field in ("rope_parameters", "rope_theta", "sliding_window", "rms_norm_eps", "num_key_value_heads", "head_dim"):
        config.pop(field, None)
    config["num_key_value_heads"] = 2
    (source / "config.json").write_text(json.dumps(config))
    fields = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    target = lemonx.expand(source, tmp_path / "target", set=fields).path
    written = json.loads((target / "config.json").read_text())
    assert (written["rope_theta"], written["sliding_window"], written["rms_norm_eps"]) == (10000.0, 4096, 1e-6)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("llama-tied", {"model_type": "qwen3_moe"}, "a llama cannot become a qwen3_moe.*set model_type to mixtral"),
        ("gpt2-lm", {"model_type": "mixtral"}, "a gpt2 cannot become a mixtral.*leave model_type out"),
        ("llama-biases", {"model_type": "mixtral", "num_local_experts": 4}, "biases"),
        (
            "mistral",
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 of 2 experts per token.* up to 2",
        ),
    ],
)
def test_what_cannot_become_experts(name: str, fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    with pytest.raises(LemonxError, match=says):
        lemonx.plan(source, set=fields)


def test_a_family_is_named_on_the_command_line() -> None:
    from lemonx.cli.options import parsed
    from lemonx.options.declared import Growth

    given = parsed(Growth, {"set": ["model_type=mixtral", "num_local_experts=8"]})
    assert given.given()["set"] == {"model_type": "mixtral", "num_local_experts": 8}


def test_moments_cannot_follow_a_dense_model_that_becomes_one_of_experts(tmp_path: Path) -> None:
    from lemonx.optimizer_state.moments import moments

    source = pico.save(pico.PICO["mistral"](), tmp_path / "source")
    fields = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(Refused, match="without --with-optimizer"):
        moments(lemonx.plan(source, set=fields))


MORE = {"num_local_experts": 8}  # of which 2 are picked, as before


def test_expert_upcycling_copies_experts_and_scores(tmp_path: Path) -> None:
    """The router differs in the rows of further copies, by 1 % of its spread; all else is the source's."""
    source, target = expanded("mixtral", tmp_path, set=MORE, method="expert-upcycling")
    assert downs(target).equal(downs(source).repeat(2, 1, 1))
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    name = "model.layers.1.block_sparse_moe.gate.weight"
    assert after[name][:4].equal(before[name])
    noise = after[name][4:] - before[name]
    assert 0.005 < float(noise.std() / before[name].std()) < 0.02
    assert after["model.layers.1.self_attn.q_proj.weight"].equal(before["model.layers.1.self_attn.q_proj.weight"])


def test_with_as_many_picked_groups_of_copies_lose_little_and_plain_copies_much(tmp_path: Path) -> None:
    """In groups, most tokens pick the experts they picked, with the same weights; plain copies are picked in pairs."""
    kept = {}
    for method in ("expert-upcycling", "expert-groups"):
        source, target = expanded("mixtral", tmp_path / method, set=MORE, method=method)
        kind: Any = type(pico.PICO["mixtral"]())
        with Float64(), torch.no_grad():
            small, large = (kind.from_pretrained(folder, dtype=torch.float64) for folder in (source, target))
            blocks = [model.model.layers[0].mlp for model in (small, large)]
            x = torch.randn(64, 16, small.config.hidden_size, dtype=torch.float64)
            one, other = (block(x) for block in blocks)
        assert large.config.num_experts_per_tok == small.config.num_experts_per_tok == 2
        kept[method] = float(((one - other).abs().amax(-1) < 1e-10).double().mean())
        groups = (x @ (blocks[1].gate.weight[:4] - blocks[1].gate.weight[4:]).mean(0) > 0).double().mean()
    assert kept["expert-upcycling"] < 0.05 and kept["expert-groups"] > 0.9, kept
    assert 0.3 < groups < 0.7  # both groups are in use


@pytest.mark.parametrize("method", ["expert-upcycling", "expert-groups"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("mixtral", {"set": TWICE}), ("mixtral", {"set": MORE, "width": 96}), ("llama-tied", {"width": 96})],
)
def test_expert_upcycling_adds_experts_and_nothing_else(
    method: str, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    with pytest.raises(Refused, match="only adds experts to a model that has several"):
        lemonx.plan(source, method=method, **options)


def test_a_fresh_target_may_have_any_number_of_experts(tmp_path: Path) -> None:
    _, target = expanded("mixtral", tmp_path, set=MORE, method="scratch")
    assert len(downs(target)) == 8
