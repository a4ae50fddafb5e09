"""What norms in a row do to a stream: the algebra of chains.py against the norms themselves, and its limit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import lemonx
from lemonx import architectures
from lemonx.algebra.free_parameters import preset
from lemonx.algebra.norm_chains import LIMIT, SHARE_OF_64_BITS, VARIANCE, Chain, require_small, small_gains
from lemonx.diagnostics.capabilities import default_config
from lemonx.errors import BadTarget, LemonxError, Refused
from lemonx.planning import depth
from lemonx.planning.exactness import ROUNDED, UP_TO_EPS
from lemonx.specs.spec import Stack
from pico import PICO, save

EPS = [10.0**-power for power in range(1, 13)]
NORMS = (1, 2, 3, 10)


def norm(x: NDArray, eps: float, *, centred: bool) -> NDArray:
    x = x - x.mean(-1, keepdims=True) if centred else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def vectors(eps: float) -> NDArray:
    """Random vectors of every size, from far below eps to far above one."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(2000, 16)) * 10 ** rng.uniform(math.log10(eps) / 2 - 1, 3, size=(2000, 1))


# Arguments of a chain: plain gains, small ones, and small ones that are stored in 64 bits.
GAINS = [(), (True,), (True, SHARE_OF_64_BITS)]


@pytest.mark.parametrize("small", GAINS)
@pytest.mark.parametrize("eps", EPS)
def test_the_ratio_is_what_the_norms_do(eps: float, small: tuple[Any, ...]) -> None:
    x = vectors(eps)
    for centred, norms in ((True, 1), (True, 4), (False, 3)):
        chain = Chain(eps, norms, *small)
        gains = [chain.gains.between] * (norms - 1) + [chain.gains.last]
        found = norm(x, eps, centred=centred) * chain.gains.first
        for gain in gains:
            found = norm(found, eps, centred=centred) * gain
        variance = x.var(-1, keepdims=True) if centred else (x * x).mean(-1, keepdims=True)
        wanted = norm(x, eps, centred=centred) * chain.ratio(variance)
        assert np.abs(found - wanted).max() < 1e-13


@pytest.mark.parametrize("small", GAINS)
@pytest.mark.parametrize("eps", EPS)
def test_the_loss_is_a_bound_and_is_reached(eps: float, small: tuple[Any, ...]) -> None:
    """Where the variance is large enough; where it is smaller, the docstring's other bound."""
    variance = np.concatenate([np.geomspace(eps**2, VARIANCE, 500), np.geomspace(VARIANCE, 1e9, 500), [1 - eps]])
    for norms in NORMS:
        chain = Chain(eps, norms, *small)
        off = np.abs(chain.ratio(variance) - 1)
        rounding = 1e-15 * norms
        large = variance >= VARIANCE
        assert off[large].max() <= chain.loss * (1 + 1e-12) + rounding
        assert off[large].max() >= 0.8 * chain.loss - rounding, "the bound is far from what happens"
        below = variance < VARIANCE
        kept = (eps / chain.gains.between**2) ** norms if small else 0.0
        bound = (1 - kept) * eps / variance / 2 if small else (eps / 2) * (1 / variance - 1)
        assert (off[below] <= bound[below] * (1 + 1e-12) + rounding).all()


@pytest.mark.parametrize("eps", EPS)
def test_more_norms_lose_no_more(eps: float) -> None:
    """It is lost once for a group: the hundredth norm finds the variance that it leaves behind."""
    assert Chain(eps, 1).loss == Chain(eps, 100).loss == pytest.approx(1 - math.sqrt(1 - eps), rel=1e-3)
    assert abs(Chain(eps, 100).ratio(1e12) - 1) <= Chain(eps, 1).loss + 1e-13
    assert Chain(eps, 7).ratio(1 - eps) == pytest.approx(1.0, abs=1e-14), "there nothing is lost"


def test_small_gains_are_a_float32_where_it_matters() -> None:
    for eps in EPS:
        gains = small_gains(eps)
        assert float(np.float32(gains.between)) == gains.between
        assert gains.first**2 + eps == pytest.approx(gains.between**2, rel=1e-15)
        assert gains.first**2 == pytest.approx(1e-4 * eps, rel=1e-2)
        assert gains.first * gains.last == pytest.approx(gains.between)


