"""What every optimizer keeps, grown, is what the larger model's own optimizer gathers: in float64, by gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional as blockwise
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.optimization import Adafactor

import lemonx
import pico
from lemonx.algebra.free_parameters import EVEN
from lemonx.optimizer_state import EXACT, EXPECTED, FRESH, grow_optimizer
from lemonx.optimizer_state.grow import DECAY, SIZES, SQUARES, UNEQUAL, StateGrowth
from lemonx.optimizer_state.layouts import COUNT, flattened, layout_of
from lemonx.optimizer_state.moments import FRAMES, PARTS, SPARE, UNTIED, UNUSED
from test_experts import TWICE
from test_optimizer_gradients import SMALLEST, TOLERANCE, with_gradients

BATCHES = 2
# A multiple, with blocks that are added; a width at which units have different numbers of copies, or are means;
# experts, which transformers fuses in memory.
GROWTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-doubled": ("llama-tied", {"width": 96, "depth": 3}),
    "llama": ("llama-tied", {"width": 120}),
    "gpt2": ("gpt2-lm", {"width": 72}),
    "mixtral": ("mixtral", {"width": 96}),
}
# What copies do not carry: a frame, a head that was the embedding, parts of experts, experts beside the others.
OPEN: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "frames": ("bert-cls", {"width": 72}, {FRAMES}),
    "untied": ("llama-tied", {"width": 96, "set": {"tie_word_embeddings": False}}, {UNTIED}),
    "parts": ("mixtral", {"set": TWICE | {"intermediate_size": 10}}, {PARTS}),
    "unused": ("gpt-oss", {"set": {"num_local_experts": 6}}, {UNUSED}),
}
Gradients = list[dict[str, Tensor]]


class Lion(torch.optim.Optimizer):
    """The update of the paper (Chen et al., 2023), and its one moment."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p -= group["lr"] * moment.lerp(p.grad, 1 - group["betas"][0]).sign()
                moment.lerp_(p.grad, 1 - group["betas"][1])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9, nesterov=True),
    "lion": lambda params: Lion(params, lr=0.0),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.0, ns_steps=1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.0, amsgrad=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.0),
    "adafactor-of-transformers": lambda params: Adafactor(params, lr=0.0, relative_step=False),
}


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[lemonx.Plan, Gradients, Gradients]]:
    """A growth with the gradients of a few batches, by module name, of the source and of the target."""

    @cache
    def make(name: str) -> tuple[lemonx.Plan, Gradients, Gradients]:
        model, sizes, *_ = (GROWTHS | OPEN)[name]
        folder = tmp_path_factory.mktemp(name)
        pico.save(pico.PICO[model](), folder / "s")
        plan = lemonx.expand(folder / "s", folder / "t", free=EVEN, verify=False, **sizes).plan
        kind = type(pico.PICO[model]())
        return plan, *([_of(folder / side, kind, seed) for seed in range(BATCHES)] for side in "st")  # type: ignore[return-value]

    return make


