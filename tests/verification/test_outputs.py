"""Comparisons that cannot be made are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
from lemonx.errors import BadCheckpoint
from pico import PICO, save


def test_a_quantised_target_is_refused(tmp_path: Path) -> None:
    source, target = save(PICO["llama-tied"](), tmp_path / "source"), tmp_path / "target"
    lemonx.expand(source, target, ffn=2000, verify=False)
    tensors = load_file(target / "model.safetensors")
    largest = max(tensors, key=lambda name: tensors[name].numel())
    # The largest by bytes too, though an entry has one byte.
    tensors = {n: (t.to(torch.int8) if n == largest else t.to(torch.float32)) for n, t in tensors.items()}
    tensors[largest] = tensors[largest].repeat(8, 1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match="dequantise"):
        lemonx.verify(source, target)
