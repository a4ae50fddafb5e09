"""The tolerance of outputs where weights are stored rounded, measured by rounding the source once.

Where every tensor is exact in its stored dtype the tolerance is 1e-10 of the largest output. Where a rounding is
unavoidable (a norm's eta in bf16, say), the same rounding is tried on the source: its weights are moved by at most one
rounding of the dtype, at random, and the tolerance is MULTIPLE times what that does to its outputs, but never more than
a cap. That is an estimate from one draw; the twin of outputs.py is exact, where a plan says how the target was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, Refused
from lemonx.frames.solver import SOLVED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXACT_TOLERANCE = 1e-10
# A weight of the target is rounded as often as it has copies, and so is what it is scaled by.
MULTIPLE = 4.0
# Frames are dense: they may carry a rounding twice as far as the source does.
FRAMED = 2.0
# The most that is ever allowed. Alone, outputs must agree to four spacings of bf16, the coarsest dtype there is. Where
# every tensor was checked, they only show that models are wired alike, and a router may send a token elsewhere for one
# rounding; a wrong wire changes them by about as much as they are.
CAP, WIRING = 2**-5, 2**-3
# Numbers that are drawn at a time.
PIECE = 1 << 20
# From coarse to fine.
PRECISION = ("bfloat16", "float16", "float32", "float64")


# From the noise of outputs or of a stream, the largest difference that passes, and why.
Allowed = Callable[[float | None], tuple[float, str]]


@dataclass(frozen=True)
class Rounding:
    """The weights that may be rounded in a target. `tensors`: their names in the source's files; None for all weights.

    `dtype`: the dtype that they are rounded in; where it is empty, the dtype of the files.
    """

    tensors: frozenset[str] | None = None
    framed: bool = False
    cap: float = CAP
    dtype: str = ""


def with_dtype(source: Checkpoint, target: Checkpoint, rounding: Rounding | None, *, planned: bool) -> Rounding | None:
    """The rounding with its dtype: the target's, if a plan made it; else the coarser of the two. None for float64."""
    found = stored_dtype(target)
    if rounding is None:
        return None
    dtype = rounding.dtype or (found if planned else min(stored_dtype(source), found, key=PRECISION.index))
    return None if dtype == "float64" else replace(rounding, dtype=dtype)


def tolerance_of(rounding: Rounding | None, noise: float | None) -> tuple[float, str]:
    """By how much outputs may differ, and why."""
    if noise is None or rounding is None:
        return EXACT_TOLERANCE, "every tensor is exact in its dtype, so only float64 arithmetic rounds"
    times = MULTIPLE * (FRAMED if rounding.framed else 1.0)
    found = max(EXACT_TOLERANCE, times * noise)
    why = f"{times:g} times {noise:.1e}, by which rounding weights once in {rounding.dtype} moves the source's outputs"
    return (rounding.cap, f"the largest that is allowed; {why}") if found > rounding.cap else (found, why)


def twin_tolerance(rounding: Rounding, noise: float | None) -> tuple[float, str]:
    """By how much outputs may differ where nothing is rounded: frames are solved for, and the solver stops somewhere.

    What it leaves open moves outputs as a rounding of that size would: in proportion to one of the stored dtype.
    """
    if rounding.framed and noise is not None:
        left = MULTIPLE * FRAMED * noise * SOLVED / (torch.finfo(getattr(torch, rounding.dtype)).eps / 2)
        if left > EXACT_TOLERANCE:
            return left, f"the frames are solved to {SOLVED:g}, and outputs move by so much for that"
    return EXACT_TOLERANCE, "nothing is rounded, so only float64 arithmetic rounds"


def round_once(weight: torch.Tensor, dtype: str, generator: torch.Generator) -> None:
    """Move every entry at random by at most one rounding to a dtype.

    In float32 copies are rounded, which are as large as is usual in the tensor, however small their sum. In bf16 and
    fp16 copies are split exactly, and entries are rounded.
    """
    kind = torch.finfo(getattr(torch, dtype))
    with torch.no_grad():
        usual = float(weight.norm()) / weight.numel() ** 0.5 if kind.bits > 16 and weight.numel() else 0.0
        for part in weight.view(-1).split(PIECE):  # what is drawn for all of a large one would be as large again
            noise = torch.rand(part.shape, generator=generator, dtype=part.dtype).mul_(2).sub_(1)
            part.add_(noise.mul_(part.abs() + usual), alpha=kind.eps / 2)


def chosen_parameters(model: PreTrainedModel, rounding: Rounding) -> set[str] | None:
    """The parameters of these tensors; None for all, also where a parameter holds several tensors."""
    from lemonx.models.building import disk_names

    if rounding.tensors is None:
        return None
    try:
        return {name for name, disk in disk_names(model).items() if disk in rounding.tensors} or None
    except Refused:
        return None


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the largest tensor, which is that of nearly all."""
    from lemonx.checkpoints.safetensors_file import torch_dtype

    largest = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    name = str(torch_dtype(largest.dtype)).removeprefix("torch.")
    if name not in PRECISION:
        raise BadCheckpoint(
            f"{largest.name} is stored as {largest.dtype}, not as a float", "dequantise the model first"
        )
    return name
