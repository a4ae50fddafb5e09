"""Weights in 8 bits with scales are the floats they stand for; what is quantised otherwise is refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lemonx
import pico
from commands import BAD_CHECKPOINT, Run, assert_refused, runner
from lemonx.checkpoints import Checkpoint, quantised
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
    monkeypatch.setattr(quantised, "_BLOCK", piece)
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


def test_another_method_is_refused(plain: Path) -> None:
    change(plain, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(BadCheckpoint, match="quantization_config: dequantise"):
        lemonx.plan(plain, depth=3)


def test_files_say_how_they_are_converted(run: Run, plain: Path, tmp_path: Path) -> None:
    for name, says in (
        ("model.gguf", "is not a folder: convert it: AutoModelForCausalLM.from_pretrained.*gguf_file"),
        ("model.pt", "is not a folder: put it into a folder as pytorch_model.bin.*--allow-pickle"),
        ("x.safetensors", "is not a folder: give the folder it is in"),
    ):
        (tmp_path / name).write_bytes(b"GGUF")
        assert_refused(run("plan", name, "--depth", 3), BAD_CHECKPOINT, says)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert_refused(run("plan", "adapter", "--depth", 3), BAD_CHECKPOINT, "is a PEFT adapter, not a model: merge it")
    (plain / "model.safetensors").rename(plain / "model.gguf")
    assert_refused(run("plan", plain, "--depth", 3), BAD_CHECKPOINT, "holds its weights as GGUF only: convert them")
