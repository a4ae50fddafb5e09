"""The own-copy split: rows that are copy i of their unit keep the weight of copy i of their input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lemonx
from commands import BAD_TARGET, Run, runner
from lemonx.algebra.expansions import expansion
from lemonx.algebra.free_parameters import OWN, PRESETS, Free, parse_free, preset
from lemonx.algebra.recipes import Matrix
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadRecipe, BadTarget
from lemonx.execution import row_readers
from lemonx.execution.matrix import expand_matrix
from lemonx.verification.symmetry import find_twins
from lemonx_lab.training.recipe import parse_recipe
from pico import PICO, save
from test_operators import LAW, assert_lossless, expansions, query_heads, weight

OWN_COPY = PRESETS["own"]
# No noise at all: what an own-copy split is without it, though nobody may ask for that.
BARE = replace(OWN_COPY, phi=0.0, zeta=0.0)


@LAW
@given(
    rows=expansions(),
    columns=expansions(),
    split=st.sampled_from([0.0, 0.5, 1.0]),
    phi=st.sampled_from([0.0, 0.1, 3.0]),
    seed=st.integers(0, 99),
)
def test_the_law(rows, columns, split: float, phi: float, seed: int) -> None:
    """W* E_in = E_out W at any width, for any share and any noise."""
    small = weight(rows.size, columns.size, seed)
    free = replace(OWN_COPY, split=split, phi=phi)
    grown = expand_matrix(small, Matrix(rows, columns, consumes=True, own=True), free, seed)
    assert_lossless(grown, small, rows, columns)


@settings(LAW, max_examples=15)
@given(rows=query_heads(), columns=query_heads())
def test_the_law_for_grouped_heads(rows, columns) -> None:
    small = weight(rows.size, columns.size)
    grown = expand_matrix(small, Matrix(rows, columns, consumes=True, own=True), OWN_COPY)
    assert_lossless(grown, small, rows, columns)


@LAW
@given(n=st.integers(1, 4), m=st.integers(1, 4), more=st.integers(0, 9), wider=st.integers(0, 9))
def test_the_rest_is_where_it_should_be(n: int, m: int, more: int, wider: int) -> None:
    """Without noise all of a weight is on copy i mod c of the input, in the rows of copy i, and nothing elsewhere."""
    rows, columns = expansion("circ", n, n + more), expansion("circ", m, m + wider)
    small = weight(n, m)
    grown = expand_matrix(small, Matrix(rows, columns, consumes=True, own=True), BARE)
    for t in range(rows.target_size):
        for s in range(columns.target_size):
            unit = columns.source[s]
            keeps = rows.copy_number[t] % columns.copies[unit] == columns.copy_number[s]
            assert grown[t, s] == (small[rows.source[t], unit] if keeps else 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "target"), [(8, 16), (8, 20), (8, 24)])
def test_copies_sum_exactly_in_half_precision(dtype: torch.dtype, size: int, target: int) -> None:
    rows = columns = expansion("circ", size, target)
    small = weight(size, size, dtype=dtype)
    grown = expand_matrix(small, Matrix(rows, columns, consumes=True, own=True), OWN_COPY).double()
    total = torch.zeros(target, size, dtype=torch.float64)
    total.index_add_(1, torch.from_numpy(columns.source), grown)
    assert torch.equal(total, small.double()[torch.from_numpy(rows.source)])


def test_two_networks_exchange_only_noise() -> None:
    """At twice the width: the weight's blocks on the diagonal, and beside them noise in units of its spread."""
    both, small = expansion("circ", 64, 128), 5.0 * weight(64, 64)
    grown = expand_matrix(small, Matrix(both, both, consumes=True, own=True), OWN_COPY)
    beside = torch.cat([grown[:64, 64:], grown[64:, :64]])
    std = OWN_COPY.phi * float(small.square().mean().sqrt())
    assert abs(float(beside.square().mean().sqrt()) / std - 1) < 0.03
    assert float((grown[:64, :64] - small).abs().max()) < 5 * std
    assert float((grown[64:, 64:] - small).abs().max()) < 5 * std


