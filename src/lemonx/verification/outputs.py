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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.chains import LIMIT
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, NotVerified
from lemonx.planning import Plan
from lemonx.verification.loading import floating_outputs, load, new_cache, sample
from lemonx.verification.reference import deepened

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

EXACT = 1e-10
NOISE_MULTIPLE = 4.0
NEW_TOKENS = 8
# What a model without a head gives out.
GIVEN_OUT = ("last_hidden_state", "pooler_output", "text_embeds", "image_embeds")
Back = Callable[["np.ndarray"], Sequence["np.ndarray"]]
# From coarse to fine.
PRECISION = ("bfloat16", "float16", "float32", "float64")


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
    # Where added Post-LN blocks norm the stream again: how far that moves the stream, and the outputs. The difference
    # is then from what this makes of the source.
    stream_loss: float = 0.0
    output_loss: float = 0.0

    @property
    def passed(self) -> bool:
        # A rounding may turn a near tie between two tokens: other tokens are a fault only where all is exact.
        same_tokens = self.tokens_equal is not False or self.tolerance > EXACT
        return self.difference <= self.tolerance and same_tokens and not self.odd_keys and self.stream_loss <= LIMIT

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def reason(self) -> str:
        """Why it did not pass, in one line."""
        if self.odd_keys:
            return f"the target's class does not take its tensors as they are: {', '.join(self.odd_keys[:3])}"
        if self.difference > self.tolerance or self.difference != self.difference:
            return f"outputs differ by {self.difference:.2e} of the largest, more than {self.tolerance:.1e}"
        if not self.stream_loss <= LIMIT:
            return (
                f"norms applied again move the stream by {self.stream_loss:.1e} of itself, more than {LIMIT:.1e}, "
                "because eps is not small beside its variance: give --small-gains, or keep the depth"
            )
        return "greedy generation gives other tokens"


def compare(
    source: Checkpoint,
    target: Checkpoint,
    *,
    exact: bool,
    seed: int = 0,
    back: Back | None = None,
    plan: Plan | None = None,
) -> Comparison:
    """Run both on the same sample. `exact`: no tensor was rounded; `plan`: how the target was made, if it is known.

    `back`: all ways from the target's hidden states to the source's, where these are not its first entries.
    """
    if (short := memory_short(source, target)) is not None:
        raise NotVerified(f"{short}: verify with --layerwise, or on a larger machine")
    stored = min(stored_dtype(source), stored_dtype(target), key=PRECISION.index)
    with within_memory("verify with --layerwise, or on a larger machine"):
        before = _run(source.path, seed, plan=plan)
        noise = None if exact or stored == "float64" else _noise(source, stored, before, seed)
        # The same texts: the target's vocabulary and its longest text may be larger.
        after = _run(target.path, seed, before.batch)
    return compared(source, target, before, after, noise=noise, back=back)


def compared(
    source: Checkpoint,
    target: Checkpoint,
    before: Outputs,
    after: Outputs,
    *,
    noise: float | None,
    back: Back | None = None,
) -> Comparison:
    """The figures of two runs on the same sample."""
    shared = [name for name in before.outputs if name in after.outputs]
    worst, largest = 0.0, 0.0
    for name in shared:
        reference = before.outputs[name]
        # A base model's output is wider: the inverse of an expansion that copies reads the first entries.
        other = _first_entries(reference, after.outputs[name])
        if back and name in GIVEN_OUT and other.shape == reference.shape:
            other = _nearest(reference, [other, *_through(back, reference, after.outputs[name])])
        if other.shape != reference.shape:
            shapes = f"{list(reference.shape)} in the source and {list(other.shape)} in the target"
            raise NotVerified(f"{name} has shape {shapes}: they are different models")
        scale = float(reference.abs().max())
        worst = max(worst, float((reference - other).abs().max()) / (scale or 1.0))
        largest = max(largest, scale)
    if not shared:
        raise NotVerified(f"{source.origin} and {target.origin} have no output in common: they are different models")
    tolerance = max(EXACT, NOISE_MULTIPLE * (noise or 0.0))
    # A new token may be the most likely one: then greedy texts differ, and old logits still agree.
    wider = any(after.outputs[name].shape != before.outputs[name].shape for name in shared if name.endswith("logits"))
    tokens = None if before.tokens is None or wider else before.tokens.equal(after.tokens)
    odd = tuple(sorted(after.odd_keys - before.odd_keys))
    kl = _divergence(before.as_it_is, after.outputs)
    lost = largest_difference(before.as_it_is, before.outputs)
    return Comparison(
        worst, tolerance, noise, largest, tuple(shared), tokens, kl, odd, before.inputs, before.moved, lost
    )


