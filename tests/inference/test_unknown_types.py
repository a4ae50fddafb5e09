"""Checkpoints of model types without a table: the table is inferred, and all else is as for any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import ArceeConfig, CamembertForSequenceClassification

import lemonx
from commands import BAD_CHECKPOINT, BAD_TARGET, DIFFERS, REFUSED, Run, runner
from inference.unknown import DEPTH, EXACT, HALF_MORE, TWICE, difference, model_class, save
from lemonx import architectures
from lemonx.inference.expressions import constant
from lemonx.inference.family import infer
from lemonx_lab.survey.randomise import randomise

Source = Callable[[str], Path]
PLUGIN = Path(__file__).parent.parent / "data" / "plugin"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = save(model_type, tmp_path_factory.mktemp("unknown") / model_type)
        return made[model_type]

    return make


def _is_one_line(text: str) -> bool:
    return len(text.strip().splitlines()) == 1


def test_none_of_them_has_a_table() -> None:
    assert len(EXACT) >= 10
    assert not EXACT.keys() & architectures.families().keys()


@pytest.mark.parametrize(("model_type", "growth"), [(kind, growth) for kind in EXACT for growth in EXACT[kind]])
def test_it_grows_through_the_command_line(
    model_type: str, growth: str, source: Source, run: Run, tmp_path: Path
) -> None:
    small, large = source(model_type), tmp_path / "large"
    result = run("expand", small, large, *EXACT[model_type][growth])
    assert result.code == 0, result.err
    assert f"no table for a {model_type}" in result.out
    said = json.loads((large / "lemonx.json").read_text())
    assert said["table"] == "inferred" and said["verified"]["proven"] and said["lossless"]
    assert difference(model_type, small, large) < 1e-10


def test_verify_infers_again_and_finds_a_changed_weight(source: Source, run: Run, tmp_path: Path) -> None:
    large = tmp_path / "large"
    assert run("expand", source("arcee"), large, "--width", "1.5x").code == 0
    assert run("verify", source("arcee"), large).code == 0
    assert run("verify", source("arcee"), large, "--layerwise").code == 0
    result = run("verify", source("arcee"), large, "--spec", "none")
    assert result.code != 0 and "model_type 'arcee'" in result.err and _is_one_line(result.err)
    tensors = load_file(large / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-6
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    assert run("verify", source("arcee"), large).code == DIFFERS


def test_no_infer_keeps_to_tables(source: Source, run: Run, tmp_path: Path) -> None:
    for command in (("plan",), ("expand", tmp_path / "large")):
        result = run(command[0], source("arcee"), *command[1:], "--width", "2x", "--spec", "none")
        assert result.code == REFUSED
        assert "has model_type 'arcee', which lemonx does not support" in result.err and _is_one_line(result.err)


def test_plan_says_so_and_writes_nothing(source: Source, run: Run) -> None:
    result = run("plan", source("arcee"), "--width", "72", "--depth", "3")
    assert result.code == 0 and "inferred from runs of transformers' own class" in result.out


def test_shapes_for_a_number_of_parameters(source: Source) -> None:
    found = lemonx.shapes(source("arcee"), "3x")
    assert found and all(shape.plan.policy.lossless and shape.proportion for shape in found)
    with pytest.raises(lemonx.UnknownArchitecture, match="arcee"):
        lemonx.shapes(source("arcee"), "3x", spec="none")


def test_a_size_is_any_that_the_table_knows(source: Source, tmp_path: Path) -> None:
    plan = lemonx.plan(source("arcee"), ffn=100, set={"num_attention_heads": 8})
    assert plan.target_config["intermediate_size"] == 100
    assert plan.target_config["num_attention_heads"] == 8 and plan.target_config["num_key_value_heads"] == 2
    like = {**plan.target_config, "num_hidden_layers": 3}
    assert lemonx.plan(source("arcee"), like=like).target_config["num_hidden_layers"] == 3


def test_a_method_that_is_not_lossless_works_too(source: Source, tmp_path: Path) -> None:
    made = lemonx.expand(source("arcee"), tmp_path / "large", depth=4, method="stackbert")
    assert not made.certificate.lossless and made.certificate.table == "inferred"


def test_layer_types_follow_their_layers(source: Source, tmp_path: Path) -> None:
    large = lemonx.expand(source("exaone4"), tmp_path / "large", depth="+2")
    before = json.loads((source("exaone4") / "config.json").read_text())
    after = json.loads((large / "config.json").read_text())
    placed = [block.source for block in large.plan.blocks["model.layers"]]
    assert after["layer_types"] == [before["layer_types"][place] for place in placed]


def test_a_post_norm_encoder_grows_to_a_width_that_is_no_multiple(run: Run, tmp_path: Path) -> None:
    """By frames, from the gains of the file: exact, and as stable as the source."""
    small, large = save("camembert", tmp_path / "small", kind=CamembertForSequenceClassification), tmp_path / "large"
    few = run("plan", small, "--width", "1.5x", "--ffn", "175")
    assert few.code == REFUSED and "needs 96 new MLP neurons" in few.err and "--width 72 --ffn 176" in few.err
    result = run("expand", small, large, "--width", "1.5x", "--ffn", "176")
    assert result.code == 0, result.err
    said = json.loads((large / "lemonx.json").read_text())
    assert said["table"] == "inferred" and said["verified"]["proven"] and said["lossless"]
    outputs = said["verified"]["outputs"]
    assert (
        outputs["difference"] < 1e-10
        and outputs["stability"]["noise_ratio"] < 10 > outputs["stability"]["gradient_ratio"]
    )


# ----------------------------------------------------------------- what cannot be


def test_a_type_that_cannot_be_inferred_gives_one_line(run: Run, tmp_path: Path) -> None:
    result = run("expand", save("jamba", tmp_path / "small"), tmp_path / "large", "--width", "2x")
    assert result.code == REFUSED and _is_one_line(result.err)
    assert "a jamba has no table, and none can be inferred" in result.err
    assert not (tmp_path / "large").exists()


def _ctrl() -> transformers.PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 37, "n_positions": 64}
    return transformers.CTRLLMHeadModel(transformers.CTRLConfig(vocab_size=99, **sizes))


def _doge() -> transformers.PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, **heads}
    return transformers.DogeForCausalLM(transformers.DogeConfig(vocab_size=128, **sizes))


def _clipseg() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**sizes, "vocab_size": 99, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
    decoder = {"reduce_dim": 32, "extract_layers": [0], "decoder_num_attention_heads": 4}
    vision = {**sizes, "image_size": 30, "patch_size": 2}
    config = transformers.CLIPSegConfig(text_config=text, vision_config=vision, projection_dim=64, **decoder)
    return transformers.CLIPSegForImageSegmentation(config)


@pytest.mark.parametrize(
    ("make", "growth", "code", "said"),
    [
        (_ctrl, DEPTH, 0, ""),  # its config names no token for padding
        (_ctrl, TWICE, BAD_TARGET, "a ctrl has no size that --width sets"),
        (_doge, HALF_MORE, REFUSED, "cannot widen"),  # a norm over entries that stay as they are shares its eps
        (_clipseg, TWICE, REFUSED, "decoder.transposed_convolution.weight"),
        (_clipseg, DEPTH, REFUSED, "decoder.transposed_convolution.weight"),
    ],
)
def test_configs_of_others_grow_or_are_refused_in_one_line(
    make: Callable[[], transformers.PreTrainedModel],
    growth: tuple[str, ...],
    code: int,
    said: str,
    run: Run,
    tmp_path: Path,
) -> None:
    model = make().double()
    randomise(model, 0)
    model.save_pretrained(tmp_path / "small")
    result = run("expand", tmp_path / "small", tmp_path / "large", *growth)
    assert result.code == code and said in result.err and _is_one_line(result.err or "-")


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, REFUSED, "auto_map"),
        ({"hidden_size": 10**12}, BAD_CHECKPOINT, "hidden_size"),
        ({"num_hidden_layers": 10**9}, BAD_CHECKPOINT, "num_hidden_layers"),
        ({"num_hidden_layers": 4000}, BAD_CHECKPOINT, "parameters"),
        ({"hidden_size": "wide"}, BAD_CHECKPOINT, "hidden_size"),
        ({"intermediate_size": [1, 2]}, BAD_CHECKPOINT, ""),
        ({"intermediate_size": 100}, BAD_CHECKPOINT, "shape"),
        ({"architectures": ["os.system"]}, BAD_CHECKPOINT, "os.system"),
        ({"max_position_embeddings": "x"}, BAD_CHECKPOINT, ""),
        ({"hidden_act": "no such"}, BAD_CHECKPOINT, "no such"),
    ],
)
def test_a_hostile_config_gives_one_line(
    fields: dict[str, Any], code: int, said: str, source: Source, run: Run, tmp_path: Path
) -> None:
    shutil.copytree(source("arcee"), tmp_path / "small")
    config = tmp_path / "small" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    begin = time.process_time()
    result = run("expand", tmp_path / "small", tmp_path / "large", "--width", "2x")
    assert result.code == code and _is_one_line(result.err), result.err
    assert said in result.err and time.process_time() - begin < 60
    assert not (tmp_path / "large").exists()


# ----------------------------------------------------------------- the printed table


@pytest.mark.parametrize("model_type", ["arcee", "biogpt", "gpt_bigcode", "exaone4", "vit_msn", "lfm2"])
def test_the_printed_table_does_the_same_to_the_byte(model_type: str, source: Source, run: Run, tmp_path: Path) -> None:
    printed = run("infer", source(model_type))
    assert printed.code == 0 and "c[" in printed.out
    (tmp_path / "table.py").write_text(printed.out)
    growth = next(iter(EXACT[model_type].values()))
    assert run("expand", source(model_type), tmp_path / "one", *growth).code == 0
    result = run("expand", source(model_type), tmp_path / "other", *growth, "--spec", tmp_path / "table.py")
    assert result.code == 0 and "the table is from table.py" in result.out, result.err
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert run("verify", source(model_type), tmp_path / "other", "--spec", tmp_path / "table.py").code == 0
    assert "table.py" in json.loads((tmp_path / "other" / "lemonx.json").read_text())["table"]


def test_sizes_are_expressions_of_config_fields(source: Source) -> None:
    text = lemonx.infer(source("arcee"))
    assert 'zero(c["hidden_size"])' in text
    assert 'circ(c["num_attention_heads"] // c["num_key_value_heads"])' in text
    assert 'Stack(size=c["num_hidden_layers"]' in text and 'eps="rms_norm_eps"' in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "line 1: SyntaxError"),
        ("\n1 / 0", "line 2: ZeroDivisionError"),
        ("x = 1", "registers no model type"),
        (None, "cannot be read"),
    ],
)
def test_a_table_that_is_none_gives_one_line(
    text: str | None, said: str, source: Source, run: Run, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "table.py").write_text(text)
    result = run("plan", source("arcee"), "--width", "2x", "--spec", tmp_path / "table.py")
    assert result.code == BAD_TARGET and said in result.err and _is_one_line(result.err)


def test_a_wrong_table_is_found_out(source: Source, run: Run, tmp_path: Path) -> None:
    """Queries of one head handed to another: every shape fits, and the outputs differ."""
    here, text = "model_layers_self_attn_q_proj", lemonx.infer(source("arcee"))
    assert f"({here} {here}_2 {here}_3)" in text
    (tmp_path / "table.py").write_text(text.replace(f"({here} {here}_2 {here}_3)", f"({here}_2 {here} {here}_3)"))
    result = run("expand", source("arcee"), tmp_path / "large", "--width", "2x", "--spec", tmp_path / "table.py")
    assert result.code == DIFFERS and not (tmp_path / "large").exists()


def test_a_package_brings_a_table(source: Source, tmp_path: Path) -> None:
    """The sample package is installed, without network, and used by its entry point."""
    target = tmp_path / "packages"
    shutil.copytree(PLUGIN, tmp_path / "plugin")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", str(target), str(tmp_path / "plugin")], check=True)
    paths = [str(target), str(Path(lemonx.__file__).parent.parent)]
    begun = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lemonx", "expand", str(source("arcee")), str(tmp_path / "large")]
    done = subprocess.run(
        [*command, "--width", "1.5x", "--spec", "none"], env=begun, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "large" / "lemonx.json").read_text())["table"] == "lemonx-sample"
    assert difference("arcee", source("arcee"), tmp_path / "large") < 1e-10


# ----------------------------------------------------------------- at full size


def test_a_7b_config_is_inferred_in_seconds_and_without_its_weights() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = ArceeConfig(**sizes, num_hidden_layers=32, vocab_size=32000, bos_token_id=1, eos_token_id=2)
    values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["ArceeForCausalLM"]}
    larger = values | {"hidden_size": 6144, "intermediate_size": 16512, "num_attention_heads": 48}
    larger |= {"num_key_value_heads": 12, "num_hidden_layers": 40}
    before, begin = psutil.Process().memory_info().rss, time.process_time()
    found = infer(values, 300)
    found.confirm(values, larger)
    assert time.process_time() - begin < 60  # with its weights it would take hours
    assert psutil.Process().memory_info().rss - before < 2**29  # its weights would take 2**34 bytes
    spec = found.family.spec(larger)
    assert {space.size for space in spec.spaces.values()} == {32000, 6144, 12, 4, 128, 16512}


def test_a_table_that_does_not_hold_at_the_sizes_is_found_out_beforehand(source: Source) -> None:
    """Were an expression wrong, runs at the sizes of source and target would show another size."""
    values = json.loads((source("arcee") / "config.json").read_text())
    found, larger = infer(values, 19), values | {"intermediate_size": 100}
    found.confirm(values, larger)
    hidden = found.template.spaces["model_layers_mlp_up_proj"]
    spaces = {**found.template.spaces, "model_layers_mlp_up_proj": replace(hidden, size=constant(80))}
    wrong = replace(found, template=replace(found.template, spaces=spaces))
    with pytest.raises(lemonx.Refused, match=r"makes model_layers_mlp_up_proj 80 .* shows 100"):
        wrong.confirm(values, larger)


def test_the_vision_tower_of_a_composite_model_grows_alone(source: Source, run: Run, tmp_path: Path) -> None:
    sizes = ("--set", "vision_config.hidden_size=96", "--set", "vision_config.num_attention_heads=8")
    result = run("expand", source("llava"), tmp_path / "large", *sizes)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "large" / "lemonx.json").read_text())["verified"]["proven"]
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source("llava"), tmp_path / "large")
    )
    assert after["vision_config"]["hidden_size"] == 96 and after["text_config"] == before["text_config"]
    assert difference("llava", source("llava"), tmp_path / "large") < 1e-10


def test_a_model_in_memory_grows_too(source: Source) -> None:
    model = model_class("arcee").from_pretrained(source("arcee"))
    large = lemonx.expand(model, width="2x", depth="+1")
    assert large.config.hidden_size == 96 and large.config.num_hidden_layers == 3


def test_the_same_function_in_lower_precision(run: Run, tmp_path: Path) -> None:
    small = save("arcee", tmp_path / "small", torch.bfloat16)
    assert run("expand", small, tmp_path / "large", "--width", "2x").code == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "large" / "model.safetensors").values()} == {torch.bfloat16}
