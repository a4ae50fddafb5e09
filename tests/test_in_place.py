"""A model grows in a running loop: the same objects, the same loss, and training goes on as it would elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lemonx
import pico
from lemonx.algebra.free_parameters import EVEN
from lemonx.errors import Refused
from lemonx.models.building import skeleton
from lemonx.optimizer_state import grow_optimizer
from lemonx.optimizer_state.grow import DECAY
from lemonx.verification.fitting import _differences
from lemonx.verification.float64 import Float64

# Float64 carries 1e-16, and a loss is a sum of a few thousand products.
TOLERANCE = 1e-12
# Decoders, tied and transposed; a Post-LN encoder, whose norms move; fused experts; two towers.
GROWTHS: dict[str, dict[str, Any]] = {
    "llama-tied": {"width": 96, "depth": 4},
    "gpt2-lm": {"width": 72, "depth": 3},
    "bert-mlm": {"width": 96, "depth": 3},
    "mixtral": {"width": 96, "depth": 3},
    "clip": {"width": "2x"},
}


def loss_of(model: Any, seed: int = 1) -> Tensor:
    with Float64():
        found = model(**pico.inputs(model, seed=seed))
        values = [value for name, value in found.items() if name.startswith("logits") or name.endswith("logits")]
        return torch.stack([(value**2).mean() + value.mean() for value in values]).sum()


def step(model: Any, *optimizers: torch.optim.Optimizer, seed: int = 1) -> Tensor:
    loss = loss_of(model, seed)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def without_dtype(config: Any) -> Any:
    """A config without the dtype that it was saved in."""
    if not isinstance(config, dict):
        return config
    return {key: without_dtype(value) for key, value in config.items() if key != "dtype"}


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


@pytest.mark.parametrize("name", GROWTHS)
def test_it_becomes_what_expand_makes(name: str) -> None:
    """Bit for bit, in every module: parameters, buffers, sizes, config; with the loss and the optimizer's state."""
    model: Any = pico.PICO[name]().eval()
    optimizer = adam(model)
    alive = step(model, optimizer)  # as in a loop, where the last loss is not freed before the next is computed
    before, state = loss_of(model), {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    expected = lemonx.expand(copy.deepcopy(model), verify=False, **GROWTHS[name])
    modules = dict(model.named_modules())
    grown = lemonx.grow_in_place(model, optimizer, verify=False, **GROWTHS[name])
    assert grown.model is model and dict(model.named_modules()).items() >= modules.items()
    assert all(value.equal(expected.state_dict()[key]) for key, value in model.state_dict().items())
    assert without_dtype(model.config.to_dict()) == without_dtype(expected.config.to_dict())
    assert not list(_differences(model, skeleton(grown.plan.target_config)))
    assert all(
        module.config is model.config
        for module in model.modules()
        if type(getattr(module, "config", 0)) is type(model.config)
    )
    after = loss_of(model)
    assert abs(float(after.detach() - before.detach())) <= TOLERANCE * abs(before.item())
    held = grow_optimizer(grown.plan, state)
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
    for key, parameter in model.named_parameters():
        assert all(torch.equal(optimizer.state[parameter][k], value) for k, value in held[key].items())
    assert len(optimizer.state) == len(held) and sum(grown.state.values()) == len(held)
    assert step(model, optimizer).item() == after.item() != loss_of(model).item()
    assert alive.grad_fn is not None


@pytest.fixture
def llama() -> tuple[Any, torch.optim.AdamW]:
    model = pico.PICO["llama-untied"]()
    optimizer = adam(model)
    step(model, optimizer)
    return model, optimizer


def test_what_is_saved_afterwards_is_an_ordinary_checkpoint(llama: Any, tmp_path: Path) -> None:
    """Loaded by transformers and torch alone, model, optimizer and schedule go on to the same losses."""
    model, optimizer = llama
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (at + 1))
    random = torch.get_rng_state()
    lemonx.grow_in_place(model, optimizer, width=96, depth=3)  # verified
    assert torch.get_rng_state().equal(random)
    model.save_pretrained(tmp_path)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    other: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    resumed = adam(other)
    again = torch.optim.lr_scheduler.LambdaLR(resumed, lambda at: 1 / (at + 1))
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    other.train()
    for seed in range(3):
        losses = [step(m, o, seed=seed).item() for m, o in ((model, optimizer), (other, resumed))]
        schedule.step()
        again.step()
        assert losses[0] == losses[1] and schedule.get_last_lr() == again.get_last_lr()


