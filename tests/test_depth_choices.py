"""Where added blocks stand, and silence per unit (type 3): lossless wherever it is not refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import lemonx
import pico
from lemonx.algebra.free_parameters import PLACEMENTS, parse_free
from lemonx.algebra.recipes import HALF, MUTED, Matrix
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadTarget, Refused
from lemonx.planning import depth
from lemonx.planning.half_silent import halved
from lemonx.specs.spec import Stack
from lemonx.verification.algebra import check_algebra
from pico import PICO, save

OTHERS = [name for name in PLACEMENTS if name != "interleaved"]


@given(
    name=st.sampled_from(PLACEMENTS),
    size=st.integers(1, 7),
    more=st.integers(0, 9),
    period=st.integers(1, 3),
    pinned=st.integers(0, 2),
)
def test_every_placement(name: str, size: int, more: int, period: int, pinned: int) -> None:
    """As many blocks as asked for; the source's in their order, each once, at their place in the period."""
    stack = Stack(size, "residual", period=period, pinned=min(pinned, size))
    try:
        blocks = depth.PLACEMENTS[name]("layers", stack, size + more)
    except Refused:
        assert stack.pinned == size and more
        return
    assert len(blocks) == size + more
    own = [(place, block.source) for place, block in enumerate(blocks) if not block.added]
    assert [source for _, source in own] == list(range(size))
    assert all(place % period == source % period for place, source in own)
    assert own[: stack.pinned] == [(i, i) for i in range(stack.pinned)]
    assert all(block.source >= stack.pinned for block in blocks if block.added)


def test_placements_by_hand() -> None:
    def placed(name: str, size: int, target: int) -> list[int]:
        """Numbers from 1, negative where the block is added."""
        blocks = depth.PLACEMENTS[name]("layers", Stack(size, "residual"), target)
        return [-block.source - 1 if block.added else block.source + 1 for block in blocks]

    assert placed("interleaved", 3, 6) == [1, -1, 2, -2, 3, -3]
    assert placed("before", 3, 6) == [-1, 1, -2, 2, -3, 3]
    assert placed("stacked", 3, 6) == [1, 2, 3, -1, -2, -3]
    assert placed("middle", 4, 6) == [1, 2, 3, -2, -3, 4]
    assert placed("middle", 5, 6) == [1, 2, 3, -3, 4, 5]
    assert placed("middle", 3, 8) == [1, 2, 3, -1, -2, -3, -1, -2]


# Lists per layer, a first block of its own, a table in the first block, windows that alternate, strided blocks.
PLACED: dict[str, dict[str, Any]] = {
    "llama-tied": {"depth": 5, "width": 72},
    "gemma3": {"depth": 5},
    "qwen2-sliding": {"depth": 5},
    "modernbert-mlm": {"depth": 6},
    "t5": {"depth": 5},
    "vit-cls": {"depth": 5},
    "swin-cls": {"set": {"depths": [4, 5]}},
    "resnet-bottleneck": {"set": {"depths": [4, 3]}},
    "whisper": {"depth": 5},
}


@pytest.mark.parametrize("placement", OTHERS)
@pytest.mark.parametrize("model", PLACED)
def test_every_family_stays_the_same_function(model: str, placement: str, tmp_path: Path) -> None:
    source = save(PICO[model](), tmp_path / "s")
    if (model, placement) == ("t5", "before"):
        with pytest.raises(Refused, match=r"the first layer of .* has weights that no other has"):
            lemonx.plan(source, free={"placement": placement}, **PLACED[model])
        return
    made = lemonx.expand(source, tmp_path / "t", free={"placement": placement}, verify=False, **PLACED[model])
    assert made.plan.free.placement == placement
    assert lemonx.verify(source, tmp_path / "t").proven  # it reads the placement from the certificate


def test_lists_follow_their_blocks(tmp_path: Path) -> None:
    source = save(PICO["gemma3"](), tmp_path / "s")
    types = PICO["gemma3"]().config.layer_types
    for placement in PLACEMENTS:
        plan = lemonx.plan(source, depth=5, free={"placement": placement})
        (blocks,) = plan.blocks.values()
        assert plan.target_config["layer_types"] == [types[block.source] for block in blocks]


@pytest.mark.parametrize("placement", OTHERS)
def test_post_ln_is_refused_with_the_reason(placement: str, tmp_path: Path) -> None:
    source = save(PICO["bert-mlm"](), tmp_path / "s")
    with pytest.raises(Refused, match=f"right behind the one it copies.* {placement} puts it elsewhere"):
        lemonx.plan(source, depth=4, free={"placement": placement})
    assert lemonx.plan(source, width="2x", free={"placement": placement})  # nothing is placed


def test_placements_that_are_none(tmp_path: Path) -> None:
    source = save(PICO["llama-tied"](), tmp_path / "s")
    with pytest.raises(BadTarget, match="placement is 'upside': use one of interleaved"):
        lemonx.plan(source, depth=4, free={"placement": "upside"})  # type: ignore[arg-type]
    with pytest.raises(BadTarget, match="depth_type is 4: use 1, 2 or 3"):
        lemonx.plan(source, depth=4, free={"depth_type": 4})  # type: ignore[arg-type]


# Silence per unit.

