"""The tensors of a checkpoint, wherever they lie: what every store can be asked, and what most stores share.

A store of another package derives from `Computed`, says its `config` and `tensors`, and makes rows of them. The package
names a function in the entry point group `lemonx.stores`. It gets a path, and returns a store, or None for other paths.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import TensorInfo, dtype_name, torch_dtype
from lemonx.checkpoints.shards import Shard, config_text, index_text, lay_out
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.guards.shown import one_line

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22
# Bytes of a piece of what is computed, so that a model larger than memory can be read.
PIECE = 1 << 24
_SHARD = 5 * 10**9


class Sink(Protocol):
    """Takes rows of tensors, in any order and from any thread."""

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        """Write rows `start` onwards of a tensor, and of its last axis what begins at `column`."""
        ...


class TensorStore(ABC):
    """The tensors of a checkpoint. Reads may come from any thread.

    `converted` says from what the numbers are converted, `nbytes` how many bytes that takes. `files` are the
    safetensors files that hold the tensors, or would hold them.
    """

    config: dict[str, JsonValue]
    tensors: Mapping[str, TensorInfo]
    converted: str | None = None

    @abstractmethod
    def read(self, name: str, rows: range, columns: range, out: torch.Tensor) -> None:
        """Fill `out` with these rows of the first axis and these columns of the last.

        `columns` count only where there are two axes or more. `out` is contiguous and on the CPU.
        """

    @property
    def nbytes(self) -> int:
        """The number of bytes that the numbers take where they are stored."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def config_bytes(self) -> bytes:
        """The text of config.json."""
        return config_text(self.config).encode()

    @cached_property
    def files(self) -> Sequence[Shard]:
        """The safetensors files that hold the tensors, in the order of their names."""
        return ()

    @property
    def index_bytes(self) -> bytes | None:
        """The index of the files, if there is one."""
        return index_text(self.files).encode() if len(self.files) > 1 else None

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor's numbers in order, as flat pieces of a few megabytes, each valid until the next is read."""
        info = self.tensors[name]
        for start, stop in row_pieces(info.shape[0] if info.shape else 1, info.nbytes, _BLOCK):
            yield read_rows(self, name, start, stop).reshape(-1)

    def digest(self, progress: Callable[[int], None] | None = None) -> str:
        """Return the SHA-256 of config.json and of every byte of the weights; `progress` gets counts of bytes read.

        What no safetensors files hold counts as tensors, wherever these lie.
        """
        total, tell = hashlib.sha256(hashlib.sha256(self.config_bytes).digest()), progress or (lambda count: None)

        def add(name: str) -> None:
            for piece in self.blocks(name):
                total.update(bytes_of(piece))
                tell(piece.nbytes)

        for file in self.files:
            total.update(os.fsencode(f"{file.name}\0{file.size}\n") + file.header)
            tell(len(file.header))
            for name, _, _ in file.entries:
                add(name)
        for info in () if self.files else self.tensors.values():
            total.update(f"{info.name}\0{info.dtype}\0{list(info.shape)}\n".encode())
            add(info.name)
        return total.hexdigest()

    def check_unchanged(self) -> None:  # noqa: B027
        """BadCheckpoint if a file was written to since it was opened."""

    def close(self) -> None:  # noqa: B027
        """Close the files; reading after this is an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class InBytes(TensorStore):
    """A store whose tensors lie in files or in memory, number by number."""

    @abstractmethod
    def fill(self, info: TensorInfo, begin: int, buffer: memoryview) -> None:
        """Read bytes `begin` onwards of a tensor."""

    def read(self, name: str, rows: range, columns: range, out: torch.Tensor) -> None:
        info = self.tensors[name]
        row_bytes = info.nbytes // max(1, info.shape[0] if info.shape else 1)
        begin, buffer = rows.start * row_bytes, bytes_of(out)
        stride = size = len(rows) * row_bytes
        if len(info.shape) > 1 and len(columns) < info.shape[-1]:
            stride, size = info.shape[-1] * out.itemsize, len(columns) * out.itemsize
            begin += columns.start * out.itemsize
        for piece in range(len(buffer) // size if size else 0):
            self.fill(info, begin + piece * stride, buffer[piece * size : (piece + 1) * size])

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        return blocks(self.tensors[name], lambda begin, buffer: self.fill(self.tensors[name], begin, buffer))


class Computed(TensorStore):
    """A store that makes rows of its tensors when they are asked for.

    Such a checkpoint is what a folder with these tensors would be: it has the layout and the digest of that folder.
    """

    @abstractmethod
    def rows(self, name: str, rows: range) -> torch.Tensor:
        """Return these rows of the first axis; a scalar is row 0."""

    def read(self, name: str, rows: range, columns: range, out: torch.Tensor) -> None:
        import torch

        # Whoever runs torch in another dtype than code asks for still wants what is stored.
        with torch._C.DisableTorchFunction(), torch.no_grad():  # pyright: ignore[reportPrivateUsage]
            found = self.rows(name, rows)
            out.copy_(found[..., columns.start : columns.stop] if found.ndim > 1 else found)

    @cached_property
    def files(self) -> Sequence[Shard]:
        return lay_out([(info.name, info.dtype, info.shape) for info in self.tensors.values()], _SHARD)


class InMemory(Computed):
    """A store of tensors in memory."""

    def __init__(self, config: Mapping[str, JsonValue], weights: Mapping[str, torch.Tensor], path: Path) -> None:
        self.config, self.weights = dict(config), weights
        self.tensors = {
            name: TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), path)
            for name, tensor in weights.items()
        }

    def rows(self, name: str, rows: range) -> torch.Tensor:
        tensor = self.weights[name]
        return tensor[rows.start : rows.stop] if tensor.ndim else tensor

    def close(self) -> None:
        self.weights = {}


def read_rows(store: TensorStore, name: str, start: int, stop: int) -> torch.Tensor:
    """Return rows `start` to `stop` of a tensor."""
    info = store.tensors[name]
    out = empty((stop - start, *info.shape[1:]) if info.shape else (), info.dtype)
    store.read(name, range(start, stop), range(info.shape[-1] if info.shape else 1), out)
    return out


def empty(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return room for a tensor, also where code that runs in another dtype asks for it."""
    import torch

    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device="cpu")