def test_growing_twice_is_growing_on(llama: Any) -> None:
    model, optimizer = llama
    before = loss_of(model)
    lemonx.grow_in_place(model, optimizer, width=96, verify=False)
    step(model, optimizer)
    middle = loss_of(model)
    lemonx.grow_in_place(model, optimizer, depth=3, verify=False)
    assert float(loss_of(model)) == pytest.approx(float(middle), rel=TOLERANCE) and float(middle) != float(before)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam])
def test_state_that_cannot_grow_starts_from_zero_if_asked(kind: Any) -> None:
    """The refusal names the argument that helps, and it does. A second optimizer's state grows as ever."""
    model: Any = pico.PICO["llama-untied"]()
    head = [model.lm_head.weight]
    optimizer = kind([p for p in model.parameters() if p is not head[0]], lr=1e-4)
    other = torch.optim.AdamW(head, lr=1e-4)
    step(model, optimizer, other)
    before, kept = loss_of(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(Refused, match=r"can only grow.*: give fresh_state=True, and this state starts from zero$"):
        lemonx.grow_in_place(model, [optimizer, other], width=96, depth=3, verify=False)
    now = optimizer.state_dict()["state"]
    assert all(value.equal(now[at][key]) for at, entry in kept["state"].items() for key, value in entry.items())
    grown = lemonx.grow_in_place(model, [optimizer, other], width=96, depth=3, fresh_state=True, verify=False)
    words = dict(grown.tensors)
    assert words.pop("lm_head.weight") == "exact" and set(words.values()) == {"fresh"}
    assert grown.reasons[f"{kind.__name__} keeps what lemonx cannot grow"] == len(words)
    assert not optimizer.state and float(loss_of(model)) == pytest.approx(float(before), rel=TOLERANCE)
    step(model, optimizer, other)
    assert len(optimizer.state) == len(words) and float(loss_of(model)) != pytest.approx(float(before), rel=TOLERANCE)


def test_lbfgs_counts_its_parameters_anew() -> None:
    model: Any = pico.PICO["llama-untied"]()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.zero_grad()
    lemonx.grow_in_place(model, optimizer, width=96, fresh_state=True, verify=False)
    optimizer.step(closure)  # type: ignore[arg-type]
    assert optimizer.state


def test_groups_keep_their_settings_and_the_model_s_order() -> None:
    """Each new parameter joins the group of its origin; a group in another order, and a stranger in one, stay so."""
    model: Any = pico.PICO["llama-untied"]()
    named = dict(model.named_parameters())
    named["model.norm.weight"].requires_grad_(False)
    stranger = nn.Parameter(torch.ones(3))
    decay = [p for p in named.values() if p.ndim == 2]
    norms = [p for name, p in named.items() if p.ndim == 1 and p.requires_grad][::-1]
    optimizer = torch.optim.SGD(
        [{"params": [stranger, *decay], "weight_decay": 0.1}, {"params": norms, "lr": 1e-5}], lr=1e-4, momentum=0.9
    )
    stranger.grad = torch.ones(3)
    step(model, optimizer)
    groups = optimizer.param_groups
    grown = lemonx.grow_in_place(model, optimizer, depth=3, verify=False)
    # Only what does not decay is exact: SGD adds the decay to its gradients.
    exact = {name for name, word in grown.tensors.items() if word == "exact"}
    assert exact and all("norm" in name for name in exact) and grown.reasons[DECAY] == 16
    assert optimizer.param_groups is groups and [group["lr"] for group in groups] == [1e-4, 1e-5]
    names = {id(p): name for name, p in model.named_parameters()}
    assert groups[0]["params"][0] is stranger and optimizer.state[stranger]["momentum_buffer"].any()
    assert [names[id(p)] for p in groups[0]["params"][1:]] == [n for n, p in model.named_parameters() if p.ndim == 2]
    norms = [names[id(p)] for p in groups[1]["params"]]
    assert norms[:2] == [f"model.layers.{i}.post_attention_layernorm.weight" for i in (1, 2)] and len(norms) == 6
    assert not model.model.norm.weight.requires_grad and "model.norm.weight" not in norms


def test_muon_beside_adam() -> None:
    """Two optimizers that share a model: both go on, and one of them alone is refused."""
    model: Any = pico.PICO["llama-untied"]()
    matrices = torch.optim.Muon([p for p in model.model.layers.parameters() if p.ndim == 2], lr=1e-3)
    mine = {id(p) for group in matrices.param_groups for p in group["params"]}
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in mine], lr=1e-4)
    step(model, matrices, rest)
    with pytest.raises(Refused, match=r"another optimizer \(AdamW\)"):
        lemonx.grow_in_place(model, matrices, width=96, verify=False)
    lemonx.grow_in_place(model, [matrices, rest], width=96, free=EVEN, verify=False)
    held = [p for optimizer in (matrices, rest) for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()} and len(
        matrices.param_groups[0]["params"]
    ) == 14
    step(model, matrices, rest)


