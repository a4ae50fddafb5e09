"""What a comparison of outputs says where it cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
from lemonx.errors import BadCheckpoint
from pico import PICO, save


def test_a_quantised_target_is_not_the_same(tmp_path: Path) -> None:
    source, target = save(PICO["llama-tied"](), tmp_path / "source"), tmp_path / "target"
    lemonx.expand(source, target, ffn=2000, verify=False)
    tensors = load_file(target / "model.safetensors")
    largest = max(tensors, key=lambda name: tensors[name].numel())
    # The largest by bytes too, though an entry has one byte.
    tensors = {n: (t.to(torch.int8) if n == largest else t.to(torch.float32)) for n, t in tensors.items()}
    tensors[largest] = tensors[largest].repeat(8, 1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    measured = lemonx.verify(source, target)
    assert not measured.passed and measured.algebra is not None
    assert any(str(wrong).startswith(f"{largest} is I8 ") for wrong in measured.algebra.wrong)
    (target / "lemonx.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"config.json makes it|dequantise"):
        lemonx.verify(source, target)
