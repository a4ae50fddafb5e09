"""What config.json and the input decide besides sizes: shifts, activations, slopes, turning entries, the class.

Each is exact, or refused by the check with the reason; never left to a measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

import lemonx
import pico
from lemonx import architectures, fsck
from lemonx.errors import BadCheckpoint, BadTarget, LemonxError, Refused
from lemonx.models.building import skeleton
from lemonx.planning.notices import notes
from lemonx.verification.float64 import Float64

EXACT = 1e-10


def built(kind: type[PreTrainedModel], sizes: dict[str, Any], **more: Any) -> PreTrainedModel:
    with Float64():
        return pico._build(kind, kind.config_class, sizes, **more)


def saved(model: PreTrainedModel, folder: Path, *without: str, **fields: Any) -> Path:
    """A checkpoint whose config.json says these fields too, and does not say others."""
    pico.save(model, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({n: value for n, value in config.items() if n not in without}))
    return folder


def difference(kind: type[PreTrainedModel], source: Path, target: Path, **batch: torch.Tensor) -> float:
    """Of the logits, relative to the largest; both are loaded anew, since a Swin remembers the images it has seen."""
    with Float64(), torch.no_grad():
        before, after = (kind.from_pretrained(folder, dtype=torch.float64).eval() for folder in (source, target))
        old, new = before(**batch).logits, after(**batch).logits
    return float((old - new).abs().max() / old.abs().max())


def text(tokens: int = 24) -> torch.Tensor:
    return torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(1))


def image(high: int, wide: int) -> torch.Tensor:
    return torch.randn(2, 3, high, wide, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# ----------------------------------------------------------------- Swin

IMAGES = [(32, 32), (48, 48), (44, 52), (36, 64)]
SWIN: dict[str, Any] = {name: value for name, value in pico._SWINV2.items() if name != "pretrained_window_sizes"}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (hf.SwinForImageClassification, {"set": {"depths": [4, 4]}}),
        (hf.SwinForImageClassification, {"set": {"depths": [3, 5]}}),
        (hf.SwinForImageClassification, {"width": "2x"}),
        (hf.SwinForImageClassification, {"width": "3/2x", "set": {"depths": [3, 4]}}),
        (hf.Swinv2ForImageClassification, {"set": {"depths": [4, 4]}}),
        (hf.Swinv2ForImageClassification, {"width": "2x", "set": {"depths": [3, 4]}}),
    ],
)
@pytest.mark.parametrize("side", [32, 36], ids=["even", "odd"])
def test_windows_shift_by_the_image_that_is_seen(name: Any, sizes: dict[str, Any], side: int, tmp_path: Path) -> None:
    """Stage 1 has a single window at the config's size and several at others; grids of 9 and 11 patches are padded."""
    model = built(name, pico._SWINV2 if name is hf.Swinv2ForImageClassification else SWIN, image_size=side)
    source = saved(model, tmp_path / "source")
    target = lemonx.expand(source, tmp_path / "target", verify=False, **sizes).path
    for size in [(side, side), *IMAGES]:
        assert difference(type(model), source, target, pixel_values=image(*size)) <= EXACT, size


# ----------------------------------------------------------------- ResNet


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
@pytest.mark.parametrize(
    ("act", "silent"), [("relu", True), ("relu6", True), ("linear", True), ("gelu", False), ("leaky_relu", False)]
)
def test_an_added_block_of_a_resnet_is_its_activation(act: str, silent: bool, layer_type: str, tmp_path: Path) -> None:
    model = built(hf.ResNetForImageClassification, pico._RESNET, hidden_act=act, layer_type=layer_type)
    source, pixels = saved(model, tmp_path / "source"), image(32, 32)
    assert (
        difference(type(model), source, lemonx.expand(source, tmp_path / "wide", width="2x").path, pixel_values=pixels)
        <= EXACT
    )
    if not silent:
        with pytest.raises(Refused, match=f"cannot grow deeper, since a block ends in {act}.*keep its depth at 2"):
            lemonx.plan(source, set={"depths": [3, 4]})
        return
    deep = lemonx.expand(source, tmp_path / "deep", set={"depths": [3, 4]}, verify=False).path
    assert difference(type(model), source, deep, pixel_values=pixels) <= EXACT


@pytest.mark.parametrize("name", ["timm-vit", "timm-resnet"])
def test_timm_s_arguments_that_no_table_knows(name: str, tmp_path: Path) -> None:
    """Another activation, say: lemonx's own classes would ignore it, in source and target alike."""
    model = pico.PICO[name]()
    args = model.config.model_args
    sizes = {"set": {"model_args.depth": 3} if name == "timm-vit" else {"model_args.layers": [3, 3]}}
    folder = saved(model, tmp_path / "known", model_args={**args, "drop_path_rate": 0.1})
    assert lemonx.plan(folder, **sizes).steps
    folder = saved(model, tmp_path / "unknown", model_args={**args, "act_layer": "silu"})
    with pytest.raises(Refused, match="model_args has act_layer"):
        lemonx.plan(folder, **sizes)