class Derived(hf.LlamaForCausalLM):
    """A user's own class: with a module, a buffer and a size of its own, which no checkpoint holds."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.noise, self.twice = nn.Dropout(0.5), 2 * config.hidden_size
        self.register_buffer("seen", torch.zeros(()), persistent=False)


def test_what_a_user_added_to_the_model_stays(llama: Any) -> None:
    """Modules, buffers and attributes that the config does not build are neither lost nor made anew."""
    plain, _ = llama
    plain.model.layers[0].mlp.probe, plain.model.layers[0].tag = nn.Identity(), "mine"
    plain.model.register_buffer("count", torch.ones(3), persistent=False)
    derived: Any = Derived(copy.deepcopy(plain.config)).double()
    noise, derived.noise.p = derived.noise, 0.7
    derived.seen += 5
    held = (plain.model.layers[0].mlp.probe, plain.model.count)
    for model in (plain, derived):
        lemonx.grow_in_place(model, None if model is derived else llama[1], width=96, depth=3, verify=False)
    assert (plain.model.layers[0].mlp.probe, plain.model.count) == held and plain.model.layers[0].tag == "mine"
    assert "count" not in plain.state_dict()
    assert derived.noise is noise and noise.p == 0.7 and derived.seen == 5 and derived.twice == 192


def test_modes_dropout_and_marks_follow_the_weights() -> None:
    """A block that comes from a frozen one is as still; what was set on parameters is set on those that follow."""
    model: Any = pico.PICO["gpt2-lm"]().train()
    model.transformer.h[0].eval().requires_grad_(False)
    for block in model.transformer.h:
        block.mlp.dropout.p = 0.25
    model.transformer.h[0].attn.attn_dropout.p = 0.5
    model.transformer.ln_f.weight.no_decay = True
    lemonx.grow_in_place(model, depth=4, verify=False)
    blocks = list(model.transformer.h)
    assert [block.training for block in blocks] == [False, False, True, True]
    assert [block.mlp.c_fc.training for block in blocks] == [False, False, True, True]
    assert [block.mlp.c_fc.weight.requires_grad for block in blocks] == [False, False, True, True]
    assert [block.mlp.dropout.p for block in blocks] == [0.25] * 4
    assert [block.attn.attn_dropout.p for block in blocks] == [0.5, 0.5, 0.0, 0.0]
    assert model.transformer.ln_f.weight.no_decay and model.training and model.transformer.ln_f.training


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad], ids=["inference", "no_grad"])
def test_it_grows_where_a_loop_validates(llama: Any, context: Any) -> None:
    model, optimizer = llama
    before = loss_of(model).item()
    with context():
        lemonx.grow_in_place(model, optimizer, width=96, depth=3, verify=False)
    after = step(model, optimizer)
    assert after.item() == pytest.approx(before, rel=TOLERANCE) and loss_of(model).item() != after.item()


def test_an_average_grows_before_its_model(llama: Any) -> None:
    """Left behind it would fail at its next update, so it is refused; grown with the same sizes it goes on."""
    model, optimizer = llama
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for _ in range(2)]
    step(model, optimizer)
    for average in averages:
        average.update_parameters(model)
    step(model, optimizer)
    growth: dict[str, Any] = {"width": 96, "depth": 3, "verify": False}
    with pytest.raises(Refused, match=r"an AveragedModel holds an average of the model.*grow that first"):
        lemonx.grow_in_place(model, optimizer, **growth)
    before = loss_of(averages[0].module).item()
    for average in averages:
        lemonx.grow_in_place(average.module, **growth)
    assert loss_of(averages[0].module).item() == pytest.approx(before, rel=TOLERANCE)
    lemonx.grow_in_place(model, optimizer, **growth)
    old = {name: p.detach().clone() for name, p in averages[0].module.named_parameters()}
    averages[0].update_parameters(model)
    new = dict(model.named_parameters())
    assert all(torch.allclose(p, (old[n] + new[n]) / 2) for n, p in averages[0].module.named_parameters())


class Inside(nn.Module):
    """A user's module with the model as an attribute, as Lightning has it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.net = model

    def forward(self, seed: int) -> Tensor:
        return loss_of(self.net, seed)