def test_small_gains_in_64_bits_lose_nothing_that_could_be_told(bert: Callable[[float], Path]) -> None:
    """A plan knows from what is stored how small they can be: in float32 a smaller loss would be of no use."""
    lost = [
        lemonx.plan(bert(1e-5), depth=4, free={"small_gains": True}, dtype=d).expected_loss
        for d in ("float64", "float32")
    ]
    assert lost[0] < 1e-12 < 1e-10 < lost[1] < 1e-8


def test_the_limit() -> None:
    """1e-5 passes in any stack there is, 1e-3 in none, and between them their number decides."""
    require_small([Chain(1e-5, 3)] * 90)
    require_small([Chain(1e-4, 2)] * 9)
    for eps, number in ((1e-4, 10), (1e-3, 1), (1e-1, 1), (1.0, 1), (5.0, 1), (math.inf, 1)):
        advice = "keep the depth, or use --free '{small_gains: true}'"
        with pytest.raises(Refused, match=rf"^an added Post-LN layer [^\n]+: {advice}$"):
            require_small([Chain(eps, 2)] * number)
    require_small([Chain(1e-1, 2, small=True)] * 12)
    with pytest.raises(Refused, match=r"in all 99 places, more than 4\.9e-04: keep the depth$"):
        require_small([Chain(1e-1, 2, small=True)] * 99)
    assert LIMIT < 5e-4


def test_the_chains_of_a_stack() -> None:
    """Two norms an added block, behind the block that it comes from; a shared set has one chain for each use."""
    family = architectures.families()["bert"]
    config = {**default_config("bert"), "model_type": "bert", "layer_norm_eps": 1e-5}
    spec = family.spec(config)
    stack = "bert.encoder.layer"

    def found(source: Stack, target: int) -> dict[int, list[int]]:
        small, large = (replace(spec, stacks={stack: s}) for s in (source, replace(source, size=target, sets=0)))
        chains = depth.chains(small, large, family.config(config))
        assert {chain.eps for uses in chains.values() for chain in uses} <= {1e-5}
        return {index: [chain.norms for chain in uses] for (_, index), uses in chains.items()}

    assert found(Stack(2, "residual"), 5) == {0: [2], 1: [4]}
    assert found(Stack(3, "residual"), 4) == {2: [2]}
    assert found(Stack(3, "residual"), 3) == {}
    assert found(Stack(4, "residual", sets=1), 6) == {0: [0, 2, 0, 2]}


def test_what_the_algebra_takes_for_granted_of_every_family() -> None:
    """The norms in the stream of a stack have one eps, which is known, and added blocks stand next to their origin."""
    stacks = 0
    for name, family in architectures.families().items():
        config = {**default_config(name), "model_type": name}
        spec, values = family.spec(config), family.config(config)
        for stack in spec.stacks:
            norms = depth.stream_norms(spec, stack)
            if norms:
                stacks += 1
                eps = {depth.eps_of(spec, norm, values) for norm in norms}
                assert len(eps) == 1 and min(eps) > 0, name
                assert spec.stacks[stack].period == 1, name
    assert stacks > 8


# ----------------------------------------------------------------- plans


@pytest.fixture
def bert(tmp_path: Path) -> Callable[[float], Path]:
    """A BERT with this eps."""

    def make(eps: float) -> Path:
        folder = save(PICO["bert-mlm"](), tmp_path / f"bert-{eps:g}")
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "layer_norm_eps": eps}))
        return folder

    return make


def test_a_large_eps_is_refused_before_anything_is_written(bert: Callable[[float], Path], tmp_path: Path) -> None:
    for eps in (1e-3, 1e-1):
        source = bert(eps)
        with pytest.raises(Refused, match="small_gains: true"):
            lemonx.expand(source, tmp_path / "t", depth=3)
        assert not (tmp_path / "t").exists()
        lemonx.plan(source, depth=3, free={"small_gains": True})
        lemonx.plan(source, width=96)  # no block is added
    lemonx.plan(bert(1e-5), depth=9)


