"""Does config.json fit the weights in the files? This is checked before a model is built, and needs no memory.

transformers builds whatever config.json describes, and initialises at random what the files lack. A number with a few
zeros too many would take all time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.checkpoints.config import is_blocks
from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint
from lemonx.guards.limits import MOST_BUFFERS
from lemonx.models.building import looked_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Heads and tables that a file need not hold.
_SPARE = 2**20


@names_its_folder
def require_fitting(checkpoint: Checkpoint) -> None:
    """BadCheckpoint if the model that config.json describes is far larger than the files' content."""
    tensors = checkpoint.tensors.values()
    for name, value in _blocks(checkpoint.config):
        if value > 4 * len(tensors) + 64:
            raise BadCheckpoint(
                f"says {name} = {value}, but the files hold {len(tensors)} tensors",
                "take both from the same save",
                file=CONFIG,
            )
    stored, built = sum(info.numel for info in tensors), size(looked_at(checkpoint.config))
    if built > 2 * stored + _SPARE:
        raise BadCheckpoint(
            f"makes a model of {built:,} numbers, but the files hold {stored:,}",
            "take both from the same save",
            file=CONFIG,
        )


def size(model: PreTrainedModel) -> int:
    """How many numbers a model holds; BadCheckpoint if the buffers it computes would fill the memory."""
    buffers = sum(buffer.numel() for buffer in model.buffers())
    if buffers > MOST_BUFFERS:
        raise BadCheckpoint(
            f"makes a model that keeps {buffers:,} numbers beside its weights", "check its positions", file=CONFIG
        )
    return sum(parameter.numel() for parameter in model.parameters())


def _blocks(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers of blocks that a config states, also in its nested parts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _blocks(value)
        elif is_blocks(name) and isinstance(value, int):
            yield name, value
