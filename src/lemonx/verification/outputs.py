"""Do two checkpoints compute the same outputs? Measured, against a tolerance that is derived.

Weights are taken as they are stored and the arithmetic is float64 throughout, so what remains is what the
expansion itself did. Where every tensor is exact in its stored dtype the tolerance is 1e-10 of the largest
output. Where a rounding is unavoidable (a norm's eta in bf16, say) it is NOISE_MULTIPLE times the noise of the
source itself: the source run in its stored dtype (or the target's, if that is coarser) against the source run in
float64.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, NotVerified
from lemonx.verification.loading import floating_outputs, load, sample

if TYPE_CHECKING:
    import torch

EXACT = 1e-10
NOISE_MULTIPLE = 4.0
NEW_TOKENS = 8
# From coarse to fine.
_PRECISION = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Comparison:
    """Figures of one comparison; differences and noise are relative to the largest output.

    `kl`: the mean divergence of the target's distribution from the source's, in nats, where there are logits.
    """

    difference: float
    tolerance: float
    noise: float | None
    largest_output: float
    outputs: tuple[str, ...]
    tokens_equal: bool | None
    kl: float | None
    odd_keys: tuple[str, ...]
    inputs: str

    @property
    def passed(self) -> bool:
        # A rounding may turn a near tie between two tokens: other tokens are a fault only where all is exact.
        same_tokens = self.tokens_equal is not False or self.tolerance > EXACT
        return self.difference <= self.tolerance and same_tokens and not self.odd_keys

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def reason(self) -> str:
        """Why it did not pass, in one line."""
        if self.odd_keys:
            return f"the target's class does not take its tensors as they are: {', '.join(self.odd_keys[:3])}"
        if self.difference > self.tolerance or self.difference != self.difference:
            return f"outputs differ by {self.difference:.2e} of the largest, more than {self.tolerance:.1e}"
        return "greedy generation gives other tokens"


def compare(source: Checkpoint, target: Checkpoint, *, exact: bool, slack: float = 0.0, seed: int = 0) -> Comparison:
    """Run both on the same sample. `exact`: no tensor was rounded; `slack`: what is known to be lost (eps)."""
    if (short := memory_short(source, target)) is not None:
        raise NotVerified(f"{short}: verify on a larger machine")
    stored = min(stored_dtype(source), stored_dtype(target), key=_PRECISION.index)
    before, odd_before, batch = _run(source.path, seed)
    inputs = " and ".join(f"{name} {list(value.shape)}" for name, value in batch.items() if name != "attention_mask")
    noise = None if exact or stored == "float64" else _noise(source.path, stored, before, seed)
    # The same texts: the target's vocabulary and its longest text may be larger.
    after, odd_after, _ = _run(target.path, seed, batch)
    shared = [name for name in before.outputs if name in after.outputs]
    worst, largest = 0.0, 0.0
    for name in shared:
        reference = before.outputs[name]
        # A base model's output is wider: the inverse of every expansion here reads the first entries.
        other = after.outputs[name][..., : reference.shape[-1]]
        if other.shape != reference.shape:
            shapes = f"{list(reference.shape)} in the source and {list(other.shape)} in the target"
            raise NotVerified(f"{name} has shape {shapes}: they are different models")
        scale = float(reference.abs().max())
        worst = max(worst, float((reference - other).abs().max()) / (scale or 1.0))
        largest = max(largest, scale)
    if not shared:
        raise NotVerified(f"{source.path} and {target.path} have no output in common: they are different models")
    tolerance = max(EXACT, slack, NOISE_MULTIPLE * (noise or 0.0))
    # A new token may be the most likely one: then greedy texts differ, and old logits still agree.
    wider = any(after.outputs[name].shape != before.outputs[name].shape for name in shared if name.endswith("logits"))
    tokens = None if before.tokens is None or wider else before.tokens.equal(after.tokens)
    odd = tuple(sorted(odd_after - odd_before))
    kl = _divergence(before.outputs, after.outputs)
    return Comparison(worst, tolerance, noise, largest, tuple(shared), tokens, kl, odd, inputs)


def _divergence(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float | None:
    import torch

    name = next((n for n in before if n.endswith("logits") and n in after), None)
    if name is None or before[name].shape != after[name].shape:
        return None
    p, q = (torch.log_softmax(logits[name], -1) for logits in (before, after))
    return max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))


@dataclass(frozen=True)
class _Outputs:
    outputs: dict[str, torch.Tensor]
    tokens: Any


def _run(
    path: Path, seed: int, batch: dict[str, torch.Tensor] | None = None
) -> tuple[_Outputs, frozenset[str], dict[str, torch.Tensor]]:
    import torch

    from lemonx.verification.float64 import Float64

    with Float64():
        model, odd = load(path, torch.float64)
        own = sample(model, seed)
        if batch is None or batch.keys() != own.keys():
            batch = own
        found = floating_outputs(model, batch)
        tokens = None
        if model.can_generate() and "input_ids" in batch:
            tokens = model.generate(  # pyright: ignore[reportCallIssue]
                **batch, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True
            )
    del model
    gc.collect()
    return _Outputs(found, tokens), odd, batch


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the largest tensor, which is that of nearly all."""
    from lemonx.checkpoints.safetensors_file import torch_dtype

    largest = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    name = str(torch_dtype(largest.dtype)).removeprefix("torch.")
    if name not in _PRECISION:
        raise BadCheckpoint(f"{largest.name} is stored as {largest.dtype}, not as a float: dequantise the model first")
    return name


def _noise(path: Path, dtype: str, reference: _Outputs, seed: int) -> float:
    """The source in its stored dtype against itself in float64: in a child, because some CPUs die on bf16."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outputs.safetensors"
        command = [sys.executable, "-m", "lemonx.verification.noise", str(path), dtype, str(seed), str(file)]
        environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", **os.environ}
        child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if child.returncode != 0 or not file.exists():
            last = (child.stderr.strip().splitlines() or ["no message"])[-1]
            raise NotVerified(
                f"the source itself does not run in {dtype} here ({last}): expand with --dtype float32, or --no-verify"
            )
        outputs = load_file(file)
    return max(
        float((reference.outputs[name] - value).abs().max() / reference.outputs[name].abs().max().clamp(min=1e-300))
        for name, value in outputs.items()
    )


def memory_short(source: Checkpoint, target: Checkpoint) -> str | None:
    """Why a comparison cannot run here, if it cannot: one model in float64 at a time must fit in memory."""
    needed = 1.3 * 8 * max(sum(i.numel for i in c.tensors.values()) for c in (source, target))
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable")), None)
    if free is None or needed <= free:
        return None
    return f"verification in float64 needs {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
