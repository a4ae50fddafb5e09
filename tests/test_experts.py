"""Experts: copies that are used together are told apart by noise that cancels, and unused ones are said to be unused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lemonx
import pico
from lemonx.checkpoints import Checkpoint
from lemonx.free import EVEN, Free
from lemonx.verification.float64 import Float64
from lemonx.verification.symmetry import find_twins

TWICE = {"num_local_experts": 8, "num_experts_per_tok": 4}
THRICE = {"num_local_experts": 12, "num_experts_per_tok": 6}


def expanded(name: str, folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Path, Path]:
    source = pico.save(pico.PICO[name](), folder / "source", dtype)
    return source, lemonx.expand(source, folder / "target", verify=False, **options)


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
    source, target = expanded(name, tmp_path, dtype, fields=fields)
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
    options = {**options, "fields": {size: 8, "num_experts_per_tok": 4}}
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
    _, target = expanded("mixtral", tmp_path, fields=TWICE, free=free)
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
    rules = {step.name: step.rule for step in lemonx.plan(source, fields={"num_local_experts": 6}).steps}
    assert "unused" in rules["model.layers.0.mlp.experts.down_proj"]
    assert rules["model.layers.0.mlp.router.bias"] == "unpicked"
    source = pico.save(pico.PICO["mixtral"](), tmp_path / "mixtral")
    rules = {step.name: step.rule for step in lemonx.plan(source, fields=TWICE).steps}
    assert "±Φ over copies" in rules["model.layers.0.block_sparse_moe.experts.7.w2.weight"]
    assert "Φ" not in rules["model.layers.0.block_sparse_moe.experts.7.w1.weight"]
