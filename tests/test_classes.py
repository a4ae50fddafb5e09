"""Every class that transformers has for a supported family grows, or is refused with the true reason.

The classes are those of transformers' Auto mappings and whatever else it exports for a family's config. Those that
have a pico model are measured in test_families.py; all others here, at twice the width and one block deeper.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.auto import configuration_auto, modeling_auto

import lemonx
import pico
from lemonx import architectures
from lemonx.errors import BadCheckpoint, BadTarget, Refused
from lemonx.planning.plan import Plan
from lemonx.verification.float64 import Float64

EXACT = 1e-10
# Classes that no table covers, with the reason that is given.
REFUSED = {
    "BeitForSemanticSegmentation": "does not support the layers that make a pyramid of feature.*expand the base model",
    "Data2VecVisionForSemanticSegmentation": "does not support the layers that make a pyramid.*expand the base model",
}
# A family that cannot grow in width is given a block only.
NARROW = ("marian",)


@cache
def classes() -> dict[str, str]:
    """Every class that can be saved, with its family's model type."""
    found: dict[str, str] = {}
    mappings = [value for name, value in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name)]
    for model_type in sorted(set(architectures.families()) & set(configuration_auto.CONFIG_MAPPING)):
        for mapping in mappings:
            names = mapping.get(model_type, ())
            found |= dict.fromkeys((names,) if isinstance(names, str) else names, model_type)
        config = configuration_auto.CONFIG_MAPPING[model_type]
        if not config.__module__.startswith("transformers."):
            continue  # one of this package's own, which have pico models
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
        found |= {
            name: model_type
            for name, kind in inspect.getmembers(module, inspect.isclass)
            if name in module.__all__ and getattr(kind, "config_class", None) is config
        }
    return {name: kind for name, kind in found.items() if "pretrained" not in name.lower()}


MEASURED = {builder.args[0].__name__ for builder in pico.PICO.values() if isinstance(builder, partial)}
OTHERS = sorted(classes().keys() - MEASURED - REFUSED.keys())


def fields(name: str, model_type: str) -> dict[str, Any]:
    """What the config of a class must say besides the sizes of its family."""
    more: dict[str, Any] = {"num_labels": 2} if name.endswith("ForQuestionAnswering") else {}
    if name.endswith(("ForCausalLM", "LMHeadModel")) and model_type in ENCODERS:
        more["is_decoder"] = True
    if name.endswith("ForMaskedImageModeling"):  # a patch's pixels make up the patch
        more["encoder_stride"] = 8 if model_type.startswith("swin") else 4
    if name.endswith("Backbone"):
        more["out_features"] = ["stem", "stage1", "stage2"]
    if name.endswith("ForSemanticSegmentation"):
        more |= {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
    return more


ENCODERS = ("bert", "electra", "megatron-bert", "roberta", "roberta-prelayernorm", "xlm-roberta")


def deeper(folder: Path, model_type: str) -> dict[str, Any]:
    """One more block, wherever this model has blocks."""
    family, values = architectures.families()[model_type], json.loads((folder / "config.json").read_text())
    config = family.config(values)
    family.build(config)
    sizes = {name: config[name] for name in family.sizes["depth"] if name in config.asked}
    grown = {n: [v + 1 for v in size] if isinstance(size, list) else size + 1 for n, size in sizes.items() if size}
    if "num_hidden_groups" in config.asked:  # blocks that share their weights cannot be added to
        grown["num_hidden_groups"] = grown["num_hidden_layers"]
    return grown


def saved(name: str, folder: Path, **more: Any) -> tuple[Any, Path]:
    with Float64():  # what a model computes for itself as it is built, too
        model = pico.of_class(getattr(hf, name), **{**fields(name, classes()[name]), **more})
    return model, pico.save(model, folder)


def largest_difference(model: Any, target: Path) -> float:
    """Of any output, relative to its largest entry; wider ones begin with the source's."""
    with Float64():
        batch = pico.inputs(model, seed=1)
        after, info = type(model).from_pretrained(target, dtype=torch.float64, output_loading_info=True)
        assert not any(info.values()), info
        before, grown = pico.named_outputs(model, batch), pico.named_outputs(after.eval(), batch)
    assert before and before.keys() == grown.keys()
    first = {name: grown[name][tuple(slice(size) for size in value.shape)] for name, value in before.items()}
    return max(float((value - first[name]).abs().max() / value.abs().max()) for name, value in before.items())


@pytest.mark.parametrize("name", OTHERS)
def test_a_class_grows(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / "source")
    width = None if classes()[name] in NARROW else "2x"
    sizes = {"width": width, "set": deeper(folder, classes()[name])}
    plans: list[Plan] = []
    target = lemonx.expand(folder, tmp_path / "target", verify=False, planned=plans.append, **sizes).path
    assert largest_difference(model, target) <= max(EXACT, 10 * plans[0].expected_loss)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_class_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    _, folder = saved(name, tmp_path / "source")
    with pytest.raises(Refused, match=REFUSED[name]):
        lemonx.plan(folder, width="2x")


def test_every_refusal_is_of_a_class_that_there_is() -> None:
    assert set(REFUSED) <= classes().keys()
    assert len(OTHERS) > 100  # the mappings were read


@pytest.mark.parametrize(
    "name", ["SwinForMaskedImageModeling", "WhisperForCausalLM", "GPT2DoubleHeadsModel", "Dinov2Backbone"]
)
def test_verification_runs_and_sees_every_output(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / "source")
    sizes = {"width": "2x", "set": deeper(folder, classes()[name])}
    target = lemonx.expand(folder, tmp_path / "target", verify=True, **sizes).path
    figures = json.loads((target / "lemonx.json").read_text())["verified"]["outputs"]
    wanted = pico.named_outputs(model, pico.inputs(model, seed=0))
    assert wanted.keys() <= {*figures["outputs"]} and figures["difference"] <= EXACT


# ----------------------------------------------------------------- what backbones give out


def test_a_backbone_goes_on_showing_the_blocks_that_it_showed(tmp_path: Path) -> None:
    """Blocks are added in front of one that is shown: its number in config.json moves with it."""
    shown = {"out_features": None, "out_indices": [0, 1, -2]}
    model, folder = saved("Dinov2Backbone", tmp_path / "source", num_hidden_layers=3, **shown)
    target = lemonx.expand(folder, tmp_path / "target", verify=False, depth=6).path
    config = json.loads((target / "config.json").read_text())
    assert (config["out_indices"], config["out_features"]) == ([0, 1, 3], ["stem", "stage1", "stage3"])
    assert config["stage_names"][-1] == "stage6"
    assert largest_difference(model, target) <= EXACT


# ----------------------------------------------------------------- decoders without their encoder


def test_a_decoder_alone_has_one_depth(tmp_path: Path) -> None:
    """And a cache for all of its blocks, which transformers counts by the encoder's."""
    model, folder = saved("BartForCausalLM", tmp_path / "source", encoder_layers=1)
    target = lemonx.expand(folder, tmp_path / "target", verify=False, depth=4).path
    config = json.loads((target / "config.json").read_text())
    assert (config["encoder_layers"], config["decoder_layers"]) == (4, 4)
    ids = pico.inputs(model, seed=0)["input_ids"]
    after = type(model).from_pretrained(target, dtype=torch.float64)
    assert after.generate(ids, max_new_tokens=2, use_cache=True).shape[1] > ids.shape[1]
    with pytest.raises(BadTarget, match="'encoder_layers' is not a size of this model"):
        lemonx.plan(folder, set={"encoder_layers": 3})


# ----------------------------------------------------------------- heads that nobody knows


def test_a_head_of_unknown_names_is_refused_with_the_truth(tmp_path: Path) -> None:
    """A BERT with heads of somebody's own: removing them from the file would not make it the model that it is."""
    from safetensors.torch import load_file, save_file

    _, folder = saved("BertForMaskedLM", tmp_path / "source")
    weights = load_file(folder / "model.safetensors")
    weights["cls.species.weight"] = torch.zeros(6, 48, dtype=torch.float64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint) as caught:
        lemonx.plan(folder, width="2x")
    said = str(caught.value)
    assert "lemonx does not know what the tensor 'cls.species.weight' does" in said and "remove" not in said
    assert "AutoModel.from_pretrained(...).save_pretrained(...)" in said
    # The remedy is one.
    hf.AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "base")
    assert lemonx.plan(tmp_path / "base", width="2x").steps