# Grouped queries, LayerNorm with means, experts, Post-LN with frames, shared blocks, transposed files, convolutions.
GROWTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-tied", {"width": "2x", "depth": 3}),
    "llama-indivisible": ("llama-untied", {"width": "3/2x", "heads": 6, "kv_heads": 3}),
    "gpt2-means": ("gpt2-lm", {"width": "3/2x"}),
    "gpt2-three": ("gpt2-lm", {"width": "3x"}),
    "vit": ("vit-cls", {"width": "3/2x", "depth": 3}),
    "mixtral": ("mixtral", {"width": "2x", "set": {"num_local_experts": 8, "num_experts_per_tok": 4}}),
    "bert-frames": ("bert-cls", {"width": 72}),
    "bert": ("bert-mlm", {"width": "2x", "depth": 3}),
    "albert": ("albert-mlm", {"width": "2x"}),
    "t5": ("t5", {"width": "3/2x"}),
    "mamba": ("mamba", {"width": "2x"}),
    "resnet": ("resnet-bottleneck", {"width": "2x"}),
}


@pytest.mark.parametrize("case", GROWTHS)
def test_models_stay_the_same_function_and_copies_differ(case: str, tmp_path: Path) -> None:
    model, sizes = GROWTHS[case]
    source = save(PICO[model](), tmp_path / "s")
    lemonx.expand(source, tmp_path / "t", free="own", verify=False, **sizes)
    found = lemonx.verify(source, tmp_path / "t")  # by what the certificate says
    assert found.proven
    assert found.symmetry is not None
    assert found.symmetry.copies > 0
    assert found.symmetry.twins == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints(dtype: str, tmp_path: Path) -> None:
    """At a whole multiple nothing is scaled, so every sum is exact, and the check of every entry says so."""
    source = save(PICO["llama-tied"](), tmp_path / "s", getattr(torch, dtype))
    made = lemonx.expand(source, tmp_path / "t", width="2x", depth=3, free="own")
    assert made.verified.proven
    owned = [s for s in made.plan.steps if isinstance(s.recipe, Matrix) and s.recipe.own]
    assert {step.exactness for step in owned} == {"exact-sum"}
    assert any("own copy" in step.rule for step in owned)


def test_noise_that_is_rounded_away_leaves_twin_networks(tmp_path: Path) -> None:
    """Noise below half a spacing of every weight is 0 in bf16; no two units are alike, but the two networks are."""
    source = save(PICO["llama-tied"](), tmp_path / "s", torch.bfloat16)
    free = parse_free({"like": "own", "phi": 1e-9})
    made = lemonx.expand(source, tmp_path / "t", width="2x", free=free, verify=False)
    with Checkpoint.open(tmp_path / "t") as target:
        found = find_twins(made.plan, target)
    assert found.twins == found.copies > 0
    assert found.where == ("all units, exchanged together",)