# ----------------------------------------------------------------- Falcon

FALCON: dict[str, Any] = {**pico._WIDTH, **pico._TOKENS}
NEW = {"new_decoder_architecture": True}
SLOPES = "a head's ALiBi slope and its key-value head both follow from its place"


@pytest.mark.parametrize(
    ("layout", "sizes", "says"),
    [
        ({**NEW, "num_kv_heads": 2}, {"depth": 3, "ffn": 250}, None),
        ({**NEW, "num_kv_heads": 2}, {"width": 96}, f"kv_heads: {SLOPES}.*keep it at 2"),
        ({**NEW, "num_kv_heads": 2}, {"width": 96, "kv_heads": 2}, f"heads: {SLOPES}.*keep it at 4"),
        ({**NEW, "num_kv_heads": 4}, {"width": 96}, None),
        ({**NEW, "num_kv_heads": 4}, {"width": 72}, None),
        ({**NEW, "num_kv_heads": 4}, {"width": 96, "kv_heads": 2}, "would gain kv_heads"),
        (NEW, {"width": 96}, None),
        ({"multi_query": True}, {"width": 72}, None),
        ({"multi_query": False}, {"width": 72}, None),
    ],
)
def test_falcon_s_slopes(layout: dict[str, Any], sizes: dict[str, Any], says: str | None, tmp_path: Path) -> None:
    model = built(hf.FalconForCausalLM, FALCON, alibi=True, **layout)
    source = saved(model, tmp_path / "source")
    if says:
        with pytest.raises(Refused, match=says):
            lemonx.plan(source, **sizes)
        return
    assert (
        difference(type(model), source, lemonx.expand(source, tmp_path / "target", **sizes).path, input_ids=text())
        <= EXACT
    )


def test_falcon_s_heads_each_with_a_key_of_their_own(tmp_path: Path) -> None:
    """transformers reads num_kv_heads there too, where a file says it, and it must be the number of heads."""
    model = built(hf.FalconForCausalLM, FALCON, multi_query=False)
    for name, without in (("said", ()), ("left-out", ("num_kv_heads",))):
        source = saved(model, tmp_path / name, *without)
        target = lemonx.expand(source, tmp_path / f"{name}-target", width=96, depth=3).path
        config = json.loads((target / "config.json").read_text())
        assert config.get("num_kv_heads") == (8 if name == "said" else None)
        assert difference(type(model), source, target, input_ids=text()) <= EXACT


# ----------------------------------------------------------------- rotary embeddings

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def rotary_families() -> list[str]:
    """A pico model of every family that turns queries and keys by a rule in config.json."""
    found = {}
    for name, build in pico.PICO.items():
        if isinstance(build, partial) and hasattr(build.args[1](), "rope_parameters") and "alibi" not in name:
            found.setdefault(build.args[1].model_type, name)
    return sorted(found.values())


def turning(model: PreTrainedModel) -> set[int]:
    """How many entries of a head turn, by the frequencies that the model computes with."""
    buffers = {name: value for name, value in model.named_buffers() if name.endswith("inv_freq")}
    return {2 * len(value) for name, value in buffers.items() if "original" not in name}


@pytest.mark.parametrize("name", rotary_families())
def test_as_many_entries_turn_as_the_class_turns(name: str, tmp_path: Path) -> None:
    """A partial_rotary_factor counts where the code of the family asks for it, and nowhere else."""
    model = pico.PICO[name]()
    rope = getattr(model.config, "rope_parameters", None) or {}
    kinds = [kind for kind, rule in rope.items() if isinstance(rule, dict)]
    halved = {kind: ROPE for kind in kinds} if kinds else ROPE
    for fields in ({}, {"rope_parameters": halved}):
        folder = saved(model, tmp_path / f"{len(fields)}", **fields)
        config = json.loads((folder / "config.json").read_text())
        spec = architectures.find(config).spec(config)
        assert {spec.spaces["query"].turns.turning} == turning(skeleton(config)), fields


