"""The law behind grown moments: the target's gradient is the reading of the source's, on real models, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import lemonx
import pico
from lemonx.algebra.free_parameters import EVEN, PRESETS, Free
from lemonx.models.building import disk_names
from lemonx.optimizer_state import EXACT, EXPECTED, FRESH, duals, moments
from lemonx.verification.float64 import Float64

# Float64 carries 1e-16, and a gradient is a sum of a few thousand products.
TOLERANCE = 1e-10
# A gradient that cancels to zero (a key's bias, under softmax) is rounding: it is held against the largest of all.
SMALLEST = 1e-3

FIRST = Free("first", split=0.0, phi=0.0, depth_type=1, zeta=0.0)

DOUBLE, HALF_MORE, MORE, DEEPER = {"width": 96}, {"width": 72}, {"width": 120}, {"depth": 3}
STAGES: list[dict[str, Any]] = [{"width": "2x"}, {"width": "1.5x"}]
# Every kind of model, and the sizes at which it can grow.
MODELS: dict[str, list[dict[str, Any]]] = {
    "gpt2-lm": [DOUBLE, HALF_MORE, MORE, DOUBLE | DEEPER],
    "gpt2-untied": [HALF_MORE],
    "llama-tied": [DOUBLE, HALF_MORE, MORE, HALF_MORE | DEEPER],
    "llama-biases": [MORE],
    "olmo2": [DOUBLE, HALF_MORE, MORE | DEEPER],
    "bert-pretraining": [DOUBLE | DEEPER],
    "megatron-mlm": [DOUBLE],
    # Its head comes before the embedding that it is tied to.
    "xlm-roberta-mlm": [DOUBLE],
    "megatron-cls": [HALF_MORE | DEEPER],
    "vit-cls": [DOUBLE, HALF_MORE | DEEPER],
    "swinv2-cls": [STAGES[0]],
    "resnet-bottleneck": [STAGES[0], {"width": "1.5x", "set": {"depths": [3, 3]}}],
    "resnet-basic": [STAGES[1]],
    "torchvision-bottleneck": [STAGES[1]],
    # A scale for every channel of a branch; and a kernel for every channel.
    "dinov2-cls": [DOUBLE, HALF_MORE, HALF_MORE | DEEPER],
    "beit-cls": [HALF_MORE],
    "timm-vit-scaled": [DOUBLE, HALF_MORE],
    "convnext-cls": [STAGES[0], {"width": "2x", "set": {"depths": [3, 2]}}],
    "mamba": [DOUBLE, HALF_MORE, HALF_MORE | DEEPER],
    "mamba2": [DOUBLE, HALF_MORE],
}
CASES = [(model, sizes, EVEN) for model, many in MODELS.items() for sizes in many]
CASES += [(model, many[-1], FIRST) for model, many in MODELS.items()]


def with_gradients(
    folder: Path, model_class: type[PreTrainedModel], *, train: bool = False, seed: int = 1
) -> PreTrainedModel:
    """A model in float64 with the gradients of one loss on one batch."""
    with Float64():
        model = model_class.from_pretrained(folder, dtype=torch.float64).train(train)
        found = model(**pico.inputs(model, seed=seed))
        generator = torch.Generator().manual_seed(2)
        loss = torch.zeros(())
        for name, value in found.items():
            if name.endswith("logits"):
                # A loss with a curvature of its own, and no symmetry between logits.
                loss = loss + (value * torch.randn(value.shape, generator=generator)).sum() + 0.1 * (value**2).sum()
        loss.backward()
    return model


def gradients(folder: Path, model_class: type[PreTrainedModel], train: bool = False) -> dict[str, Tensor]:
    """The gradient of every parameter, by its name on disk, of one loss on one batch."""
    model = with_gradients(folder, model_class, train=train)
    names = disk_names(model)
    return {
        names[name]: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Tensor]]]:
    """A saved pico model and its gradients, made once."""

    @cache
    def make(name: str, train: bool = False) -> tuple[Path, dict[str, Tensor]]:
        folder = pico.save(pico.PICO[name](), tmp_path_factory.mktemp(name) / "source")
        return folder, gradients(folder, type(pico.PICO[name]()), train)

    return make


def errors(
    source: tuple[Path, dict[str, Tensor]], model: str, target: Path, free: Free, train: bool = False, **sizes: Any
) -> tuple[dict[str, float], dict[str, str]]:
    """How far the reading of each gradient is from the target's own, and what is said of it."""
    folder, small = source
    plan = lemonx.plan(folder, free=free, **sizes)
    lemonx.expand(folder, target, free=free, verify=False, **sizes)
    large = gradients(target, type(pico.PICO[model]()), train)
    readings = moments(plan)
    floor = SMALLEST * max(float(g.abs().max()) for g in large.values())
    assert large.keys() <= readings.keys()
    far = {
        name: float((readings[name].first(small) - g).abs().max()) / max(float(g.abs().max()), floor)
        for name, g in large.items()
    }
    return far, {name: readings[name].status for name in large}


