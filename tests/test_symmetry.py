"""After a few steps of training no two units compute the same function; after an even split, all copies do.

Units are compared by what they compute on data that they were not trained on: post-activation neurons, the
outputs of attention heads, the keys and values of key-value heads, coordinates of the stream, and channels
after BatchNorm. Training runs in float64, so the two cases are far apart: copies that nothing tells apart
get equal gradients and differ by rounding (1e-16 a step, and AdamW divides by gradients of any size), while
a step moves others apart by about the learning rate. SAME lies between.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lemonx
import pico
from lemonx.algebra.free_parameters import Free, parse_free
from lemonx.checkpoints import Checkpoint
from lemonx.verification.float64 import Float64
from lemonx.verification.symmetry import find_twins

SAME = 1e-9
STEPS = 5
# Net2Net and bert2BERT-FPI: each copy of a unit takes an equal share of the fan-out, and nothing is free.
EVEN = Free("even", split=1.0, phi=0.0, zeta=0.0, norm_zeta=1.0, depth_type=1)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}
# Module name -> (what to look at: its input or output, which config field counts the units; None: each entry).
PROBES: dict[str, dict[str, tuple[str, str | None]]] = {
    "gpt2": {
        r"mlp\.c_proj$": ("in", None),
        r"attn\.c_proj$": ("in", "n_head"),
        r"ln_f$": ("in", None),
    },
    "llama": {
        r"down_proj$": ("in", None),
        r"o_proj$": ("in", "num_attention_heads"),
        r"[kv]_proj$": ("out", "num_key_value_heads"),
        r"model\.norm$": ("in", None),
    },
    "vit": {
        r"fc2$": ("in", None),
        r"o_proj$": ("in", "num_attention_heads"),
        r"vit\.layernorm$": ("in", None),
    },
    "bert": {
        r"\d\.output\.dense$": ("in", None),
        r"attention\.output\.dense$": ("in", "num_attention_heads"),
        r"\d\.output\.LayerNorm$": ("in", None),
    },
    "resnet": {r"normalization$": ("out", "channels")},
    "torchvision_resnet": {r"(bn\d|downsample\.1)$": ("out", "channels")},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-96": ("gpt2-lm", {"width": 96}),
    "gpt2-72": ("gpt2-lm", {"width": 72}),
    "llama-96": ("llama-tied", {"width": 96}),
    "llama-120": ("llama-tied", {"width": 120, "heads": 12, "kv_heads": 4, "ffn": 333}),
    "llama-heads": ("llama-untied", {"heads": 8, "kv_heads": 4}),
    "bert-96": ("bert-cls", {"width": 96, "depth": 3}),
    "vit-96": ("vit-cls", {"width": 96, "depth": 3}),
    "resnet-x2": ("resnet-basic", {"width": "2x"}),
    "wide-resnet": ("torchvision-bottleneck", {"set": {"inner_width": [12, 25], "layers": [3, 4]}}),
    # Block 0's copy takes the further units of block 1; block 1's copies have no next block, and are jittered.
    "depth-type-1": ("llama-untied", {"depth": 5, "ffn": 200, "heads": 8, "kv_heads": 4, "depth_type": 1}),
    "gpt2-depth-type-1": ("gpt2-lm", {"depth": 5, "ffn": 400, "depth_type": 1}),
    "three-copies": ("llama-untied", {"ffn": 300}),
    "depth-type-2": ("llama-untied", {"depth": 5, "ffn": 200, "heads": 8, "kv_heads": 4, "depth_type": 2}),
}


def expanded(case: str, free: str | Free, tmp_path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The expanded model of a case in float64, the number of its twins on disk, and that of its copies."""
    name, options = CASES[case]
    options = dict(options)
    depth_type = options.pop("depth_type", None)
    if depth_type and isinstance(free, str):  # of a Free it is part
        free = parse_free({"like": free, "depth_type": depth_type})
    model = pico.PICO[name]()
    source = pico.save(model, tmp_path / "source", dtype)
    output = lemonx.expand(source, tmp_path / "target", verify=False, free=free, **options).path
    with Checkpoint.open(output) as written:
        symmetry = find_twins(lemonx.plan(source, free=free, **options), written)
    with Float64():
        return type(model).from_pretrained(output, dtype=torch.float64), symmetry


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A few steps on random data; every parameter gets its gradient."""
    model.train()
    generator = torch.Generator().manual_seed(0)
    with Float64():
        for step in range(STEPS):
            batch = pico.inputs(model, seed=100 + step)
            logits = model(**batch).logits
            labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator)
            nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def unit_outputs(model: Any) -> dict[str, Tensor]:
    """Probe -> (units, everything a unit computes on fresh data)."""
    found: dict[str, Tensor] = {}

    def look(name: str, field: str | None, tensor: Tensor) -> None:
        if field == "channels":
            found[name] = tensor.movedim(1, 0).flatten(1)
            return
        count = tensor.shape[-1] if field is None else getattr(model.config, field)
        found[name] = tensor.reshape(-1, count, tensor.shape[-1] // count).transpose(0, 1).flatten(1)

    hooks = []
    for name, module in model.named_modules():
        for pattern, (place, field) in PROBES[model.config.model_type].items():
            if re.search(pattern, name):
                see = partial(look, name, field)
                hooks.append(
                    module.register_forward_hook(
                        (lambda _, inputs, output, see=see: see(inputs[0].detach()))
                        if place == "in"
                        else (lambda _, inputs, output, see=see: see(output.detach()))
                    )
                )
    with Float64(), torch.no_grad():
        model.eval()(**pico.inputs(model, seed=7))
    for hook in hooks:
        hook.remove()
    assert {p for p in PROBES[model.config.model_type] for name in found if re.search(p, name)} == set(
        PROBES[model.config.model_type]
    )
    return found


def same_pairs(model: Any) -> dict[str, int]:
    """Probe -> pairs of its units whose outputs differ by less than SAME of the larger one."""
    result = {}
    for name, units in unit_outputs(model).items():
        distance = torch.cdist(units, units, compute_mode="donot_use_mm_for_euclid_dist")
        norm = units.norm(dim=1)
        same = distance <= SAME * torch.maximum(norm[:, None], norm[None, :])
        result[name] = int(same.sum() - len(units)) // 2
    return result


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("free", ["own", "language", "vision"])
@pytest.mark.parametrize("case", CASES)
def test_no_two_units_compute_the_same(case: str, free: str, optimizer: str, tmp_path: Path) -> None:
    model, symmetry = expanded(case, free, tmp_path)
    assert symmetry.copies > 0 and symmetry.twins == 0, symmetry
    train(model, OPTIMIZERS[optimizer](model.parameters()))
    pairs = same_pairs(model)
    assert not any(pairs.values()), {name: count for name, count in pairs.items() if count}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", [name for name in CASES if name != "depth-type-2"])
def test_copies_of_an_even_split_stay_twins(case: str, optimizer: str, tmp_path: Path) -> None:
    """The same test fails on the even split: so it can fail, and Net2Net's copies do stay equal."""
    model, symmetry = expanded(case, EVEN, tmp_path)
    assert symmetry.twins > 0, symmetry
    if case.endswith(("-96", "-x2")):
        assert symmetry.twins == symmetry.copies
    train(model, OPTIMIZERS[optimizer](model.parameters()))
    pairs = same_pairs(model)
    assert any(pairs.values())
    if case in ("gpt2-96", "llama-96", "bert-96", "vit-96", "resnet-x2"):
        # Everything doubled: each probe sees one twin for each of its source's units.
        units = {name: len(values) for name, values in unit_outputs(model).items()}
        assert pairs == {name: count // 2 for name, count in units.items()}


def test_further_copies_may_be_twins_of_each_other(tmp_path: Path) -> None:
    """All weight on the first of three copies: the other two differ from it, and not from each other."""
    model, symmetry = expanded("three-copies", Free("first", split=0.0, phi=0.0, depth_type=1), tmp_path)
    assert symmetry.twins == 100 * 2  # one a unit, in two layers
    train(model, OPTIMIZERS["adamw"](model.parameters()))
    assert {name: count for name, count in same_pairs(model).items() if count} == {
        "model.layers.0.mlp.down_proj": 100,
        "model.layers.1.mlp.down_proj": 100,
    }


@pytest.mark.parametrize("free", ["own", "language", "vision"])
@pytest.mark.parametrize("case", ["gpt2-96", "llama-120", "vit-96", "depth-type-1"])
def test_bf16_keeps_units_apart(case: str, free: str, tmp_path: Path) -> None:
    """What breaks the symmetry survives the rounding of a bf16 file."""
    model, symmetry = expanded(case, free, tmp_path, torch.bfloat16)
    assert symmetry.copies > 0 and symmetry.twins == 0, symmetry
    train(model, OPTIMIZERS["adamw"](model.parameters()))
    pairs = same_pairs(model)
    assert not any(pairs.values()), {name: count for name, count in pairs.items() if count}
