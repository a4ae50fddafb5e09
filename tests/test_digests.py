"""The bytes of expansions, pinned: a change of the house that alters one of them is not a move.

The weights are whole multiples of 1/64, drawn as integers, so every machine makes the same sources. Frames are left
out: their solver is not stable to the bit, and they are compared by what they compute (test_frames.py).
`python tests/test_digests.py` writes the digests of the code as it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lemonx
from pico import PICO

GOLDEN = Path(__file__).parent / "golden" / "digests.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A growth of a pico model."""

    model: str
    sizes: dict[str, Any]
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in {**self.sizes, **self.options}.items()]
        return " ".join([self.model, self.dtype, *words])


BOTH = {"width_factor": "3/2", "depth": 3}
TWICE = {"width_factor": 2, "depth": 4}
WIDTHS = ("llama-tied", "llama-untied", "gpt2-lm", "vit-cls", "neox", "gemma3", "phi3", "t5", "mamba")
CASES = (
    *(Case(name, {"width_factor": "3/2"}, dtype) for name in WIDTHS for dtype in DTYPES),
    *(Case(name, {"width_factor": 2}, "bfloat16") for name in ("bert-mlm", "resnet-bottleneck", "swinv2-cls", "clip")),
    *(Case(name, {"width_factor": 2}) for name in ("bert-mlm", "resnet-bottleneck", "convnext-cls", "whisper")),
    *(Case(name, {"depth": 5}, dtype) for name in ("qwen3", "bert-base", "vit-base") for dtype in DTYPES),
    Case("llama-tied", TWICE, "bfloat16", {"seed": 7}),
    Case("llama-tied", TWICE, "float32", {"free": "vision", "seed": 3}),
    Case("llama-tied", TWICE, "float32", {"depth_type": 2}),
    Case("vit-cls", BOTH, "float32", {"free": "vision", "depth_type": 2, "seed": 1}),
    Case("mixtral", {"fields": {"num_local_experts": 8, "num_experts_per_tok": 4}}, "bfloat16"),
    Case("mistral", {"fields": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}}),
    Case("llama-tied", {"fields": {"tie_word_embeddings": False}, "ffn": 160}, "bfloat16"),
    *(Case("llama-untied", BOTH, dtype, {"free": "own"}) for dtype in DTYPES),
    *(Case(name, {"width_factor": 2}, "bfloat16", {"free": "own"}) for name in ("bert-mlm", "vit-cls", "clip")),
    Case("mixtral", {"width_factor": 2}, "bfloat16", {"free": "own"}),
    *(Case("gpt2-lm", TWICE, "float32", {"method": name}) for name in ("net2net", "fpi", "aki", "staged")),
    *(Case("llama-untied", {"depth": 4}, "bfloat16", {"method": name}) for name in ("gstack", "llama-pro", "solar")),
    *(Case("bert-mlm", {"depth": 4}, "float32", {"method": name}) for name in ("stackbert", "mslt")),
    Case("llama-untied", {"width_factor": 2}, "bfloat16", {"method": "hypercloning"}),
)


def source(case: Case, folder: Path) -> Path:
    """The model's folder with weights that are the same everywhere; what must be positive is."""
    model = PICO[case.model]().to(DTYPES[case.dtype])
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in sorted(weights.keys())}
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.is_floating_point():
            low = 1 if tensor.ndim == 1 else -64
            drawn = np.random.default_rng(number).integers(low, 64, tensor.shape)
            tensors[name] = torch.from_numpy(np.asarray(drawn / 64)).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def digest(case: Case, folder: Path) -> str:
    """Of every tensor of the expansion: name, dtype, shape and bytes; without a `free`, that of language."""
    target, options = folder / "target", {"free": "language", **case.options}
    lemonx.expand(source(case, folder / "source"), target, verify=False, **case.sizes, **options)
    found = hashlib.sha256()
    with safe_open(target / "model.safetensors", "pt") as weights:
        for name in sorted(weights.keys()):
            tensor = weights.get_tensor(name)
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_byte_changes(case: Case, tmp_path: Path) -> None:
    assert digest(case, tmp_path) == json.loads(GOLDEN.read_text())[str(case)]


def test_the_list_is_of_these_cases() -> None:
    assert json.loads(GOLDEN.read_text()).keys() == {str(case) for case in CASES}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = {str(case): digest(case, Path(scratch) / str(number)) for number, case in enumerate(CASES)}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    sys.stdout.write(f"{len(made)} digests\n")