def _first_entries(reference: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """As many entries as the source has; of a wider vector of length one, the direction of these entries."""
    # Features of images have their channels on another axis than the last.
    first = wide[tuple(slice(size) for size in reference.shape)] if wide.ndim == reference.ndim else wide
    if wide.shape[-1] == reference.shape[-1] or first.shape != reference.shape:
        return first
    return _of_length_one(first) if _are_of_length_one(reference, wide) else first


def _are_of_length_one(*vectors: torch.Tensor) -> bool:
    return all(bool(((x.norm(dim=-1) - 1).abs() < 1e-9).all()) for x in vectors)


def _of_length_one(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _nearest(reference: torch.Tensor, ways: list[torch.Tensor]) -> torch.Tensor:
    """Each is a left inverse of an expansion that the output may have; which of them it has, a spec does not say."""
    return min(ways, key=lambda other: float((reference - other).abs().max()))


def _through(back: Back, reference: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """The states as the source would have them; what has length one there keeps it."""
    import torch

    ways = [torch.from_numpy(way) for way in back(states.numpy())]
    fitting = [way for way in ways if way.shape == reference.shape]
    return [_of_length_one(way) if _are_of_length_one(reference, states) else way for way in fitting]


def _divergence(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float | None:
    import torch

    name = next((n for n in before if n.endswith("logits") and n in after), None)
    if name is None or before[name].shape != after[name].shape:
        return None
    p, q = (torch.log_softmax(logits[name], -1) for logits in (before, after))
    return max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))


@dataclass(frozen=True)
class Outputs:
    """What one run gave; `weights`: the most bytes of parameters in memory at once, where that was measured.

    A source may be run as its deeper target must compute it. `plain`: its outputs when it is not; `moved`: how far that
    moves its stream.
    """

    outputs: dict[str, torch.Tensor]
    tokens: Any
    odd_keys: frozenset[str]
    batch: dict[str, torch.Tensor]
    weights: int = 0
    plain: dict[str, torch.Tensor] | None = None
    moved: float = 0.0

    @property
    def as_it_is(self) -> dict[str, torch.Tensor]:
        return self.outputs if self.plain is None else self.plain

    @property
    def inputs(self) -> str:
        """The sample in words."""
        shapes = {name: list(value.shape) for name, value in self.batch.items() if name != "attention_mask"}
        return " and ".join(f"{name} {shape}" for name, shape in shapes.items())


def _run(path: Path, seed: int, batch: dict[str, torch.Tensor] | None = None, plan: Plan | None = None) -> Outputs:
    """Run a checkpoint; with a plan, as its deeper target must."""
    import torch

    from lemonx.verification.float64 import Float64

    with Float64():
        model, odd = load(path, torch.float64)
        batch = sample(model, seed, batch)
        plain = floating_outputs(model, batch) if plan and plan.chains else None
        with deepened(model, plan) as moved:
            found, tokens = _seen(model, batch)
    del model
    gc.collect()
    return Outputs(found, tokens, odd, batch, plain=plain, moved=moved.most)


def _seen(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
    """The outputs of a model, and what it writes, if it writes."""
    found = floating_outputs(model, batch)
    tokens = None
    if model.can_generate() and "input_ids" in batch:
        tokens = model.generate(  # pyright: ignore[reportCallIssue]
            **batch,
            **new_cache(model),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            use_cache=True,
        )
    return found, tokens


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the largest tensor, which is that of nearly all."""
    from lemonx.checkpoints.safetensors_file import torch_dtype

    largest = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    name = str(torch_dtype(largest.dtype)).removeprefix("torch.")
    if name not in PRECISION:
        raise BadCheckpoint(f"{largest.name} is stored as {largest.dtype}, not as a float: dequantise the model first")
    return name


def _noise(source: Checkpoint, dtype: str, reference: Outputs, seed: int) -> float:
    """The source in its stored dtype against itself in float64: in a child, because some CPUs die on bf16."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outputs.safetensors"
        command = [sys.executable, "-m", "lemonx.verification.noise", str(source.path), dtype, str(seed), str(file)]
        child = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        if child.returncode != 0 or not file.exists():
            raise does_not_run(source.origin, dtype, child)
        return largest_difference(reference.as_it_is, load_file(file))


def environment() -> dict[str, str]:
    """That of a child process: without the instructions that some CPUs advertise and refuse."""
    return {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", **os.environ}


def does_not_run(path: Path, dtype: str, child: subprocess.CompletedProcess[str]) -> NotVerified:
    """The error for a child process that failed, or was killed: by SIGILL, or for want of memory."""
    if child.returncode < 0:
        why = f"killed by {signal.Signals(-child.returncode).name}"
    else:
        why = (child.stderr.strip().splitlines() or ["no message"])[-1]
    return NotVerified(
        f"{str(path)!r} itself does not run in {dtype} here ({why}): expand with --dtype float32, or --no-verify"
    )


def largest_difference(reference: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference of any output, relative to the largest entry of that output."""
    return max(
        float((reference[name] - value).abs().max() / reference[name].abs().max().clamp(min=1e-300))
        for name, value in others.items()
    )


@contextmanager
def within_memory(advice: str) -> Iterator[None]:
    """A context in which running out of memory is an error in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise NotVerified(f"memory ran out during verification: {advice}") from None


def memory_short(source: Checkpoint, target: Checkpoint) -> str | None:
    """Why a comparison cannot run here, if it cannot: one model in float64 at a time must fit in memory."""
    return short_of(8 * max(sum(i.numel for i in c.tensors.values()) for c in (source, target)), "verification")


def short_of(weights: int, what: str) -> str | None:
    """Why there is not enough memory for so many bytes of weights, and for what is computed with them."""
    needed = 1.3 * weights
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable")), None)
    if free is None or needed <= free:
        return None
    return f"{what} in float64 needs {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