@pytest.mark.parametrize(("model", "sizes", "free"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_the_next_gradient_is_the_reading_of_the_source_s(
    source: Any, tmp_path: Path, model: str, sizes: dict[str, Any], free: Free
) -> None:
    far, status = errors(source(model), model, tmp_path / "t", free, **sizes)
    for name, error in far.items():
        if status[name] == EXACT:
            assert error <= TOLERANCE, name
    added = "depth" in sizes or "set" in sizes
    assert (FRESH in status.values()) == added
    assert EXACT in status.values()


@pytest.mark.parametrize(
    ("model", "sizes", "all_exact"),
    [
        # An even split at a multiple, and RMSNorm or BatchNorm at any width: nothing is left open.
        ("gpt2-lm", DOUBLE, True),
        ("llama-tied", MORE, True),
        ("olmo2", HALF_MORE, True),
        ("resnet-bottleneck", STAGES[1], True),
        ("dinov2-cls", DOUBLE, True),
        ("beit-cls", DOUBLE, True),
        ("convnext-cls", STAGES[0], True),
        ("mamba", HALF_MORE, True),
        # A LayerNorm that reads means.
        ("gpt2-lm", HALF_MORE, False),
        ("timm-vit-scaled", HALF_MORE, False),
    ],
)
def test_what_is_exact_with_an_even_split(
    source: Any, tmp_path: Path, model: str, sizes: dict[str, Any], all_exact: bool
) -> None:
    far, status = errors(source(model), model, tmp_path / "t", EVEN, **sizes)
    assert (set(status.values()) == {EXACT}) == all_exact
    # What is only expected is so for a reason: it differs.
    assert all(far[name] > 1e-3 for name, word in status.items() if word == EXPECTED)


def test_batch_statistics_change_nothing(source: Any, tmp_path: Path) -> None:
    """A BatchNorm in training mode has another Jacobian, per channel all the same."""
    far, status = errors(
        source("resnet-bottleneck", True), "resnet-bottleneck", tmp_path / "t", FIRST, train=True, width="1.5x"
    )
    assert set(status.values()) == {EXACT}
    assert max(far.values()) <= TOLERANCE


def test_noise_is_what_the_readings_leave_out(source: Any, tmp_path: Path) -> None:
    """With LEMON's own free parameters the readings are off by the noise, and tend to the truth as it vanishes."""
    language = PRESETS["language"]
    worst = []
    for phi in (0.02, 0.0002):
        free = replace(language, phi=phi, zeta=0.0)
        far, status = errors(source("llama-untied"), "llama-untied", tmp_path / str(phi), free, ffn=150)
        assert set(status.values()) == {EXACT, EXPECTED}
        worst.append(max(error for name, error in far.items() if status[name] == EXPECTED))
        assert max(error for name, error in far.items() if status[name] == EXACT) <= TOLERANCE
    assert worst[1] == pytest.approx(worst[0] / 100, rel=0.2)


@pytest.mark.parametrize(
    ("model", "sizes"), [("llama-tied", DOUBLE), ("gpt2-lm", DOUBLE), ("vit-cls", {"ffn": 200}), ("bert-mlm", DOUBLE)]
)
def test_own_copies_get_the_signals_of_their_own_rows(
    source: Any, tmp_path: Path, model: str, sizes: dict[str, Any]
) -> None:
    """Where each row keeps its own copy, the readings are off by the noise alone too: a tenth of it, a tenth as far."""
    worst = []
    for phi in (1e-4, 1e-5):
        free = replace(PRESETS["own"], phi=phi, zeta=0.0)
        far, status = errors(source(model), model, tmp_path / str(phi), free, **sizes)
        assert EXPECTED in status.values() and FRESH not in status.values()
        worst.append(max(far.values()))
    assert worst[1] <= 1e-3
    assert worst[1] == pytest.approx(worst[0] / 10, rel=0.3)


def test_query_groups(source: Any, tmp_path: Path) -> None:
    """Key-value heads whose copies divide the query heads of a group get no fixed share; whole groups do."""
    far, status = errors(source("llama-untied"), "llama-untied", tmp_path / "a", EVEN, kv_heads=4)
    uncertain = {name.rsplit(".", 2)[1] for name, word in status.items() if word == EXPECTED}
    assert uncertain == {"k_proj", "v_proj"}
    assert all(far[name] > 1e-3 for name, word in status.items() if word == EXPECTED)
    far, status = errors(source("llama-untied"), "llama-untied", tmp_path / "b", EVEN, heads=8, kv_heads=4)
    assert set(status.values()) == {EXACT}
    assert max(far.values()) <= TOLERANCE


def test_groups_of_heads_behind_a_convolution(source: Any, tmp_path: Path) -> None:
    """What the heads of a Mamba 2 share passes a convolution first: its kernels are as uncertain as the projection."""
    far, status = errors(source("mamba2"), "mamba2", tmp_path / "a", EVEN, set={"n_groups": 4})
    uncertain = {name.split(".")[-2] for name, word in status.items() if word == EXPECTED}
    assert uncertain == {"in_proj", "conv1d"}
    assert all(far[name] > 1e-3 for name, word in status.items() if word == EXPECTED)
    assert all(far[name] <= TOLERANCE for name, word in status.items() if word == EXACT)


@pytest.mark.parametrize("model", ["gpt2-lm", "llama-tied", "olmo2", "bert-mlm", "resnet-basic", "vit-cls"])
def test_the_backward_signals_of_copies_sum_to_the_unit_s(source: Any, model: str) -> None:
    """E^T D = 1 on every space: the chain rule, whatever the free parameters; means count with weight 1/n."""
    sizes = {"width": "2x"} if model == "resnet-basic" else {"width": 96}
    for free in (EVEN, FIRST, PRESETS["vision"], PRESETS["own"], replace(PRESETS["own"], split=0.5)):
        plan = lemonx.plan(source(model)[0], free=free, **sizes)
        for name, dual in duals(plan).items():
            units = plan.types.spaces[name]
            total = torch.zeros(units.size, dtype=torch.float64)
            copied = units.source >= 0
            weights = torch.from_numpy((dual.along.scale * units.amp * units.gain)[copied])
            total.index_add_(0, torch.from_numpy(units.source[copied]), weights)
            torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-14, atol=0)


def test_a_norm_that_moves_takes_its_moments_along(source: Any) -> None:
    """Post-LN depth: the last norm becomes the identity, the one that closes the group takes its place."""
    readings = moments(lemonx.plan(source("bert-pretraining")[0], free=EVEN, depth=3))
    norm = "bert.encoder.layer.{}.output.LayerNorm.weight"
    assert readings[norm.format(1)].status == FRESH
    assert readings[norm.format(2)].status == EXACT and readings[norm.format(2)].source == norm.format(1)
    assert readings["bert.encoder.layer.2.output.dense.weight"].status == FRESH


def test_a_method_that_is_not_lossless_claims_nothing(source: Any) -> None:
    for method in ("aki", "stackbert"):
        sizes = {"depth": 4} if method == "stackbert" else {"width": 96}
        readings = moments(lemonx.plan(source("gpt2-lm")[0], method=method, **sizes)).values()
        assert {reading.status for reading in readings} == {EXPECTED}