# Grouped queries, biases, fused and transposed weights, one key-value head for all, gated MLPs in one weight, Post-LN,
# cross-attention, experts, heads whose entries grow.
HALVED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama-tied": ({"depth": 3, "width": 96}, {"value", "hidden"}),
    "llama-biases": ({"depth": 4, "width": 72}, {"value", "hidden"}),
    "gpt2-lm": ({"depth": 3, "width": 96}, {"value"}),
    "phi3": ({"depth": 3, "width": "2x"}, {"value", "hidden"}),
    "modernbert-mlm": ({"depth": 5}, {"value", "hidden"}),
    "neox": ({"depth": 3, "width": "2x"}, {"value"}),
    "falcon-multi-query": ({"depth": 3}, {"value"}),
    "bert-mlm": ({"depth": 3, "width": "2x"}, {"value"}),
    "t5-gated": ({"depth": 4, "width": "3/2x"}, {"value", "hidden"}),
    "mixtral": ({"depth": 3, "width": "2x"}, {"value"}),
    "whisper": ({"depth": 3}, {"encoder_value", "decoder_value"}),
    "llama-head-dim": ({"depth": 3, "set": {"head_dim": 32}}, {"value", "hidden"}),
}


@pytest.mark.parametrize("model", HALVED)
def test_half_silent_blocks_are_lossless(model: str, tmp_path: Path) -> None:
    sizes, axes = HALVED[model]
    source = save(PICO[model](), tmp_path / "s")
    made = lemonx.expand(source, tmp_path / "t", free={"depth_type": 3}, verify=False, **sizes)
    assert halved(made.plan.source_spec) >= axes
    modes = {step.recipe.mode for step in made.plan.steps if isinstance(step.recipe, Matrix)}
    assert {HALF, MUTED} <= modes
    found = lemonx.verify(source, tmp_path / "t")
    assert found.proven and found.symmetry is not None and found.symmetry.twins == 0


@pytest.mark.parametrize("free", ["language", "own"])
def test_every_weight_has_a_gradient_at_once(free: str, tmp_path: Path) -> None:
    """In an added block of type 3 all four of v, o, up and down have one at step 1, and half of o and down is there."""
    source = save(PICO["llama-untied"](), tmp_path / "s")
    made = lemonx.expand(source, tmp_path / "t", depth=3, free={"like": free, "depth_type": 3})  # type: ignore[arg-type]
    (blocks,) = made.plan.blocks.values()
    (added,) = (place for place, block in enumerate(blocks) if block.added)
    model = type(PICO["llama-untied"]()).from_pretrained(tmp_path / "t", dtype=torch.float64)
    logits = model(**pico.inputs(model, seed=1)).logits
    (
        logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    ).sum().backward()
    layer = model.model.layers[added]
    for weight in (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight):
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0
    for weight in (layer.mlp.up_proj.weight, layer.mlp.down_proj.weight):
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0
    original = model.model.layers[added - 1]
    for here, there in (
        (layer.self_attn.o_proj, original.self_attn.o_proj),
        (layer.mlp.down_proj, original.mlp.down_proj),
    ):
        assert torch.equal(here.weight[:, 1::2], there.weight[:, 1::2])
        assert not here.weight[:, ::2].any()
    for here, there in ((layer.self_attn.v_proj, original.self_attn.v_proj), (layer.mlp.up_proj, original.mlp.up_proj)):
        assert torch.equal(here.weight[::2], there.weight[::2])
        assert not here.weight[1::2].any()
    # A step later nothing is without one.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-2 * parameter.grad
            parameter.grad = None
    (model(**pico.inputs(model, seed=2)).logits ** 2).sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in layer.parameters())


@pytest.mark.parametrize("module", ["self_attn.v_proj", "mlp.up_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_unit_that_is_not_silent_is_found(module: str, tmp_path: Path) -> None:
    source = save(PICO["llama-tied"](), tmp_path / "s")
    made = lemonx.expand(source, tmp_path / "t", depth=3, width=96, free={"depth_type": 3}, verify=False)
    (blocks,) = made.plan.blocks.values()
    (added,) = (place for place, block in enumerate(blocks) if block.added)
    file = tmp_path / "t" / "model.safetensors"
    tensors = load_file(file)
    weight = tensors[f"model.layers.{added}.{module}.weight"]
    weight[1, 2] += 1e-3  # an odd row and an even column
    save_file(tensors, file, metadata={"format": "pt"})
    with Checkpoint.open(source) as before, Checkpoint.open(tmp_path / "t") as after:
        found = check_algebra(made.plan, before, after)
    assert not found.passed
    assert module in found.reason()


@pytest.mark.parametrize("model", ["olmo2", "resnet-basic", "dinov2-cls", "mamba"])
def test_type_3_is_refused_where_no_unit_can_be_silenced_on_either_side(model: str, tmp_path: Path) -> None:
    """A norm or a scale in front of the stream; channels behind a nonlinearity; a state."""
    source = save(PICO[model](), tmp_path / "s")
    sizes: dict[str, Any] = {"set": {"depths": [3, 3]}} if model == "resnet-basic" else {"depth": 3}
    with pytest.raises(Refused):
        lemonx.plan(source, free={"depth_type": 3}, **sizes)


def test_sections_say_both() -> None:
    free = parse_free({"like": "own", "placement": "middle", "depth_type": 3})
    assert (free.placement, free.depth_type, free.rest) == ("middle", 3, "own")
