"""The paper's table 1, measured: which method is lossless where, on a small Pre-LN model with random parameters."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lemonx import api, methods
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.verification.outputs import EXACT, compare

# Column -> the sizes asked for; the source has width 48 and 2 blocks.
CASES: dict[str, dict[str, int]] = {
    "depth": {"depth": 4},
    "width (divisible)": {"width": 96},
    "width (indivisible)": {"width": 72},
}
LOSSLESS, UNDEFINED = "lossless", "-"


def overview() -> dict[str, dict[str, Any]]:
    """Method -> column -> `lossless`, the relative difference of outputs, or `-` where it is not defined."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        _small_model().save_pretrained(source)
        return {name: _row(name, source, Path(folder)) for name in sorted(methods.methods())}


def _row(name: str, source: Path, folder: Path) -> dict[str, Any]:
    cells: dict[str, Any] = {case: _measure(name, source, folder / "target", sizes) for case, sizes in CASES.items()}
    digests = {_digest(name, source, folder / "target", seed) for seed in (0, 1)}
    return {**cells, "free parameters": "yes" if len(digests) > 1 else "no"}


def _measure(name: str, source: Path, target: Path, sizes: dict[str, int]) -> str:
    try:
        api.expand(source, target, method=name, verify=False, force=True, **sizes)
    except Refused:
        return UNDEFINED
    with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
        difference = compare(small, large, exact=True).difference
    return LOSSLESS if difference <= EXACT else f"{difference:.0e}"


def _digest(name: str, source: Path, target: Path, seed: int) -> str:
    """What the method writes where it is defined: does the seed matter?"""
    for sizes in reversed(CASES.values()):
        try:
            api.expand(source, target, method=name, seed=seed, verify=False, force=True, **sizes)
        except Refused:
            continue
        with Checkpoint.open(target) as written:
            return written.content_digest()
    return ""


def _small_model() -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=61, n_positions=32, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh norms and zero biases would hide what a method does to them.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.2 * noise + (1.0 if ".ln_" in name and name.endswith("weight") else 0.0))
    return model