def whole(store: TensorStore, name: str) -> torch.Tensor:
    """Return a tensor."""
    shape = store.tensors[name].shape
    return read_rows(store, name, 0, shape[0] if shape else 1)


def row_pieces(rows: int, nbytes: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces of at most `block` bytes, or of one row, begin and end in a tensor of `nbytes` bytes.

    >>> list(row_pieces(5, 50, 20))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, block * rows // max(1, nbytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def blocks(info: TensorInfo, fill: Callable[[int, memoryview], None]) -> Iterator[torch.Tensor]:
    """Yield a tensor's numbers in order, as flat pieces; each is valid until the next is asked for.

    `fill` reads bytes from a given place on.
    """
    import torch

    buffer = torch.empty(min(_BLOCK, info.nbytes), dtype=torch.uint8)
    for begin in range(0, info.nbytes, _BLOCK):
        piece = buffer[: min(_BLOCK, info.nbytes - begin)]
        fill(begin, piece.numpy().data)
        yield piece.view(torch_dtype(info.dtype))


def from_packages(path: Path) -> TensorStore | None:
    """Return the store that another package makes of a path; None if no package knows it."""
    for entry in sorted(entry_points(group="lemonx.stores"), key=lambda entry: entry.name):
        try:
            store = entry.load()(path)
        except LemonxError:
            raise
        except Exception as error:  # whatever the code of others raises
            found = f"cannot be read by the store {entry.name!r} ({one_line(error)})"
            raise BadCheckpoint(found, "mend or uninstall its package", file=path) from error
        if store:
            return store
    return None