def test_a_plan_says_what_it_loses(bert: Callable[[float], Path]) -> None:
    plan = lemonx.plan(bert(1e-5), depth=3)
    assert plan.exactness == UP_TO_EPS and not plan.is_rounded
    assert plan.expected_loss == pytest.approx(5e-6, rel=1e-4)
    marked = {step.name for step in plan.steps if step.exactness == UP_TO_EPS}
    layers = "bert.encoder.layer.1.output", "bert.encoder.layer.2.attention.output"
    assert marked == {f"{layer}.LayerNorm.{name}" for layer in layers for name in ("weight", "bias")}
    exact = lemonx.plan(bert(0.0), depth=3)
    assert exact.exactness != UP_TO_EPS and exact.expected_loss == 0, "without an eps nothing is lost"
    assert lemonx.plan(bert(1e-5), width=96).expected_loss == 0


def test_small_gains_in_a_plan(bert: Callable[[float], Path]) -> None:
    plan = lemonx.plan(bert(1e-5), depth=4, width=96, free={"small_gains": True}, dtype="float32")
    rules = {step.name.removeprefix("bert.encoder.layer."): step.rule for step in plan.steps if " x " in step.rule}
    first, between, last = (f"LayerNorm x {gain:.3g}" for gain in vars(small_gains(1e-5)).values())
    assert rules == {
        "0.output.LayerNorm.weight": first,
        "1.attention.output.LayerNorm.weight": between,
        "1.output.LayerNorm.weight": last,
        "2.output.LayerNorm.weight": first,
        "3.attention.output.LayerNorm.weight": between,
        "3.output.LayerNorm.weight": last,
    }
    assert plan.expected_loss < 1e-3 * lemonx.plan(bert(1e-5), depth=4).expected_loss
    assert plan.is_rounded and {s.exactness for s in plan.steps if s.rule == last} == {ROUNDED}


REFUSED: dict[str, tuple[str, dict[str, Any], type[LemonxError], str]] = {
    "16 bits": ("bert-mlm", {"depth": 3, "dtype": "bfloat16"}, Refused, "stored in 16 bits.*--dtype float32"),
    "pairs that cancel": ("bert-mlm", {"depth": 3, "free": {"depth_type": 2}}, Refused, "depth_type: 1"),
    "another method": ("bert-mlm", {"depth": 3, "method": "net2net"}, BadTarget, "net2net does not use small_gains"),
    "no added block": ("bert-mlm", {"width": 96}, BadTarget, "none are added here: leave it out"),
    "Pre-LN": ("gpt2-lm", {"depth": 3}, BadTarget, "none are added here: leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_small_gains_are_refused(name: str, tmp_path: Path) -> None:
    model, asked, kind, says = REFUSED[name]
    options = dict(asked)
    with pytest.raises(kind, match=says) as caught:
        given: Any = {**options, "free": {"small_gains": True, **options.pop("free", {})}}
        lemonx.plan(save(PICO[model](), tmp_path / "s"), **given)
    assert "\n" not in str(caught.value)


def test_norms_without_gains_cannot_have_small_ones(tmp_path: Path) -> None:
    import transformers as hf

    config = hf.OPTConfig(
        vocab_size=40, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, do_layer_norm_before=False, layer_norm_elementwise_affine=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    source = save(hf.OPTForCausalLM(config).double(), tmp_path / "s")
    with pytest.raises(Refused, match="no weights that could be made small"):
        lemonx.plan(source, depth=3, free={"small_gains": True})
    # Without tensors to say so, the plan still knows, and so does the verification.
    assert lemonx.plan(source, depth=3).exactness == UP_TO_EPS
    measured = lemonx.verify(source, lemonx.expand(source, tmp_path / "t", depth=3, verify=False).path)
    assert measured.passed and measured.outputs.difference <= 1e-10 < measured.outputs.output_loss


def test_free_parameters_can_ask_for_small_gains(bert: Callable[[float], Path]) -> None:
    plan = lemonx.plan(bert(1e-5), depth=3, free=replace(preset("language"), small_gains=True))
    assert all(chain.small for chain in plan.chains)
