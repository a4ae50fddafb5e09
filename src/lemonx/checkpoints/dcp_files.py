"""Lays out a distributed checkpoint: which process's file holds which rows of which tensor, before a number is written.

Every tensor is cut along its first axis, as FSDP2 cuts it. An item of a .distcp file is what torch.save writes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from lemonx.checkpoints.chunks import Chunk, Views, contiguous, seen_as
from lemonx.checkpoints.dcp import DcpFolder
from lemonx.checkpoints.dcp_metadata import METADATA
from lemonx.checkpoints.envelopes import Envelope, envelope
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.shards import Entry, Files
from lemonx.errors import BadCheckpoint, BadOutput

Way = tuple[str | int, ...]


@dataclass
class DcpFiles:
    """A distributed checkpoint to be, for so many processes, in the folder `below` the output.

    First all tensors and objects are added under their keys, then `files` is asked for.
    """

    below: str
    processes: int
    _ends: dict[str, int] = field(default_factory=dict)
    _opening: list[tuple[str, int, bytes]] = field(default_factory=list)
    _chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    _stored: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    _objects: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    _paths: dict[str, Way] = field(default_factory=dict)
    # The items of each key: file, offset and length, by where in the tensor they begin.
    _items: dict[str, list[tuple[tuple[int, ...], str, int, int]]] = field(default_factory=dict)

    def add_tensor(self, way: Way, dtype: str, shape: tuple[int, ...]) -> str:
        """Make room for a tensor that was on this way in the run's state; its key."""
        key = self._key(way)
        self._stored[key], self._chunks[key], self._items[key] = (dtype, shape), [], []
        for process, rows in enumerate(_cut(shape, self.processes)):
            sizes = (len(rows), *shape[1:]) if shape else ()
            at = (rows.start, *(0,) * (len(shape) - 1)) if shape else ()
            around, numbers = _envelope(dtype, sizes)
            name, offset = self._append(process, around.length)
            self._opening += [(name, offset + place, raw) for place, raw in around.pieces]
            self._items[key].append((at, name, offset, around.length))
            self._chunks[key].append(
                Chunk(Path(name), at, sizes, contiguous(sizes), item=(offset + numbers, 0), shape=sizes)
            )
        return key

    def add_object(self, way: Way, raw: bytes) -> None:
        """Add what the run saved as an object, as it is."""
        name, offset = self._append(0, len(raw))
        self._opening.append((name, offset, raw))
        self._objects[self._key(way)] = (name, offset, len(raw))

    def _key(self, way: Way) -> str:
        key = ".".join(map(str, way))
        if key in self._paths:
            raise ValueError(f"{key!r} is listed twice")
        self._paths[key] = way
        return key

    def _append(self, process: int, length: int) -> tuple[str, int]:
        name = os.path.normpath(f"{self.below}/__{process}_0.distcp")
        offset = self._ends.get(name, 0)
        self._ends[name] = offset + length
        return name, offset

    def files(self, entries: Sequence[Entry], views: Views) -> Files:
        """The files, into which these tensors are written as parts of those that were added, by key.

        Where two parts are the same box of a tensor, it is written to both.
        """
        places = {name: seen_as(views[name], self._chunks) for name, _, _ in entries}
        return Files(
            self._ends,
            self._opening,
            {entry[0]: entry for entry in entries},
            places,
            partial(_check_readable, self.below, dict(self._stored)),
            {os.path.normpath(f"{self.below}/{METADATA}"): self._metadata()},
        )

    def _metadata(self) -> bytes:
        """What torch's own loader reads: records of torch's, pickled."""
        import torch
        from torch.distributed.checkpoint import filesystem, metadata

        described: dict[str, Any] = {key: metadata.BytesStorageMetadata() for key in self._objects}
        places: dict[Any, Any] = {}
        for key, (dtype, shape) in self._stored.items():
            properties = metadata.TensorProperties(dtype=torch_dtype(dtype))
            chunks = [metadata.ChunkStorageMetadata(torch.Size(c.at), torch.Size(c.sizes)) for c in self._chunks[key]]
            described[key] = metadata.TensorStorageMetadata(properties, torch.Size(shape), chunks)
            for number, (at, name, offset, length) in enumerate(self._items[key]):
                index = metadata.MetadataIndex(key, at, number)
                places[index] = filesystem._StorageInfo(os.path.basename(name), offset, length)
        for key, (name, offset, length) in self._objects.items():
            places[metadata.MetadataIndex(key)] = filesystem._StorageInfo(os.path.basename(name), offset, length)
        whole = metadata.Metadata(described, planner_data=dict(self._paths), storage_data=places)
        whole.storage_meta = metadata.StorageMeta()
        whole.version = filesystem.CURRENT_DCP_VERSION
        return pickle.dumps(whole)


def _cut(shape: tuple[int, ...], processes: int) -> list[range]:
    """The rows that each process holds, as FSDP2 cuts; processes that hold none are left out."""
    if not shape or not shape[0]:
        return [range(shape[0] if shape else 1)]
    size = -(-shape[0] // processes)
    return [range(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]


@cache
def _envelope(dtype: str, shape: tuple[int, ...]) -> tuple[Envelope, int]:
    """A saved tensor without its numbers, and where these begin; memory that nobody touches is not taken."""
    import torch

    made = envelope(torch.empty(shape, dtype=torch_dtype(dtype), device="cpu"))
    return made, made.tree().begin


def _check_readable(below: str, stored: Mapping[str, tuple[str, tuple[int, ...]]], folder: Path) -> None:
    """Our reader finds exactly the tensors that were asked for, and in each item one of the right dtype and shape."""
    path = Path(os.path.normpath(folder / below / METADATA))
    try:
        written = DcpFolder(folder.resolve(), below, weights=False)
        try:
            found = {key: (tensor.dtype, tensor.shape) for key, tensor in written.saved.tensors.items()}
            written.check_items()
        finally:
            written.close()
    except BadCheckpoint as error:
        raise BadOutput(f"cannot be read back ({error})", "check the disk, and start again", file=path) from None
    if found != stored:
        raise BadOutput("reads back different from what was written", "check the disk, and start again", file=path)
