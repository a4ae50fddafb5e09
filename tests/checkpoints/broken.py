"""Small real checkpoints, and the ways to break them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lemonx.errors import LemonxError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Four tensors: a scalar, a vector, a matrix and a stack of matrices."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "bias": (5,), "weight": (7, 3), "experts.gate": (2, 3, 4)}
    return {name: (torch.randn(shape, generator=generator) * 100).to(dtype) for name, shape in shapes.items()}


def save_model(folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A folder with config.json and model.safetensors, written by the safetensors library."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(dict(tensors() if weights is None else weights), folder / "model.safetensors")
    return folder


def save_sharded(folder: Path) -> Path:
    """A folder with an index and two shards: a.safetensors (weight) and b.safetensors (the others)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    weights = tensors()
    save_file({"weight": weights.pop("weight")}, folder / "a.safetensors")
    save_file(weights, folder / "b.safetensors")
    weight_map = {"weight": "a.safetensors", **dict.fromkeys(weights, "b.safetensors")}
    write_index(folder, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return folder


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the index's object."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with this header (an object, or its bytes) and this data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    """A header entry; the shape is by default that of a float32 vector."""
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def assert_one_line(kind: type[LemonxError], match: str, action: Callable[[], object]) -> None:
    """`action` raises `kind` with one line that matches and gives advice after a colon."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert type(caught.value) is kind, caught.value
    assert "\n" not in message, message
    assert re.search(match, message), message
    assert ": " in message, message