# ----------------------------------------------------------------- images that are not square

RECTANGLES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {"image_size": [16, 24], "patch_size": [4, 8]},
    "DeiTForImageClassification": {"image_size": [16, 24], "patch_size": [8, 4]},
    "BeitForImageClassification": {"image_size": [16, 24]},
    "Data2VecVisionForImageClassification": {"image_size": [24, 16]},
    "Dinov2ForImageClassification": {"image_size": [16, 32], "patch_size": [4, 8]},
    # In stage 1 one side has a single window: then the first Swin shifts none, and the second along the other side.
    "SwinForImageClassification": {"image_size": [32, 16], "window_size": 2},
    "Swinv2ForImageClassification": {"image_size": [32, 16], "window_size": 2, "patch_size": [4, 4]},
    "ConvNextForImageClassification": {"image_size": [32, 64], "patch_size": [4, 8]},
}


@pytest.mark.parametrize("name", RECTANGLES)
def test_images_need_not_be_square(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / "source", **RECTANGLES[name])
    sizes = {"width": "2x", "set": deeper(folder, classes()[name])}
    target = lemonx.expand(folder, tmp_path / "target", verify=name.startswith("Swin"), **sizes).path
    assert largest_difference(model, target) <= EXACT


@pytest.mark.parametrize("name", ["CLIPVisionModel", "SiglipVisionModel"])
def test_a_family_of_square_images_says_so(name: str, tmp_path: Path) -> None:
    _, folder = saved(name, tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_size": [16, 24]}))
    with pytest.raises(Refused, match=r"image_size is \[16, 24\].*square images only"):
        lemonx.plan(folder, width="2x")


# ----------------------------------------------------------------- what leaves a model as it is


@pytest.mark.parametrize(
    ("name", "more"), [("OlmoModel", {}), ("OPTModel", {"_remove_final_layer_norm": True})], ids=["olmo", "opt"]
)
def test_a_stream_without_a_norm_to_scale_it_back_is_not_given_out_scaled(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """The last norm has no parameters, or there is none: nothing between the stream's gain and the output."""
    model, folder = saved(name, tmp_path / "source", **more)
    with pytest.raises(Refused, match=r"the model outputs .* itself, which from 48 to 72.*try --width 96"):
        lemonx.plan(folder, width="3/2x")
    target = lemonx.expand(folder, tmp_path / "target", verify=False, width="2x").path
    assert largest_difference(model, target) <= EXACT


def test_a_classifier_has_no_decoder_to_untie(tmp_path: Path) -> None:
    """Its config may say that words are tied, but its class has nothing to tie to."""
    _, folder = saved("Gemma2ForTokenClassification", tmp_path / "source")
    assert "lm_head" not in {step.row for step in lemonx.plan(folder, width="2x").steps}
    with pytest.raises(BadTarget, match="tie_word_embeddings=false has no effect, as no output head here is tied"):
        lemonx.plan(folder, width="2x", set={"tie_word_embeddings": False})
