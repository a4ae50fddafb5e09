"""Under Float64 a model computes in float64 throughout, whatever its code asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lemonx.verification.float64 import Float64
from pico import PICO, inputs, outputs, save


class Float32Ops(TorchDispatchMode):
    """Collects the names of the operators that return float32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result)):
            self.seen.add(str(func))
        return result


def float32_ops(model: PreTrainedModel) -> set[str]:
    """Returns the operators of one forward pass that return float32."""
    batch = inputs(model, seed=1)
    with Float32Ops() as ops:
        outputs(model, batch)
    return ops.seen


@pytest.mark.parametrize("name", PICO)
def test_a_model_loaded_and_run_in_it_has_no_float32(name: str, tmp_path: Path) -> None:
    model = PICO[name]()
    save(model, tmp_path, torch.float32)
    with Float64():
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
        dtypes = {tensor.dtype for tensor in [*loaded.parameters(), *loaded.buffers()]}
        assert dtypes <= {torch.float64, torch.int64}
        # Eager attention names float32 in its softmax, sdpa does not; some families have only the first.
        for implementation in ("eager", "sdpa") if loaded._supports_sdpa else ("eager",):
            loaded.set_attn_implementation(implementation)
            assert float32_ops(loaded) == set()


@pytest.mark.parametrize("name", ["llama-untied", "olmo2", "qwen2-tied", "mistral"])
def test_without_it_a_float64_model_uses_float32(name: str) -> None:
    assert float32_ops(PICO[name]())


@torch.no_grad()
def permuted(model: PreTrainedModel) -> PreTrainedModel:
    """Returns an untied Llama that computes the same function with its residual stream in another order."""
    other = copy.deepcopy(model)
    order = torch.randperm(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for name, parameter in other.named_parameters():
        writes = name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight"))
        parameter.copy_(parameter[order] if writes else parameter[..., order])
    return other


def test_equal_models_agree_to_float64_only_in_it() -> None:
    model = PICO["llama-untied"]()
    other, batch = permuted(model), inputs(model, seed=1)
    plain = (outputs(model, batch) - outputs(other, batch)).abs().max()
    with Float64():
        exact = (outputs(model, batch) - outputs(other, batch)).abs().max()
    assert plain > 1e-9
    assert exact < 1e-13


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(dtype=torch.float),
        lambda x: x.type(torch.float32),
        lambda x: x.type(torch.FloatTensor),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: x.new_ones(2, dtype=torch.float32),
        lambda x: torch.softmax(x, 0, dtype=torch.float32),
        lambda x: torch.softmax(x, 0, torch.float32),
        lambda x: torch.nn.functional.softmax(x, dim=0, dtype=torch.float32),
        lambda x: torch.zeros_like(x, dtype=torch.float32),
        lambda x: torch.arange(3, dtype=torch.float32),
        lambda x: torch.arange(3) / 2,
        lambda x: torch.ones(2),
        lambda x: torch.empty(2, dtype=torch.float32),
        lambda x: torch.full((2,), 1.0),
        lambda x: torch.tensor([1.0]),
        lambda x: torch.linspace(0, 1, 3),
        lambda x: torch.nn.Linear(2, 2).float().weight,
    ],
)
def test_every_way_to_ask_for_float32_gives_float64(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert make(x).dtype == torch.float32 or make(x).dtype == torch.get_default_dtype()
    with Float64():
        assert make(x).dtype == torch.float64


def test_other_dtypes_are_left_alone() -> None:
    with Float64():
        assert torch.ones(2, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.ones(2).half().dtype == torch.float16
        assert torch.arange(3).dtype == torch.int64


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    save_file({"x": x}, tmp_path / "x.safetensors")
    torch.save({"x": x}, tmp_path / "x.pt")
    with Float64():
        safe = load_file(tmp_path / "x.safetensors")["x"]
        pickled = torch.load(tmp_path / "x.pt", weights_only=True)["x"]
    for y in (safe, pickled):
        assert y.dtype == torch.float32
        assert torch.equal(y, x)


def test_it_ends_where_it_ends() -> None:
    mode = Float64()
    with pytest.raises(ZeroDivisionError), mode, mode:
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(2, dtype=torch.float32).dtype == torch.float32
