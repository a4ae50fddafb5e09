"""Weights in 8 bits with scales are the floats they stand for; what is quantised otherwise is refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import lemonx
import pico
from commands import BAD_CHECKPOINT, Run, assert_refused, runner
from lemonx.checkpoints import Checkpoint, store
from lemonx.errors import BadCheckpoint

FP8, INT8 = torch.float8_e4m3fn, torch.int8
BLOCK = (16, 32)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def _blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """fp8 numbers and a scale per block, computed block by block; the last blocks may be smaller."""
    rows, columns = weight.shape
    scale = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    stored = torch.empty_like(weight, dtype=FP8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scale[i, j]).to(FP8)
    return stored, scale


def _values(stored: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Entry by entry what it stands for."""
    full = torch.empty(stored.shape)
    for i in range(stored.shape[0]):
        for j in range(stored.shape[1]):
            full[i, j] = stored[i, j].float() * scale[i // block[0], j // block[1]]
    return full


def quantise(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """A model whose projections are in 8 bits, and what its tensors stand for."""
    weights = load_file(folder / "model.safetensors")
    stands = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights[name].float()
        if kind == "blocks":
            stored, scale = _blocks(weight, BLOCK)
            weights |= {name: stored, f"{name}_scale_inv": scale}
            stands[name] = _values(stored, scale, BLOCK)
        else:
            largest = weight.abs().amax(1, keepdim=True) if kind == "rows" else weight.abs().max().reshape(1)
            stored = (weight / largest * 127).round().to(INT8)
            weights |= {name: stored, f"{name}_scale": largest / 127}
            stands[name] = stored.float() * (largest / 127)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    if kind == "blocks":
        settings = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    change(folder, quantization_config=settings, dtype="float32")
    return folder, stands


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return pico.save(pico.PICO["llama-tied"](), tmp_path / "source")


@pytest.mark.parametrize("kind", ["blocks", "rows", "whole"])
@pytest.mark.parametrize("piece", [1 << 24, 1000])
def test_numbers_are_what_they_stand_for(kind: str, piece: int, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCK", piece)
    folder, stands = quantise(plain, kind)
    with Checkpoint.open(folder) as opened:
        assert opened.tensors.keys() == stands.keys() and "quantization_config" not in opened.config
        assert all(torch.equal(opened.read(name), tensor) for name, tensor in stands.items())
        assert opened.converted and "dequantised to F32" in opened.converted and opened.origin == folder


def test_it_grows_and_the_certificate_says_from_what(run: Run, plain: Path, tmp_path: Path) -> None:
    folder, _ = quantise(plain, "blocks")
    done = run("expand", folder, "out", "--width", 96, "--depth", 3, "--json")
    assert done.code == 0, done
    said = json.loads(done.out)
    assert said["verified"]["proven"] and said["source"]["converted"].startswith("14 tensors in F8_E4M3 with scales")
    assert run("verify", folder, "out").code == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for name, tensor in written.items() if "_proj" in name} == {torch.float32}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_half_is_stored_as_the_config_says(plain: Path) -> None:
    folder, stands = quantise(plain, "blocks")
    name = "model.layers.0.mlp.up_proj.weight"
    for said, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16), (None, torch.bfloat16)):
        change(folder, dtype=said)
        with Checkpoint.open(folder) as opened:
            assert torch.equal(opened.read(name), stands[name].to(dtype))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 3)}, "needs .7, 2."),
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": None}, "quantised in a way that is not read here"),
        ({"model.layers.0.mlp.up_proj.weight_packed": torch.ones(3, dtype=torch.int32)}, "model.dequantize"),
        ({"model.layers.0.mlp.up_proj.weight_zero_point": torch.ones(3, dtype=INT8)}, "model.dequantize"),
    ],
)
def test_what_does_not_fit_is_refused(broken: dict[str, Tensor | None], says: str, plain: Path) -> None:
    folder, _ = quantise(plain, "blocks")
    weights = {**load_file(folder / "model.safetensors"), **broken}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=says):
        Checkpoint.open(folder)


def pack(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts as gpt-oss stores them, of random bytes, and what transformers makes of these."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, stands = dict(weights), dict(weights)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        stands[name] = convert_moe_packed_tensors(blocks, scales)
    return stored, stands


def gpt_oss(folder: Path) -> dict[str, Tensor]:
    model = pico.of_class(hf.GptOssForCausalLM, hidden_size=64, intermediate_size=32)
    pico.save(model, folder, torch.bfloat16)
    stored, stands = pack(load_file(folder / "model.safetensors"))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return stands


def test_four_bits_are_what_transformers_makes_of_them(run: Run, tmp_path: Path) -> None:
    stands = gpt_oss(tmp_path / "source")
    with Checkpoint.open(tmp_path / "source") as opened:
        assert opened.tensors.keys() == stands.keys()
        assert all(torch.equal(opened.read(name), tensor) for name, tensor in stands.items())
        assert opened.converted == "4 tensors in MXFP4, dequantised to BF16"
    done = run("expand", "source", "out", "--depth", 3, "--json")
    assert done.code == 0, done
    said = json.loads(done.out)
    assert said["verified"]["proven"] and "MXFP4" in said["source"]["converted"]
    assert run("verify", "source", "out").code == 0


@pytest.mark.parametrize(
    ("ending", "changed", "says"),
    [
        ("gate_up_proj_scales", None, "no scales for it"),
        ("gate_up_proj_blocks", None, "without the blocks that it scales"),
        ("gate_up_proj_scales", torch.zeros(3, 3, dtype=torch.uint8), "which is not MXFP4 as gpt-oss has it"),
        ("down_proj_scales", 255, "that is not a number"),
    ],
)
def test_four_bits_that_do_not_fit(ending: str, changed: Any, says: str, tmp_path: Path) -> None:
    gpt_oss(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith(ending))
    before = weights.pop(name)
    if changed is not None:
        weights[name] = changed if isinstance(changed, Tensor) else torch.full_like(before, changed)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=says):
        Checkpoint.open(tmp_path / "source")


def test_another_method_is_refused(plain: Path) -> None:
    change(plain, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(BadCheckpoint, match="quantization_config: dequantise"):
        lemonx.plan(plain, depth=3)


def test_files_say_how_they_are_converted(run: Run, plain: Path, tmp_path: Path) -> None:
    for name, says in (
        ("model.pt", "is not a folder: put the model's config.json beside it, and use --allow-pickle"),
        ("x.safetensors", "is not a folder: give the folder it is in"),
    ):
        (tmp_path / name).write_bytes(b"GGUF")
        assert_refused(run("plan", name, "--depth", 3), BAD_CHECKPOINT, says)
    (plain / "model.safetensors").rename(plain / "model.gguf")
    assert_refused(run("plan", plain, "--depth", 3), BAD_CHECKPOINT, "GGUF only: give the file, model.gguf")
