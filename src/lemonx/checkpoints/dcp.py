"""Reads a folder of torch.distributed.checkpoint: `.metadata`, and one or more `.distcp` files per process.

FSDP2 and torchtitan save runs in this form, and so do Accelerate, Lightning and Megatron-Core. A run saves more than a
model. Its weights are those tensors that lie together under a name for a model, or at the top.

torch's own reader unpickles `.metadata`, which can run code, and loads an item whole: 1.1 GB for 64 rows of a tensor
of 1.1 GB, where this reader takes 0.01 GB.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from lemonx.checkpoints.archives import locate
from lemonx.checkpoints.chunks import Chunk, contiguous
from lemonx.checkpoints.dcp_metadata import METADATA, MOST_BYTES, read_metadata
from lemonx.checkpoints.folder import has
from lemonx.checkpoints.opening import file_inside, read_open
from lemonx.checkpoints.runs import Item, RunFolder, Stored
from lemonx.checkpoints.safetensors_file import TensorInfo, item_size
from lemonx.errors import BadCheckpoint

# What the tensors of a model, by name, lie under in the state that a run saves; () is the top.
_INSIDE: tuple[tuple[str, ...], ...] = (("model",), ("state_dict",), ("model_state_dict",), ("app", "model"), ())
# Where Accelerate, and so Trainer, puts the model and the optimizer.
_BELOW = re.compile(r"pytorch_model_fsdp_\d+")
# What an archive may take beside its numbers; torch's take two kilobytes.
_MOST_AROUND = 1 << 20
WRITER = re.compile(r"__(\d+)_\d+\.distcp")


def optimizer_beside(below: str) -> str | None:
    """Where Accelerate puts the optimizer of the model in the folder `below`."""
    return below.replace("pytorch_model_fsdp", "optimizer") if _BELOW.fullmatch(below) else None


def find_dcp(folder: Path) -> str | None:
    """The folder in `folder` that holds a distributed checkpoint: "." for itself; None if there is none."""
    if has(folder, METADATA):
        return "."
    below = sorted(entry.name for entry in os.scandir(folder) if _BELOW.fullmatch(entry.name))
    return next((name for name in below if has(folder / name, METADATA)), None)


class DcpFolder(RunFolder):
    """An open distributed checkpoint; one of an optimizer alone has no `weights`."""

    def __init__(self, folder: Path, below: str = ".", *, weights: bool = True) -> None:
        super().__init__(folder, below)
        with file_inside(self.folder, METADATA) as file:
            try:
                raw = read_open(file, MOST_BYTES)
            except OSError as error:
                raise BadCheckpoint(f"cannot be read ({error.strerror})", "check it", file=self.path) from None
        self.digest = hashlib.sha256(raw).hexdigest()
        self.saved = read_metadata(raw, self.path)
        self._located: dict[tuple[Path, int], int] = {}
        try:
            self._open()
            self.inside, self.weights = self._weights() if weights else ((), {})
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self.folder / METADATA

    @property
    def processes(self) -> int:
        """How many processes wrote it."""
        ranks = {match[1] for path in self._descriptors if (match := WRITER.fullmatch(path.name))}
        return max(1, len(ranks))

    def _items(self) -> Iterator[Item]:
        yield from self.saved.objects.values()
        yield from (box.item for stored in self.saved.tensors.values() for box in stored.boxes)

    def _open(self) -> None:
        ends: dict[str, int] = {}
        for item in self._items():
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        for name in sorted(ends):
            if (size := os.fstat(self._open_file(name)).st_size) < ends[name]:
                found = f"is truncated: it has {size} bytes, {METADATA} promises {ends[name]}"
                raise BadCheckpoint(
                    found, "copy it again, or go back to an earlier checkpoint", file=self.folder / name
                )

    def _weights(self) -> tuple[tuple[str, ...], dict[str, Stored]]:
        groups: dict[tuple[str | int, ...], dict[str, Stored]] = {}
        for key, stored in self.saved.tensors.items():
            *above, name = self.saved.paths[key]
            groups.setdefault(tuple(above), {})[str(name)] = stored
        for inside in _INSIDE:
            if inside in groups:
                return inside, groups[inside]
        raise BadCheckpoint(
            f"holds the weights of no model under {', '.join('.'.join(way) for way in _INSIDE if way)}, nor at the top",
            "save the model's state_dict under the key 'model'",
            file=self.path,
        )

    def _base(self, chunk: Chunk, info: TensorInfo) -> int:
        """The byte that the numbers of a chunk's item begin at; its archive is looked into once."""
        offset, length = chunk.item
        if (base := self._located.get((chunk.file, offset))) is None:
            if length > math.prod(chunk.shape) * item_size(info.dtype) + _MOST_AROUND:
                found = f"has {length} bytes at byte {offset} for {list(chunk.shape)} of {info.name!r}"
                raise BadCheckpoint(found, "save it again", file=chunk.file)
            placed = locate(self._descriptors[chunk.file], chunk.file, offset, length)
            shape, strides = chunk.shape, zip(contiguous(chunk.shape), placed.strides, strict=False)
            apart = any(n > 1 and a != b for n, (a, b) in zip(shape, strides, strict=False))
            if placed.dtype != info.dtype or placed.shape != shape or apart:
                raise BadCheckpoint(
                    f"holds {placed.dtype} {list(placed.shape)} at byte {offset} where {METADATA} says that "
                    f"{info.dtype} {list(shape)} of {info.name!r} lies in one piece",
                    "save it again from contiguous tensors",
                    file=chunk.file,
                )
            base = self._located[chunk.file, offset] = placed.begin
        return base
