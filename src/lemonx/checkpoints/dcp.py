"""Reads a folder of torch.distributed.checkpoint: `.metadata`, and one or more `.distcp` files per process.

FSDP2 and torchtitan save runs in this form, and so do Accelerate, Lightning and Megatron-Core. A run saves more than a
model. Its weights are those tensors that lie together under a name for a model, or at the top.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx.checkpoints.chunks import (
    Chunk,
    InChunks,
    Part,
    Views,
    contiguous,
    joined,
    runs,
    seen_as,
    shape_of,
    span,
    whole,
)
from lemonx.checkpoints.dcp_items import locate
from lemonx.checkpoints.dcp_metadata import METADATA, MOST_BYTES, Item, Saved, Stored, read_metadata
from lemonx.checkpoints.folder import has
from lemonx.checkpoints.opening import changed, file_inside, identity, open_inside, read_open
from lemonx.checkpoints.safetensors_file import TensorInfo, item_size, torch_dtype
from lemonx.checkpoints.values import read_into, scatter_into
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

# What the tensors of a model, by name, lie under in the state that a run saves; () is the top.
_INSIDE: tuple[tuple[str, ...], ...] = (("model",), ("state_dict",), ("model_state_dict",), ("app", "model"), ())
# Where Accelerate, and so Trainer, puts the model and the optimizer.
_BELOW = re.compile(r"pytorch_model_fsdp_\d+")
# What an archive may take beside its numbers; torch's take two kilobytes.
_MOST_AROUND = 1 << 20
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")
# From the config and the shapes of the stored tensors, by key: how the model's files name them. None: just so.
Naming = Callable[[Mapping[str, object], Mapping[str, tuple[int, ...]]], Views | None]


def optimizer_beside(below: str) -> str | None:
    """Where Accelerate puts the optimizer of the model in the folder `below`."""
    return below.replace("pytorch_model_fsdp", "optimizer") if _BELOW.fullmatch(below) else None


def find_dcp(folder: Path) -> str | None:
    """The folder in `folder` that holds a distributed checkpoint: "." for itself; None if there is none."""
    if has(folder, METADATA):
        return "."
    below = sorted(entry.name for entry in os.scandir(folder) if _BELOW.fullmatch(entry.name))
    return next((name for name in below if has(folder / name, METADATA)), None)


class DcpFolder:
    """An open distributed checkpoint. Reads may come from any thread.

    `saved`: all that the run saved; `inside`: the path that its weights lie under; `weights`: these, by the names that
    the run gives them. A folder of an optimizer alone has no `weights`.
    """

    saved: Saved
    inside: tuple[str, ...]
    weights: Mapping[str, Stored]

    def __init__(self, folder: Path, below: str = ".", *, weights: bool = True) -> None:
        self.folder, self.below = (folder / below).resolve(), below
        if not self.folder.is_relative_to(folder):
            raise BadCheckpoint("is a link out of its folder", "replace it with a copy", file=folder / below)
        with file_inside(self.folder, METADATA) as file:
            try:
                raw = read_open(file, MOST_BYTES)
            except OSError as error:
                raise BadCheckpoint(f"cannot be read ({error.strerror})", "check it", file=self.path) from None
        self.digest = hashlib.sha256(raw).hexdigest()
        self.saved = read_metadata(raw, self.path)
        self._descriptors: dict[Path, int] = {}
        self._states: dict[Path, tuple[int, ...]] = {}
        self._located: dict[tuple[Path, int], int] = {}
        # A tensor of a thousand chunks is read in a thousand blocks.
        self._spans: dict[int, tuple[InChunks, list[tuple[int, int, Chunk]]]] = {}
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
        ranks = {match[1] for path in self._descriptors if (match := _WRITER.fullmatch(path.name))}
        return max(1, len(ranks))

    @property
    def count(self) -> int:
        """How many files it has beside `.metadata`."""
        return len(self._descriptors)

    def _items(self) -> Iterator[Item]:
        yield from self.saved.objects.values()
        yield from (box.item for stored in self.saved.tensors.values() for box in stored.boxes)

    def _open(self) -> None:
        ends: dict[str, int] = {}
        for item in self._items():
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        for name in sorted(ends):
            path = self.folder / name
            fd = self._descriptors[path] = open_inside(self.folder, name)
            self._states[path] = identity(fd)
            if (size := os.fstat(fd).st_size) < ends[name]:
                found = f"is truncated: it has {size} bytes, {METADATA} promises {ends[name]}"
                raise BadCheckpoint(found, "copy it again, or go back to an earlier checkpoint", file=path)

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

    def key(self, name: str) -> str:
        """The key of a weight, or of anything that lies under the same path."""
        return ".".join((*self.inside, name))

    def infos(self, views: Views | None, under: Mapping[str, Stored] | None = None) -> dict[str, InChunks]:
        """The tensors that the weights, or those `under` another path, are seen as: without views, as they are."""
        stored = self.weights if under is None else under
        chunks = {name: self._chunks(tensor) for name, tensor in stored.items()}
        views = {name: whole(name, tensor.shape) for name, tensor in stored.items()} if views is None else views
        return {name: self._info(name, parts, stored, chunks) for name, parts in views.items()}

    def _chunks(self, tensor: Stored) -> list[Chunk]:
        return [
            Chunk(
                self.folder / box.item.file, box.begin, box.sizes, contiguous(box.sizes),
                item=(box.item.offset, box.item.length), shape=box.sizes,
            )
            for box in tensor.boxes
        ]  # fmt: skip

    def _info(
        self, name: str, parts: tuple[Part, ...], stored: Mapping[str, Stored], chunks: Mapping[str, list[Chunk]]
    ) -> InChunks:
        dtype, shape = stored[parts[0].key].dtype, shape_of(parts)
        seen = seen_as(parts, chunks)
        file = seen[0].file if seen else self.path
        return InChunks(name, dtype, shape, file, 0, math.prod(shape) * item_size(dtype), seen)

    # ------------------------------------------------------------- bytes

    def fill(self, info: InChunks, begin: int, buffer: memoryview) -> None:
        """Read bytes `begin` onwards of a tensor, in the order of its numbers."""
        size = item_size(info.dtype)
        start, stop = begin // size, (begin + len(buffer)) // size
        if id(info) not in self._spans:  # with the tensor, so that no other gets its id
            self._spans[id(info)] = info, [(*span(chunk, info.shape), chunk) for chunk in info.chunks]
        for low, high, chunk in self._spans[id(info)][1]:
            if low >= stop or high <= start:
                continue
            fd, base = self._descriptors[chunk.file], self._base(chunk, info)
            for group in joined(runs(chunk, info.shape, start, stop)):
                places = [(place - start) * size for place, _, _ in group]
                buffers = [
                    buffer[place : place + count * size] for place, (_, _, count) in zip(places, group, strict=True)
                ]
                scatter_into(fd, chunk.file, base + group[0][1] * size, buffers)

    def read(self, info: InChunks) -> torch.Tensor:
        """A whole tensor."""
        import torch

        made = torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="cpu")
        self.fill(info, 0, made.reshape(-1).view(torch.uint8).numpy().data)
        return made

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

    def check_items(self) -> None:
        """BadCheckpoint unless every item holds the tensor that `.metadata` says."""
        for info in self.infos(None, under=self.saved.tensors).values():
            for chunk in info.chunks:
                self._base(chunk, info)

    def read_object(self, key: str) -> bytes:
        """The bytes of an object, as the run saved it."""
        item = self.saved.objects[key]
        raw = bytearray(item.length)
        read_into(self._descriptors[self.folder / item.file], self.folder / item.file, item.offset, memoryview(raw))
        return bytes(raw)

    # ------------------------------------------------------------- files

    def check_unchanged(self) -> None:
        for path, fd in self._descriptors.items():
            if identity(fd) != self._states[path]:
                raise changed(path)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
