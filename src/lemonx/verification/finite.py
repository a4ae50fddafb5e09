"""Guards against NaN and Inf in measured numbers: they must not pass for small differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.errors import LemonxError
from lemonx.execution.row_readers import check_finite
from lemonx.specs.coverage import matched
from lemonx.specs.weights import Dropped


def larger(one: float, other: float) -> float:
    """The larger of two numbers, or NaN if either is NaN: comparisons with NaN fail, while max() can drop it.

    >>> larger(0.0, float("nan")), larger(float("nan"), 1.0), larger(2.0, 1.0)
    (nan, nan, 2.0)
    """
    return one if other <= one or one != one else other


def not_finite(outputs: Mapping[tuple[str, str], torch.Tensor]) -> Iterable[str]:
    """The names of the outputs that hold NaN or Inf."""
    return dict.fromkeys(name for (name, _), value in outputs.items() if not bool(value.isfinite().all()))


def check_numbers(checkpoint: Checkpoint) -> None:
    """BadCheckpoint if any number is NaN or Inf, except in buffers that the model computes itself.

    A sample of outputs does not reach every entry, such as the row of a rare token or the last position.
    """
    dropped = _dropped(checkpoint)
    for name in checkpoint.tensors:
        if name not in dropped:
            for block in checkpoint.blocks(name):
                check_finite(block, name, checkpoint)


def _dropped(checkpoint: Checkpoint) -> set[str]:
    """Tensors that no model reads, such as masks, which may hold -Inf; none if there is no spec."""
    try:
        spec = architectures.find(checkpoint.config).spec(checkpoint.config)
    except LemonxError:
        return set()
    return {hit.name for hit in matched(spec, checkpoint.tensors)[0] if isinstance(spec.rows[hit.row], Dropped)}
