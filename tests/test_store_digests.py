"""The bytes of expansions from every kind of source, pinned, as test_digests.py does for models and methods.

Weights, moments and adapters are whole multiples of 1/64, so every machine makes the same sources and the same merged
weights. `python tests/test_store_digests.py` writes the digests of the code as it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import faults
import lemonx
from checkpoints.test_quantised import gpt_oss, quantise
from models.test_gguf import write as write_gguf
from test_digests import Case, source
from test_runs import Form, as_megatron, as_torchtitan, everything, save
from test_universal import KINDS, RUNS, TAG, loaded

GOLDEN = Path(__file__).parent / "golden" / "stores.json"
GROW: dict[str, Any] = {"width": 72, "heads": 6, "kv_heads": 3, "depth": 3, "verify": False}


def drawn(like: torch.Tensor, number: int) -> torch.Tensor:
    values = np.random.default_rng(number).integers(-64, 64, tuple(like.shape)) / 64
    return torch.from_numpy(np.asarray(values)).to(like.dtype)


def plain(folder: Path, dtype: str = "float32") -> Path:
    return source(Case("llama-untied", {}, dtype), folder / "source")


def sharded(folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(plain(folder)).save_pretrained(folder / "shards", max_shard_size="40kB")
    return folder / "shards"


def pickled(folder: Path, *, shards: bool) -> Path:
    made = faults.save_sharded("llama-tied", folder / "pickled")
    for file in faults.shards(made):
        tensors = load_file(made / file)
        save_file({name: drawn(tensor, len(name)) for name, tensor in tensors.items()}, made / file)
    faults.as_pickles(made, sharded=shards)
    return made


def in_eight_bits(kind: str) -> Callable[[Path], Path]:
    return lambda folder: quantise(plain(folder), kind)[0]


def in_four_bits(folder: Path) -> Path:
    gpt_oss(folder / "source")
    file = folder / "source" / "model.safetensors"
    tensors = load_file(file)
    kept = {n: t if t.dtype == torch.uint8 else drawn(t, k) for k, (n, t) in enumerate(sorted(tensors.items()))}
    save_file(kept, file, metadata={"format": "pt"})
    return folder / "source"


def in_gguf(kind: str) -> Callable[[Path], Path]:
    return lambda folder: write_gguf(kind, folder / "small.gguf")


def adapted(folder: Path) -> Path:
    """An adapter, and its base beside it."""
    base = plain(folder, "bfloat16")
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], modules_to_save=["norm"])
    made: Any = peft.get_peft_model(model, config)
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(folder / "adapter")
    file = folder / "adapter" / "adapter_model.safetensors"
    save_file({name: drawn(tensor, len(name)) for name, tensor in load_file(file).items()}, file)
    return folder / "adapter"


def run(folder: Path, form: Form | None = None) -> Path:
    """A run's checkpoint in torch's form, with its optimizer's moments and a count of its own."""
    small = plain(folder)
    shutil.copytree(small, folder / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(small / "model.safetensors")
    moments = {key: {n: drawn(w, k + 99) for k, (n, w) in enumerate(weights.items())} for key in FIELDS}
    moments["exp_avg_sq"] = {name: tensor.abs() for name, tensor in moments["exp_avg_sq"].items()}
    if form:
        weights, moments = form(weights, 4, 2), {key: form(found, 4, 2) for key, found in moments.items()}
    state = {f"state.{n}.{key}": tensor for key, found in moments.items() for n, tensor in found.items()}
    state |= {f"state.{n}.step": torch.tensor(3.0) for n in weights} | {f"param_groups.{n}.lr": 1e-3 for n in weights}
    saved = {**weights, "optimizer": state, "train_state": {"step": torch.tensor(7)}}
    shutil.copy(small / "config.json", save(saved, folder / "run"))
    return folder / "run"


FIELDS = ("exp_avg", "exp_avg_sq")


def universal(kind: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        shutil.unpack_archive(RUNS / f"{kind}.zip", folder / "run")
        return folder / "run"

    return made


SMALLER: dict[str, Any] = {"width": 24, "heads": 6, "kv_heads": 3, "depth": 3, "ffn": 36, "verify": False}
STATE: dict[str, Any] = {**GROW, "with_optimizer": True}
Source = Callable[[Path], Path]
SOURCES: dict[str, tuple[Source, dict[str, Any]]] = {
    "safetensors": (plain, GROW),
    "safetensors in shards, to shards": (sharded, {**GROW, "shards": "50000B"}),
    "pickle": (lambda folder: pickled(folder, shards=False), {**GROW, "allow_pickle": True}),
    "pickles": (lambda folder: pickled(folder, shards=True), {**GROW, "allow_pickle": True}),
    **{f"8 bits, {kind}": (in_eight_bits(kind), GROW) for kind in ("blocks", "rows", "whole")},
    "8 bits, to bfloat16": (in_eight_bits("blocks"), {**GROW, "dtype": "bfloat16"}),
    "MXFP4": (in_four_bits, {"depth": 3, "width": 96, "verify": False}),
    **{f"GGUF, {kind}": (in_gguf(kind), {"width": 128, "depth": 3, "verify": False}) for kind in ("llama", "qwen3moe")},
    "adapter, merged": (adapted, GROW),
    "adapter, kept": (adapted, {**GROW, "keep_adapter": True}),
    "DCP": (run, GROW),
    "DCP, with its state": (run, {**STATE, "shards": 3}),
    "torchtitan, with its state": (lambda folder: run(folder, as_torchtitan), STATE),
    "Megatron-Core, with its state": (lambda folder: run(folder, as_megatron), STATE),
    **{f"{kind}, weights": (universal(kind), SMALLER) for kind in KINDS},
    **{f"{kind}, with its state": (universal(kind), {**SMALLER, "with_optimizer": True}) for kind in KINDS},
}


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside of nested containers, with the way to it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors_of(value[key], f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_of(item, f"{name}/{number}")


def written(folder: Path) -> Iterator[tuple[str, torch.Tensor | bytes]]:
    """Yield the safetensors of an output byte by byte, and what torch loads from its own forms."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.endswith((".safetensors", ".index.json")):
            yield name, path.read_bytes()
        elif name.endswith(".pt"):
            yield from tensors_of(loaded(path), name)
        elif path.name == ".metadata":
            yield from tensors_of(everything(path.parent), name)


def digest_of(found: Iterator[tuple[str, torch.Tensor | bytes]]) -> str:
    total = hashlib.sha256()
    for name, value in found:
        if isinstance(value, torch.Tensor):
            total.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            value = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        total.update(name.encode() + value)
    return total.hexdigest()


def of_folder(name: str, folder: Path) -> str:
    make, options = SOURCES[name]
    lemonx.expand(make(folder), folder / "out", **options)
    assert not (folder / "out" / TAG).exists() or "with its state" in name
    return digest_of(written(folder / "out"))


def of_model(folder: Path) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(plain(folder))
    return digest_of(tensors_of(lemonx.expand(model, **GROW).state_dict()))


def block(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 3)
    )


def of_module(_: Path) -> str:
    small, large = block(8, 12).double(), block(16, 24).double()
    for number, parameter in enumerate(small.parameters()):
        parameter.data = drawn(parameter.data, number)
    lemonx.grow(small, large, torch.ones(4, 5, dtype=torch.float64))
    return digest_of(tensors_of(dict(large.state_dict())))


def of_shrunk(folder: Path) -> str:
    lemonx.expand(sharded(folder), folder / "large", width="2x", depth=3, free="inside", verify=False)
    lemonx.shrink(folder / "large", folder / "back")
    return digest_of(written(folder / "back"))


CASES: dict[str, Callable[[Path], str]] = {
    **{name: (lambda folder, name=name: of_folder(name, folder)) for name in SOURCES},
    "a model in memory": of_model,
    "a module": of_module,
    "shrunk again": of_shrunk,
}


@pytest.mark.parametrize("name", CASES)
def test_no_byte_changes(name: str, tmp_path: Path) -> None:
    assert CASES[name](tmp_path) == json.loads(GOLDEN.read_text())[name]


def test_the_list_is_of_these_cases() -> None:
    assert json.loads(GOLDEN.read_text()).keys() == CASES.keys()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = {}
        for number, (name, digest) in enumerate(CASES.items()):
            (Path(scratch) / str(number)).mkdir()
            made[name] = digest(Path(scratch) / str(number))
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    sys.stdout.write(f"{len(made)} digests\n")