def test_a_wrapper_around_a_module_that_holds_the_model(llama: Any) -> None:
    """DistributedDataParallel lists the new parameters too, or gradients would no longer be exchanged."""
    model, optimizer = llama
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Inside(model), find_unused_parameters=True)
        wrapped(1).backward()
        optimizer.step()
        optimizer.zero_grad()
        lemonx.grow_in_place(model, optimizer, width=96, depth=3, verify=False)
        listed = {id(p) for p in wrapped._module_parameters}
        assert listed == {id(p) for p in model.parameters()} and wrapped.find_unused_parameters
        wrapped(1).backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------- what is refused, and leaves everything as it was


def _in_flight(model: Any, optimizer: Any) -> None:
    loss_of(model).backward()


def _hooked(model: Any, optimizer: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)


def _hooked_backward(model: Any, optimizer: Any) -> None:
    model.model.norm.register_full_backward_hook(lambda module, inputs, outputs: None)


def _hooked_parameter(model: Any, optimizer: Any) -> None:
    model.model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def _compiled(model: Any, optimizer: Any) -> None:
    model.model.layers[0].compile()


def _compiled_around(model: Any, optimizer: Any) -> Any:
    return torch.compile(model)


def _shared(model: Any, optimizer: Any) -> Any:
    outside = nn.Linear(48, 61, bias=False)
    outside.weight = model.lm_head.weight
    return outside


def _another(model: Any, optimizer: Any) -> Any:
    return torch.optim.SGD(model.model.norm.parameters(), lr=1.0)


