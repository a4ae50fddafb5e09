"""`lemonx.expand(model, ...)`: the larger model is like the given one in all but its sizes, or there is one line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn

import lemonx
import pico
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.models.in_memory import opened
from lemonx.verification import running
from lemonx.verification.fitting import require_as_built
from lemonx.verification.float64 import Float64


def mixed(name: str) -> Any:
    """A pico model in bfloat16, its vectors (norms, biases) in float32: as many are trained."""
    model = pico.PICO[name]().float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    return model


def difference(model: Any, large: Any) -> float:
    batch = pico.inputs(model, seed=5)
    with Float64():
        small, wide = (pico.outputs(copy.deepcopy(m).double().eval(), batch) for m in (model, large))
    return float((small - wide).abs().max() / small.abs().max())


def assert_one_line(kind: type[Exception], says: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "t5-untied"])
def test_every_parameter_keeps_its_dtype(name: str) -> None:
    """Fused experts too, which a file holds one by one. What is left is the rounding of a norm's gains in float32."""
    model = mixed(name)
    large = lemonx.expand(model, width=72, verify=False)
    dtypes = {key: value.dtype for key, value in large.state_dict().items()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert all(dtypes[key] == value.dtype for key, value in model.state_dict().items())
    assert difference(model, large) <= 1e-6


@pytest.mark.parametrize(
    ("name", "growth"),
    [("llama-tied", {"width": 72, "depth": 5}), ("mixtral", {"width": "2x"}), ("resnet-basic", {"width": "2x"}),
     ("whisper", {"depth": 4})],
)  # fmt: skip
def test_what_is_grown_in_memory_is_what_a_folder_becomes(name: str, growth: Any, tmp_path: Path) -> None:
    model: Any = pico.PICO[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "small")
    folder = lemonx.expand(tmp_path / "small", tmp_path / "large", **growth, verify=False)
    large = lemonx.expand(model, **growth)  # verified: what is measured leaves no trace in either model
    large.save_pretrained(tmp_path / "saved")
    one, other = (load_file(place / "model.safetensors") for place in (folder.path, tmp_path / "saved"))
    assert one.keys() == other.keys() and all(value.equal(other[key]) for key, value in one.items())
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


def test_a_model_that_is_too_large_to_run_whole_is_verified_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "WHOLE", 1)
    model = pico.PICO["llama-tied"]()
    assert difference(model, lemonx.expand(model, depth=3)) <= 1e-10


def test_buffers_keep_their_dtype() -> None:
    model = pico.PICO["llama-untied"]().double()
    large = lemonx.expand(model, width=72, verify=False)
    assert {buffer.dtype for buffer in large.buffers()} == {torch.float64}
    resnet = pico.PICO["resnet-basic"]().half()
    counted = {name: buffer.dtype for name, buffer in resnet.named_buffers()}
    grown = lemonx.expand(resnet, width="2x", verify=False)
    assert {name: buffer.dtype for name, buffer in grown.named_buffers()} == counted