def test_a_sample_of_rows_tells_the_spread_of_a_large_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows evenly apart, the same whoever asks: outliers in other rows do not raise the noise."""
    source = save(PICO["llama-tied"](), tmp_path / "s")
    with Checkpoint.open(source) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][1] = 1e4
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(row_readers, "SAMPLE", 4 * tensors[name].shape[1])
    made = lemonx.expand(source, tmp_path / "t", width="2x")
    assert made.verified.proven
    with Checkpoint.open(tmp_path / "t") as target:
        noise = target.read(name)[2 : len(tensors[name]), tensors[name].shape[1] :]
    rows = [row for some in row_readers.sampled_rows(tensors[name].shape) for row in some]
    assert len(rows) == 4 and 1 not in rows
    spread = tensors[name][rows].square().mean().sqrt()
    assert noise.std() == pytest.approx(float(0.1 * spread), rel=0.1)  # of some 4,000 numbers, and kept to 8 bits


@pytest.mark.parametrize("outlier", [1e4, 1e6])
def test_one_outlier_does_not_drown_the_other_weights_in_noise(outlier: float) -> None:
    """The noise is a fraction of the usual weight, so that W - Phi keeps the digits of W in float32."""
    both, small = expansion("circ", 64, 128), weight(64, 64).float()
    usual = small.square().mean().sqrt()
    small[3, 5] = outlier * usual
    grown = expand_matrix(small, Matrix(both, both, consumes=True, own=True), OWN_COPY)
    assert 0.05 * usual < grown[:64, 64:].std() < 0.6 * usual
    sums = grown.double()[:64, :64] + grown.double()[:64, 64:]
    lost = (sums - small.double()).abs()
    lost[3, 5] = 0.0  # rounded in its own, larger, units
    assert float(lost.max()) < 4 * torch.finfo(torch.float32).eps * float(usual)


@pytest.mark.parametrize("free", ["own", "language"])
def test_copies_of_key_value_heads_alone_are_no_twins(free: str, tmp_path: Path) -> None:
    """Copies of a key-value head are equal, but other query heads read them: they get other gradients."""
    source = save(PICO["llama-tied"](), tmp_path / "s")
    made = lemonx.expand(source, tmp_path / "t", kv_heads="2x", free=parse_free(free))
    symmetry = made.verified.symmetry
    assert symmetry is not None and symmetry.copies > 0 and symmetry.twins == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "t", dtype=torch.float64)
    tokens = torch.arange(24).reshape(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    for layer in model.model.layers:
        heads = layer.self_attn.v_proj.weight.grad.unflatten(0, (4, -1))
        assert (heads[:2] - heads[2:]).abs().max() > 1e-3 * heads.abs().max()


def test_phi_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTarget, match="twin networks"):
        parse_free({"rest": "own", "phi": 0})
    with pytest.raises(BadTarget, match="twin networks"):
        lemonx.plan(save(PICO["llama-tied"](), tmp_path / "s"), width="2x", free=BARE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"like": "owned"}, "no preset 'owned'"),
        ({"rest": "second"}, "rest is 'second'"),
        ({"phi": -1.0}, "phi is -1.0"),
        ({"phi": float("nan")}, "phi is nan"),
        ({"phi": "much"}, "phi is 'much'"),
        ({"relative": 1}, "relative is 1"),
        ({"depth_type": 4}, "depth_type is 4"),
        ({"name": "mine"}, "'name' is not a free parameter"),
    ],
)
def test_sections_that_say_nonsense(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadTarget, match=said):
        parse_free(given)


def test_sections() -> None:
    assert parse_free("own") is preset("own")
    found = parse_free({"like": "vision", "rest": "own", "phi": 1})
    assert (found.split, found.rest, found.phi) == (1.0, OWN, 1)
    assert isinstance(found, Free)


def test_recipes_name_it() -> None:
    recipe: dict[str, Any] = {
        "task": "causal-lm", "source": "s", "data": {"kind": "stdlib"}, "steps": 1, "batch_size": 1,
        "learning_rate": 1e-3, "expand": {"width": 64, "free": {"like": "own", "phi": 0.05}},
    }  # fmt: skip
    read = parse_recipe(recipe)
    assert read.expand is not None
    assert parse_free(read.expand.options["free"]) == replace(preset("own"), phi=0.05)
    assert read.as_dict()["expand"] == recipe["expand"]
    with pytest.raises(BadRecipe, match="rest is 'odd'"):
        parse_recipe({**recipe, "expand": {"width": 64, "free": {"rest": "odd"}}})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def test_the_command_line(run: Run, tmp_path: Path) -> None:
    source = save(PICO["llama-tied"](), tmp_path / "s")
    asked = ["plan", str(source), "--width", "2x", "--tensors", "--free"]
    result = run(*asked, "{like: language, rest: own}")
    assert result.code == 0
    assert "own copy" in result.out
    assert "own copy" not in run(*asked, "language").out
    for wrong in ("{like: }", "owned", "{rest: [1]}", "{"):
        assert run(*asked, wrong).code == BAD_TARGET