def _of(folder: Path, kind: Any, seed: int) -> dict[str, Tensor]:
    model = with_gradients(folder, kind, seed=seed)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def gathered(make: Callable[[Any], torch.optim.Optimizer], seen: Gradients) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps after these gradients, by name; its learning rate is 0."""
    params = {name: nn.Parameter(torch.ones_like(g)) for name, g in seen[0].items()}
    optimizer = make(list(params.values()))
    for gradients in seen:
        for name, p in params.items():
            p.grad = gradients[name].to(p.dtype)
        optimizer.step()
    return {name: dict(optimizer.state[p]) for name, p in params.items() if p in optimizer.state}


# Every optimizer on a decoder; where something else is at stake, those that differ in it.
CASES = [(growth, optimizer) for growth in ("llama-doubled", "llama") for optimizer in OPTIMIZERS]
CASES += [("gpt2", "sgd"), ("gpt2", "adam"), ("mixtral", "adam"), ("mixtral", "adafactor")]


@pytest.mark.parametrize(("growth", "optimizer"), CASES)
def test_grown_state_is_what_the_larger_model_s_optimizer_gathers(grown: Any, growth: str, optimizer: str) -> None:
    plan, small, large = grown(growth)
    state, own = (gathered(OPTIMIZERS[optimizer], seen) for seen in (small, large))
    assert set(compared(plan, state, own)) == _expected(growth, optimizer)


def compared(plan: lemonx.Plan, state: Any, own: Any) -> dict[str, frozenset[str]]:
    """How well grown state is said to be known, and why not better; what is said to be exact is what the target has."""
    found, rules = grow_optimizer(plan, state), StateGrowth(plan)
    assert found.keys() == own.keys()
    floors = _floors(own)
    said: dict[str, frozenset[str]] = {}
    for name, entry in own.items():
        origin = rules.origin(name)
        assert origin is not None and found[name].keys() == entry.keys()
        status, why = rules.status(name, forms(state[origin]))
        said[status] = said.get(status, frozenset()) | why
        worst = 0.0
        for key, value in entry.items():
            if key in (COUNT, "RMS"):
                kept = state[origin][key]
                assert found[name][key] == (0 * kept if status == FRESH and key == COUNT else kept)
                continue
            assert found[name][key].shape == value.shape and found[name][key].dtype == value.dtype
            far = float((found[name][key] - value).abs().max()) / max(float(value.abs().max()), floors[key])
            if status == FRESH:
                assert not found[name][key].any()
            elif status == EXACT:
                assert far <= TOLERANCE, (name, key)
            worst = max(worst, far)
        # What is only expected is so for a reason: it differs.
        assert why != {UNEQUAL} or worst > 1e-6, name
    return said


def _floors(own: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What cancels to zero is rounding: it is held against the largest of its kind; squares against squares."""
    largest: dict[str, float] = {}
    for entry in own.values():
        for key, value in entry.items():
            largest[key] = max(largest.get(key, 0.0), float(torch.as_tensor(value).abs().max()))
    return {
        key: value * (SMALLEST if key in ("exp_avg", "momentum_buffer") else SMALLEST**2)
        for key, value in largest.items()
    }


def _expected(growth: str, optimizer: str) -> set[str]:
    if growth == "llama-doubled":
        return {EXACT, FRESH}
    if growth == "gpt2":
        return {EXACT, EXPECTED}
    factored = optimizer.startswith("adafactor")
    return {EXACT, EXPECTED} if factored and growth == "llama" else {EXACT}


@pytest.mark.parametrize("growth", OPEN)
def test_what_does_not_follow_is_fresh_and_the_rest_is_not(grown: Any, growth: str) -> None:
    plan, small, large = grown(growth)
    said = compared(plan, *(gathered(OPTIMIZERS["adam"], seen) for seen in (small, large)))
    assert EXACT in said and said[FRESH if growth != "unused" else EXPECTED] >= OPEN[growth][2]


def test_momentum_of_what_reads_a_frame_is_exact(grown: Any) -> None:
    """m* = D m E^T with the frame E of each block. Squares of mixtures are expected; behind a norm nothing is known."""
    plan, small, large = grown("frames")
    rules = StateGrowth(plan)
    momentum = [gathered(OPTIMIZERS["sgd"], seen) for seen in (small, large)]
    found = grow_optimizer(plan, momentum[0])
    reading = [
        f"bert.encoder.layer.{i}.attention.self.{one}.weight" for i in (0, 1) for one in ("query", "key", "value")
    ]
    for name in (*reading, "bert.pooler.dense.weight"):
        own, made = momentum[1][name]["momentum_buffer"], found[name]["momentum_buffer"]
        assert (made - own).abs().max() <= TOLERANCE * own.abs().max()
        assert rules.status(name, forms({"momentum_buffer": 0})) == (EXACT, set())
        assert rules.status(name, forms({"exp_avg": 0, "exp_avg_sq": 0, "step": 0})) == (EXPECTED, {SQUARES})
    assert rules.status("bert.encoder.layer.1.intermediate.dense.weight", forms({"momentum_buffer": 0}))[0] == FRESH
    # Their biases have a part of copies and a part of spare neurons.
    bias, neurons = (
        "bert.encoder.layer.1.intermediate.dense.bias",
        len(small[0]["bert.encoder.layer.1.intermediate.dense.bias"]),
    )
    own, made = momentum[1][bias]["momentum_buffer"], found[bias]["momentum_buffer"]
    assert (made - own)[:neurons].abs().max() <= TOLERANCE * own.abs().max() and not made[neurons:].any()
    assert rules.status(bias, forms({"momentum_buffer": 0})) == (EXPECTED, {SPARE})