def test_the_dtype_may_be_asked_for() -> None:
    large = lemonx.expand(mixed("llama-tied"), ffn=150, dtype="float32", verify=False)
    assert {parameter.dtype for parameter in large.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_what_was_frozen_is_frozen(name: str) -> None:
    model: Any = pico.PICO[name]()
    model.model.layers[0].requires_grad_(False)
    model.model.norm.requires_grad_(False)
    large: Any = lemonx.expand(model, depth=4, verify=False)
    trained = [{p.requires_grad for p in layer.parameters()} for layer in large.model.layers]
    assert trained == [{False}, {False}, {True}, {True}]  # two blocks each
    assert not large.model.norm.weight.requires_grad and large.model.embed_tokens.weight.requires_grad


def test_tied_weights_stay_one() -> None:
    large: Any = lemonx.expand(pico.PICO["llama-tied"](), width=72, verify=False)
    assert large.lm_head.weight is large.model.embed_tokens.weight


def test_settings_stay() -> None:
    model: Any = pico.PICO["gpt2-lm"]().train()
    model.set_attn_implementation("eager")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.transformer.h[0].eval()
    model.transformer.ln_f.eval()
    model.generation_config.update(num_beams=3, eos_token_id=[2, 5], max_new_tokens=7)
    model.generation_config.of_my_own = {"kept": True}
    before, generation = copy.deepcopy(model.config.to_dict()), model.generation_config.to_dict()
    large: Any = lemonx.expand(model, width=72, verify=False)
    assert large.config._attn_implementation == "eager"
    assert large.training and not large.transformer.ln_f.training and large.transformer.h[1].training
    assert large.is_gradient_checkpointing
    assert large.transformer.h[0]._gradient_checkpointing_func.keywords == {"use_reentrant": True}
    assert large.generation_config.to_dict() == generation
    assert model.config.to_dict() == before and large.name_or_path == model.name_or_path
    assert large.config.architectures == model.config.architectures


def test_parts_keep_their_own_attention() -> None:
    model: Any = pico.PICO["clip"]()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    large: Any = lemonx.expand(model, width="2x", verify=False)
    assert large.config.text_config._attn_implementation == "eager"
    assert large.config.vision_config._attn_implementation == "sdpa"


# Wrappers and models that are not whole


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrappers_are_taken_off(group: None) -> None:
    model = pico.PICO["llama-tied"]()
    parallel = nn.parallel.DistributedDataParallel(model)
    for wrapped in (torch.compile(model), nn.DataParallel(model), parallel, torch.compile(parallel)):
        large = lemonx.expand(wrapped, ffn=150, verify=False)  # type: ignore[arg-type]
        assert type(large) is hf.LlamaForCausalLM and large.config.intermediate_size == 150


def test_a_sharded_model_is_refused(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = pico.PICO["llama-tied"]()
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    assert_one_line(Refused, "sharded over processes.*load_expanded", lambda: lemonx.expand(model, width=72))


def _on_meta(model: Any) -> None:
    model.model.norm.to("meta")


def _offloaded(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def _quantised(model: Any) -> None:
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def _adapted(model: Any) -> None:
    model._hf_peft_config_loaded = True  # as add_adapter leaves it


def _adapted_inside(model: Any) -> None:
    import peft

    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))  # and the model is still held


def _shared(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _replaced(model: Any) -> None:
    class Odd(Tensor):
        pass

    model.lm_head.weight = nn.Parameter(torch.ones(61, 48).as_subclass(Odd))


ODD: list[tuple[Callable[[Any], None], str]] = [
    (_on_meta, "model.norm.weight is on the meta device.*load the model's weights first"),
    (_offloaded, "accelerate: load it without device_map"),
    (_quantised, "quantised: call model.dequantize"),
    (_adapted, "PEFT: merge them first"),
    (_adapted_inside, "PEFT: merge them first"),
    (_shared, "are one tensor, but the config does not tie them: set tie_word_embeddings"),
    (_replaced, "lm_head.weight is a Odd, not a plain tensor"),
]


@pytest.mark.parametrize(("change", "says"), ODD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_that_is_not_whole_is_refused(change: Callable[[Any], None], says: str) -> None:
    model = pico.PICO["llama-untied"]()
    change(model)
    assert_one_line(Refused, says, lambda: lemonx.expand(model, width=72))


def test_something_else_is_a_type_error() -> None:
    for other in (nn.Linear(2, 2), 5, None):
        assert_one_line(TypeError, "takes a folder or a model of transformers, not a", lambda: lemonx.expand(other))  # type: ignore[arg-type] # noqa: B023


class Mine(hf.LlamaForCausalLM):
    """As a user would derive one, with nothing but conveniences."""

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _init_weights(self, module: Any) -> None:
        """Draw weights as torch's tutorials do: up to 5.12.1, transformers did so after it had loaded them."""
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)


class Doubled(hf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        result = super().forward(*args, **kwargs)
        result.logits = 2 * result.logits
        return result


class Wanting(Mine):
    def __init__(self, config: Any, more: int) -> None:
        super().__init__(config)


class Strange(hf.PreTrainedModel):
    config_class = hf.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.only = nn.Linear(3, 3)
        self.post_init()


def test_a_class_of_the_users_own() -> None:
    config = pico.PICO["llama-untied"]().config
    mine = Mine(config).double()
    large = lemonx.expand(mine, ffn=150)  # verified, as the class it is derived from
    assert type(large) is Mine and large.count() > mine.count() and difference(mine, large) < 1e-12
    assert large.config.architectures == mine.config.architectures
    assert_one_line(Refused, "Doubled has its own forward", lambda: lemonx.expand(Doubled(config), ffn=150))
    assert type(lemonx.expand(Doubled(config), ffn=150, verify=False)) is Doubled
    wanting = Wanting(config, 1)
    assert_one_line(Refused, "cannot load the expanded Wanting", lambda: lemonx.expand(wanting, ffn=150, verify=False))
    strange = Strange(hf.LlamaConfig(attn_implementation="eager"))
    assert_one_line(Refused, "Strange is neither a class of transformers", lambda: lemonx.expand(strange, ffn=150))


# ----------------------------------------------------------------- what a model is beside its weights and its config


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _other_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def _other_config(model: Any) -> None:
    model.config.rms_norm_eps = 0.3


def _other_speeds(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


def _hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


def _hooked_before(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def _patched(model: Any) -> None:
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: 2 * forward(x)


def _biased(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.ones(61, dtype=torch.float64))


def _wrapped(model: Any) -> None:
    class Tripled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 3 * super().forward(input)

    model.model.layers[0].mlp.down_proj.__class__ = Tripled


def _parametrised(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


def _shortened(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


CHANGED: list[tuple[Callable[[Any], None], str]] = [
    (_other_activation, "model.layers.0.mlp.act_fn is GELU, where its config makes SiLU"),
    (_other_eps, "model.norm has variance_epsilon = 0.5, where its config makes it 1e-0"),
    (_other_config, "model.layers.0.input_layernorm has variance_epsilon = 1e-0., where its config makes it 0.3"),
    (_other_speeds, "model.rotary_emb.inv_freq holds other numbers"),
    (_hooked, "model.layers.0.mlp has the hook <lambda>"),
    (_hooked_before, "model.norm has the hook <lambda>"),
    (_patched, "model.layers.1.mlp has a forward of its own"),
    (_biased, r"lm_head.bias is a tensor of shape \[61\], where its config makes it no tensor"),
    (_wrapped, "model.layers.0.mlp.down_proj is Tripled, where its config makes Linear"),
    (_parametrised, "lm_head is ParametrizedLinear, where its config makes Linear"),
    (_shortened, "there is no model.layers.1, which its config makes"),
]


@pytest.mark.parametrize(("change", "says"), CHANGED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_only_the_object_knows_is_refused(change: Callable[[Any], None], says: str) -> None:
    """The larger model is built from the config and the weights: it would not have the change."""
    model = pico.PICO["llama-untied"]().double()
    change(model)
    assert_one_line(Refused, f"{says}.*larger model is built from the config", lambda: lemonx.expand(model, ffn=150))


def _resized(model: Any) -> None:
    model.resize_token_embeddings(70)


def _other_padding(model: Any) -> None:
    model.config.pad_token_id = 3


def _in_mixed_precision(model: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run in this process may have set another
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "forward" in vars(model)


def _prepared_for_training(model: Any) -> None:
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()  # a hook of transformers' own
    model.config.attention_dropout = 0.1


@pytest.mark.parametrize("change", [_resized, _other_padding, _in_mixed_precision, _prepared_for_training])
def test_what_changes_no_output_is_no_obstacle(change: Callable[[Any], None]) -> None:
    model = pico.PICO["llama-untied"]().double()
    change(model)
    assert difference(model, lemonx.expand(model, ffn=150)) <= 1e-10


def test_frequencies_that_the_last_text_left_behind_are_no_obstacle() -> None:
    config = copy.deepcopy(pico.PICO["llama-untied"]().config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = hf.LlamaForCausalLM(config).double()
    first = model.model.rotary_emb.inv_freq.clone()
    model(torch.ones(1, 300, dtype=torch.long))
    assert not torch.equal(first, model.model.rotary_emb.inv_freq)
    assert difference(model, lemonx.expand(model, ffn=150)) <= 1e-10


@pytest.mark.parametrize("name", sorted(pico.PICO))
def test_every_model_is_as_its_config_builds_it(name: str, tmp_path: Path) -> None:
    """Freshly built, and loaded in another dtype."""
    model = pico.PICO[name]()
    model.save_pretrained(tmp_path / "saved")
    with Checkpoint.open(tmp_path / "saved") as saved, opened(model, tmp_path / "settings", verify=True) as held:
        assert held.config == saved.config and held.companions.keys() == saved.companions.keys()
        assert {**held.tensors}.keys() == {**saved.tensors}.keys()
        assert all(held.read(name).equal(saved.read(name)) for name in saved.tensors)
    require_as_built(model, held.config)
    loaded = type(model).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    require_as_built(loaded, held.config)
