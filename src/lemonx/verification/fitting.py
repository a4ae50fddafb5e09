"""Does config.json make the model whose weights the files hold? Asked before a model is built, at no cost in memory.

transformers builds whatever config.json says, and draws what the files lack at random: a number with a few zeros too
many would take all time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.checkpoints.config import is_blocks
from lemonx.errors import BadCheckpoint
from lemonx.guards.limits import MOST_BUFFERS
from lemonx.models.building import skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Heads and tables that a file need not hold.
_SPARE = 2**20


@names_its_folder
def require_fitting(checkpoint: Checkpoint) -> None:
    """BadCheckpoint if the model of config.json is far larger than what the files hold."""
    tensors = checkpoint.tensors.values()
    for name, value in _blocks(checkpoint.config):
        if value > 4 * len(tensors) + 64:
            raise BadCheckpoint(
                f"config.json says {name} = {value}, but the files hold {len(tensors)} tensors: take both from the "
                "same save"
            )
    stored, built = sum(info.numel for info in tensors), size(skeleton(checkpoint.config))
    if built > 2 * stored + _SPARE:
        raise BadCheckpoint(
            f"config.json makes a model of {built:,} numbers, but the files hold {stored:,}: take both from the same "
            "save"
        )


def size(model: PreTrainedModel) -> int:
    """The numbers of a model; BadCheckpoint where what it computes by itself would fill the memory."""
    buffers = sum(buffer.numel() for buffer in model.buffers())
    if buffers > MOST_BUFFERS:
        raise BadCheckpoint(
            f"config.json makes a model that keeps {buffers:,} numbers beside its weights: check its positions"
        )
    return sum(parameter.numel() for parameter in model.parameters())


def _blocks(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The counts of blocks that a config names, in its parts too."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _blocks(value)
        elif is_blocks(name) and isinstance(value, int):
            yield name, value