def forms(state: Mapping[str, Any]) -> Any:
    return layout_of(state.keys(), "a parameter").forms(state.keys())


def test_a_mean_s_second_moment_is_only_expected(grown: Any) -> None:
    """The last norm before a tied decoder takes means of gradients: SGD's moment follows, and Adam's squares do not."""
    plan, small, large = grown("gpt2")
    rules, name = StateGrowth(plan), "transformer.ln_f.bias"
    state, own = (gathered(OPTIMIZERS["adam"], seen)[name] for seen in (small, large))
    assert rules.status(name, forms({"momentum_buffer": 0})) == (EXACT, set())
    assert rules.status(name, forms(state)) == (EXPECTED, {SQUARES})
    found = grow_optimizer(plan, {name: state})[name]
    assert (found["exp_avg"] - own["exp_avg"]).abs().max() <= TOLERANCE * own["exp_avg"].abs().max()
    squares, means = own["exp_avg_sq"], range(48, 72)
    assert (found["exp_avg_sq"] - squares)[:48].abs().max() <= TOLERANCE * squares.max()
    assert (found["exp_avg_sq"] - squares)[means].abs().min() > 0.1 * squares[means].max()


def test_a_mean_of_steps_is_copied(grown: Any) -> None:
    """The first moment of transformers' Adafactor averages steps, not gradients: each copy steps as its unit does."""
    plan, small, large = grown("llama-doubled")
    name = "model.layers.0.mlp.up_proj.weight"
    state, own = (
        gathered(lambda params: Adafactor(params, lr=1e-3, relative_step=False, beta1=0.9), seen)[name]
        for seen in (small, large)
    )
    found = grow_optimizer(plan, {name: state})[name]
    assert StateGrowth(plan).status(name, forms(state)) == (EXPECTED, {SIZES})
    assert found["exp_avg"].equal(state["exp_avg"].repeat(2, 2))
    # Here all steps are clipped to one size, so nothing is lost.
    torch.testing.assert_close(found["exp_avg"], own["exp_avg"], rtol=1e-3, atol=0)


# ----------------------------------------------------------------- 8 bits


def test_eight_bits_are_read_and_written_as_bitsandbytes_does(grown: Any) -> None:
    """Dequantised, grown and quantised again by lemonx, and by the library's own functions: the same bytes."""
    plan, small, _ = grown("llama-doubled")
    half = [{name: g.float() for name, g in seen.items()} for seen in small]
    state = gathered(lambda params: bitsandbytes.optim.AdamW8bit(params, lr=0.0, min_8bit_size=2000), half)
    whole = {name: _dequantised(entry) for name, entry in state.items()}
    found, expected = grow_optimizer(plan, state), grow_optimizer(plan, whole)
    kinds = set()
    for name, entry in found.items():
        kinds.add(entry["state1"].dtype)
        assert entry["step"] == (0 if not expected[name]["exp_avg"].any() else BATCHES)
        for key, moment in (("1", expected[name]["exp_avg"]), ("2", expected[name]["exp_avg_sq"])):
            if entry["state1"].dtype == torch.float32:
                assert entry[f"state{key}"].equal(moment)
                continue
            theirs, how = blockwise.quantize_blockwise(moment, code=entry[f"qmap{key}"], blocksize=256)
            assert entry[f"absmax{key}"].equal(how.absmax)
            # The library rounds a few numbers to a neighbour of the nearest code, and lemonx none.
            far = [
                (_read(codes, entry, key) - moment).abs() for codes in (entry[f"state{key}"], theirs.view_as(moment))
            ]
            assert bool((far[0] <= far[1] * (1 + 1e-5)).all())
    assert kinds == {torch.uint8, torch.float32}


def _dequantised(entry: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"step": entry["step"]}
    for key, name in (("1", "exp_avg"), ("2", "exp_avg_sq")):
        value = entry[f"state{key}"]
        result[name] = _read(value, entry, key) if value.dtype == torch.uint8 else value
    return result