class Outer(torch.optim.Optimizer):
    """As Lookahead is: around another optimizer, with the slow weights as its own state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.optimizer, self.param_groups = inner, inner.param_groups
        self.state.update({p: {"slow": p.detach().clone()} for group in inner.param_groups for p in group["params"]})


def _unknown(model: Any, optimizer: Any) -> None:
    optimizer.state[model.model.norm.weight]["prev"] = torch.ones(48)


def _diverged(model: Any, optimizer: Any) -> None:
    optimizer.state[model.model.norm.weight]["exp_avg"][0] = float("nan")


REFUSED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (_in_flight, "has a gradient.*after optimizer.step"),
    (_hooked, r"model\.layers\.0 has the hook <lambda>"),
    (_hooked_backward, r"model\.norm has the hook"),
    (_hooked_parameter, r"model\.norm\.weight has a hook"),
    (_compiled, "compiled for its present sizes"),
    (_compiled_around, "drop the compiled model"),
    (_shared, "a Linear outside of the model shares a parameter"),
    (_another, r"another optimizer \(SGD\)"),
    (_unknown, "keeps .*prev"),
    (_diverged, "NaN or Inf"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_grow_is_refused_and_untouched(llama: Any, change: Callable[[Any, Any], Any], says: str) -> None:
    model, optimizer = llama
    kept = change(model, optimizer)  # what would go on with the old parameters stays alive
    weights, config = dict(model.named_parameters()), copy.deepcopy(model.config.to_dict())
    values = {name: p.detach().clone() for name, p in weights.items()}
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(lemonx.LemonxError, match=says) as caught:
        lemonx.grow_in_place(model, optimizer, ffn=150, verify=False)
    assert "\n" not in str(caught.value)
    now = dict(model.named_parameters())
    assert now.keys() == weights.keys() and all(now[name] is p for name, p in weights.items())
    assert all(now[name].equal(value) for name, value in values.items()) and model.config.to_dict() == config
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"] and after["state"].keys() == state["state"].keys()
    assert kept is None or kept is not model
    if kept is not None:
        del kept
        lemonx.grow_in_place(model, optimizer, ffn=150, verify=False)
        assert model.config.intermediate_size == 150


def test_mistakes_in_the_call(llama: Any) -> None:
    model, optimizer = llama
    with pytest.raises(Refused, match="another optimizer"):
        lemonx.grow_in_place(model, width=96, verify=False)
    with pytest.raises(Refused, match="holds no parameter of this model"):
        lemonx.grow_in_place(model, [optimizer, adam(nn.Linear(2, 2))], width=96, verify=False)
    with pytest.raises(TypeError, match="an optimizer of torch, not a dict"):
        lemonx.grow_in_place(model, {}, width=96)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="Outer keeps a state of its own around AdamW"):
        lemonx.grow_in_place(model, Outer(optimizer), width=96, verify=False)
    with pytest.raises(TypeError, match="for a model under FSDP2"):
        lemonx.grow_in_place(model, optimizer, width=96, shard=lambda model: None)
    with pytest.raises(lemonx.BadTarget, match="no size was given"):
        lemonx.grow_in_place(model, optimizer)
    with pytest.raises(TypeError, match="not a Linear"):
        lemonx.grow_in_place(nn.Linear(2, 2), width=96)  # type: ignore[arg-type]
    assert model.config.hidden_size == 48


def test_parts_with_configs_of_their_own_and_names_in_groups() -> None:
    """The halves of a T5 have copies of its config; an optimizer may keep the names of its parameters."""
    model: Any = pico.PICO["t5"]().double()
    optimizer = torch.optim.AdamW([(f"module.{name}", p) for name, p in model.named_parameters()])
    before = step(model, optimizer) and loss_of(model)
    lemonx.grow_in_place(model, optimizer, width="2x", depth="+1", verify=False)
    assert float(loss_of(model)) == pytest.approx(float(before), rel=TOLERANCE)
    for part in (model.encoder, model.decoder):
        assert (part.config.d_model, part.config.num_layers) == (model.config.d_model, len(part.block))
    (group,), parameters = optimizer.param_groups, dict(model.named_parameters())
    assert [f"module.{name}" for name in parameters] == group["param_names"]
    assert all(
        parameters[name.removeprefix("module.")] is p
        for name, p in zip(group["param_names"], group["params"], strict=True)
    )