@pytest.mark.parametrize(("name", "sizes"), [("llama-untied", {"head_dim": 24}), ("cohere", {"head_dim": 24})])
def test_a_factor_that_the_class_ignores(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    with Float64():
        model = pico.PICO[name]()
    source = saved(model, tmp_path / "source", rope_parameters=ROPE)
    assert (
        difference(type(model), source, lemonx.expand(source, tmp_path / "out", set=sizes).path, input_ids=text())
        <= EXACT
    )
    broken = saved(model, tmp_path / "broken", rope_parameters={**ROPE, "rope_type": "linear", "factor": 2.0})
    with pytest.raises(
        BadCheckpoint, match=r"partial_rotary_factor beside linear rotary embeddings.*remove the wrong one"
    ):
        lemonx.plan(broken, depth=3)


# ----------------------------------------------------------------- sizes that config classes reject


def test_sizes_that_a_config_class_rejects_are_told_by_the_plan(tmp_path: Path) -> None:
    factors: dict[str, Any] = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, "original_max_position_embeddings": 32}
    phi = built(hf.Phi3ForCausalLM, pico._LLAMA, rope_parameters=rope, original_max_position_embeddings=32)
    source = saved(phi, tmp_path / "phi3")
    assert (
        difference(
            type(phi), source, lemonx.expand(source, tmp_path / "wide", width=96, depth=3).path, input_ids=text(40)
        )
        <= EXACT
    )
    for sizes in ({"width": 96, "heads": 4}, {"heads": 8}):
        with pytest.raises(BadTarget, match=r"6 numbers in short_factor.*grow --width and --heads by the same factor"):
            lemonx.plan(source, **sizes)
    for name in ("gemma2", "gemma3"):
        source = saved(pico.PICO[name](), tmp_path / name)
        with pytest.raises(BadTarget, match=r"hidden_size 48 is not a multiple of 10 heads.*: try --heads 12"):
            lemonx.plan(source, heads=10)


# ----------------------------------------------------------------- the class, and its head


@pytest.mark.parametrize("name", ["llama-tied", "llama-base", "bert-mlm", "t5-encoder", "bart-cls", "olmo", "mamba"])
def test_a_class_that_is_not_named_and_must_be(name: str, tmp_path: Path) -> None:
    source = saved(pico.PICO[name](), tmp_path / "source", "architectures")
    with pytest.raises(
        BadCheckpoint, match=r"does not name the class.*add the class that was saved, as \"architectures"
    ):
        lemonx.plan(source, width="2x")


@pytest.mark.parametrize("name", ["vit-cls", "deit-cls", "neox"])
def test_a_class_that_is_not_named_and_need_not_be(name: str, tmp_path: Path) -> None:
    source = saved(pico.PICO[name](), tmp_path / "source", "architectures")
    assert lemonx.verify(source, lemonx.expand(source, tmp_path / "target", width="2x", verify=False).path).passed


def test_a_class_that_transformers_cannot_guess(tmp_path: Path) -> None:
    source = saved(pico.PICO["siglip-text"](), tmp_path / "source", "architectures")
    with pytest.raises(BadCheckpoint, match="does not name the class"):
        lemonx.expand(source, tmp_path / "target", width="2x")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("name", "lost", "says"),
    [
        ("llama-untied", "lm_head.", r"a LlamaForCausalLM, but no file holds its head \(lm_head"),
        ("vit-cls", "classifier.", r"a ViTForImageClassification, but no file holds its head \(classifier"),
        ("llama-tied", "", None),
        ("llama-base", "", None),
        ("dinov2-gated", "", None),
    ],
)
def test_a_head_that_no_file_has(name: str, lost: str, says: str | None, tmp_path: Path, without: Callable) -> None:
    """The plan, fsck and the certificate say which tensors are missing."""
    source = saved(pico.PICO[name](), tmp_path / "source")
    if lost:
        without(source, lost)
    told = [note for note in notes(lemonx.plan(source, width="2x")) if "no file holds" in note]
    warned = [problem for problem in fsck(source).findings if "no file holds" in problem.found]
    if says is None:
        assert not told and not warned
        return
    assert len(told) == len(warned) == 1
    assert re.search(says, told[0])
    content = json.loads((lemonx.expand(source, tmp_path / "target", width="2x").path / "lemonx.json").read_text())
    assert any(tensor.startswith(lost) for tensor in content["verified"]["outputs"]["missing"])


@pytest.fixture
def without() -> Callable[[Path, str], None]:
    """Take tensors out of a checkpoint of one file."""
    from safetensors.torch import load_file, save_file

    def take(folder: Path, start: str) -> None:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}
        assert len(kept) < len(tensors)
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return take


def test_what_is_given_is_not_overruled_by_what_follows(tmp_path: Path) -> None:
    """A field that stays equal to another does so unless it is asked for, by an option as by --set."""
    source = saved(built(hf.FalconForCausalLM, FALCON, alibi=True, **NEW), tmp_path / "source", num_kv_heads=4)
    for sizes in ({"kv_heads": 2}, {"set": {"num_kv_heads": 2}}):
        with pytest.raises(LemonxError):
            lemonx.plan(source, width=96, **sizes)


@pytest.mark.parametrize(("depths", "sizes"), [([2], [16]), ([2, 3, 2], [16, 32, 64])])
def test_a_model_with_other_stages_is_no_target(depths: list[int], sizes: list[int], tmp_path: Path) -> None:
    """A stage is a stack of its own, which a target may lack, or have beside the source's."""
    source = saved(pico.PICO["resnet-basic"](), tmp_path / "source")
    like = json.loads((source / "config.json").read_text()) | {"depths": depths, "hidden_sizes": sizes}
    (tmp_path / "like.json").write_text(json.dumps(like))
    with pytest.raises(Refused, match=r"at these sizes the model would (lose|gain) the module resnet\.encoder\.stages"):
        lemonx.plan(source, like=tmp_path / "like.json")