def _read(value: Tensor, entry: Mapping[str, Any], key: str) -> Tensor:
    scales, codes = entry[f"absmax{key}"], entry[f"qmap{key}"]
    return blockwise.dequantize_blockwise(value, absmax=scales, code=codes, blocksize=256).view_as(value)


def test_bitsandbytes_goes_on_with_what_was_grown(grown: Any) -> None:
    """Its own optimizer loads the state by position, wrapped as it saves it, and takes a step with it."""
    plan, small, large = grown("llama-doubled")
    params = {name: nn.Parameter(torch.ones_like(g).float()) for name, g in small[0].items()}
    optimizer = bitsandbytes.optim.Lion8bit(list(params.values()), lr=1e-3)
    for name, p in params.items():
        p.grad = small[0][name].float()
    optimizer.step()
    saved = optimizer.state_dict()["state"]
    assert any("__bnb_optimizer_quant_state__" in entry for entry in saved.values())
    found = grow_optimizer(plan, {name: saved[i] for i, name in enumerate(params)})
    wide = {name: nn.Parameter(torch.ones_like(g).float()) for name, g in large[0].items()}
    resumed = bitsandbytes.optim.Lion8bit(list(wide.values()), lr=1e-3)
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": list(range(len(wide)))}]
    resumed.load_state_dict({"state": {i: found[name] for i, name in enumerate(wide)}, "param_groups": groups})
    name = "model.layers.0.mlp.up_proj.weight"
    kept = {key: value.clone() for key, value in resumed.state[wide[name]].items() if torch.is_tensor(value)}
    assert kept["state1"].equal(flattened(found[name])["state1"])
    for key, p in wide.items():
        p.grad = large[0][key].float()
    resumed.step()
    assert not resumed.state[wide[name]]["state1"].equal(kept["state1"]) and bool((wide[name] != 1).any())


# ----------------------------------------------------------------- on disk


DISK: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params),
    "adafactor-of-transformers": lambda params: Adafactor(params),
    "eight-bits": lambda params: bitsandbytes.optim.AdamW8bit(params, lr=1e-3, min_8bit_size=2000),
}


@pytest.mark.parametrize("name", DISK)
def test_folders_hold_what_is_grown_in_memory(name: str, tmp_path: Path) -> None:
    """A checkpoint as Trainer saves it, by position, and tensors by name: both become what memory has."""
    model = pico.PICO["llama-untied"]().float()
    optimizer = DISK[name](list(model.parameters()))
    batch = pico.inputs(model, 0)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    folder, saved = pico.save(model, tmp_path / "s", torch.float32), optimizer.state_dict()
    torch.save(saved, folder / "optimizer.pt")
    torch.save({}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    options: dict[str, Any] = {"width": 72, "depth": 3, "free": EVEN}
    done = lemonx.expand(folder, tmp_path / "t", with_optimizer=True, verify=False, **options)
    names = [key for key, _ in model.named_parameters()]
    expected = grow_optimizer(done.plan, {names[at]: entry for at, entry in saved["state"].items()})
    found = torch.load(tmp_path / "t" / "optimizer.pt", weights_only=True)["state"]
    large = list(type(model).from_pretrained(tmp_path / "t").named_parameters())
    assert len(found) == len(large) == len(expected)
    for at, (key, _) in enumerate(large):
        assert_same(flattened(found[at]), flattened(expected[key]))
    assert (done.certificate.optimizer.reasons.get(DECAY, 0) > 0) == (name == "sgd")  # type: ignore[union-attr]
    (folder / "optimizer.pt").unlink()
    tensors = {
        f"state.{names[at]}.{key}": torch.as_tensor(value).contiguous().clone()
        for at, entry in saved["state"].items()
        for key, value in flattened(entry).items()
    }
    (folder / "optimizer").mkdir()
    save_file(tensors, folder / "optimizer" / "model.safetensors")
    lemonx.expand(folder, tmp_path / "n", with_optimizer=True, verify=False, **options)
    by_name = load_file(tmp_path / "n" / "optimizer" / "model.safetensors")
    for key, entry in expected.items():
        assert_same({field: by_name.pop(f"state.{key}.{field}") for field in flattened(entry)}, flattened(entry))
    assert not by_name


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])) for key in expected)
