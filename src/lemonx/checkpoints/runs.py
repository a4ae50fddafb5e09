"""A checkpoint of a run on many processes, whatever its form: which bytes of which files hold a tensor.

A run saves more than a model. `Saved` lists all of it, and each form says which tensors are the weights.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.opening import changed, identity, open_inside
from lemonx.checkpoints.safetensors_file import TensorInfo, item_size, torch_dtype
from lemonx.checkpoints.store import InBytes, bytes_of
from lemonx.checkpoints.values import read_into, scatter_into
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

# From the config and the shapes of the stored tensors, by key: how the model's files name them. None: just so.
Naming = Callable[[Mapping[str, object], Mapping[str, tuple[int, ...]]], Views | None]


@dataclass(frozen=True)
class Item:
    """Bytes `offset` to `offset + length` of a file: a tensor or an object, as torch.save writes it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Box:
    """A part of a stored tensor, and the item that holds it."""

    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True)
class Stored:
    """A tensor that a run saved."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Saved:
    """What a run saved: tensors and objects by key, and the way to each in the state that was flattened to keys."""

    tensors: Mapping[str, Stored]
    objects: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]


class RunStore(InBytes):
    """The weights of a run, renamed: by the names, and as the tensors, of a model's files."""

    def __init__(self, run: RunFolder, config: bytes, file: Path, naming: Naming | None) -> None:
        self.run, self._config_bytes, self._kept = run, config, [run]
        try:
            self.config = parse_config(config, file)
            shapes = {name: stored.shape for name, stored in run.weights.items()}
            self.tensors = run.infos(naming(self.config, shapes) if naming else None)
        except BaseException:
            self.close()
            raise

    @property
    def config_bytes(self) -> bytes:
        return self._config_bytes

    def keep(self, other: RunFolder) -> None:
        """Close another part of the same run with this one, and check that it does not change either."""
        self._kept.append(other)

    def fill(self, info: TensorInfo, begin: int, buffer: memoryview) -> None:
        assert isinstance(info, InChunks)
        self.run.fill(info, begin, buffer)

    def check_unchanged(self) -> None:
        for held in self._kept:
            held.check_unchanged()

    def close(self) -> None:
        while self._kept:
            self._kept.pop().close()


class RunFolder(ABC):
    """An open checkpoint of a run. Reads may come from any thread.

    `saved`: all that the run saved; `inside`: the path that its weights lie under; `weights`: these, by the names that
    the run gives them. `step`: how many steps the optimizer has taken, where it counts once for all parameters.
    """

    saved: Saved
    inside: tuple[str, ...] = ()
    weights: Mapping[str, Stored]
    step: int | None = None

    def __init__(self, folder: Path, below: str) -> None:
        self.folder, self.below = (folder / below).resolve(), below
        if not self.folder.is_relative_to(folder):
            raise BadCheckpoint("is a link out of its folder", "replace it with a copy", file=folder / below)
        self._descriptors: dict[Path, int] = {}
        self._states: dict[Path, tuple[int, ...]] = {}
        # A tensor of a thousand chunks is read in a thousand blocks.
        self._spans: dict[int, tuple[InChunks, list[tuple[int, int, Chunk]]]] = {}

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file that says what the others hold, for messages."""

    @property
    @abstractmethod
    def processes(self) -> int:
        """How many processes wrote it."""

    @abstractmethod
    def _base(self, chunk: Chunk, info: TensorInfo) -> int:
        """The byte that the numbers of a chunk's item begin at."""

    @property
    def count(self) -> int:
        """How many files its tensors lie in."""
        return len(self._descriptors)

    def _open_file(self, name: str) -> int:
        """Open a file of the folder, to be read until all is closed."""
        path = self.folder / name
        fd = self._descriptors[path] = open_inside(self.folder, name)
        self._states[path] = identity(fd)
        return fd

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
        return InChunks(name, dtype, shape, file, 0, seen)

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
        self.fill(info, 0, bytes_of(made))
        return made

    def check_items(self) -> None:
        """BadCheckpoint unless every item holds the tensor that it should."""
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
