"""A checkpoint written piece by piece, in any order and from any thread, that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, final

from lemonx.checkpoints.chunks import contiguous, joined, runs, span, write_through
from lemonx.checkpoints.creating import write_new
from lemonx.checkpoints.destination import (
    check_destination,
    claim,
    make_parents,
    move_in,
    size_text,
    sync_folder,
    unmake,
)
from lemonx.checkpoints.opening import name_of, open_file
from lemonx.checkpoints.safetensors_file import dtype_name, read_header
from lemonx.checkpoints.shards import Entry, Files, Shard, entry_bytes, lay_out, safetensors_files
from lemonx.checkpoints.store import bytes_of
from lemonx.errors import BadCheckpoint, BadOutput
from lemonx.guards.interrupts import uninterrupted
from lemonx.guards.open_files import allow_files

if TYPE_CHECKING:
    import torch


# By tensor and by columns, which rows: most tensors are written in whole rows.
Written = dict[str, dict[tuple[int, int], list[tuple[int, int]]]]


@final
class CheckpointWriter:
    """A context in which tensors and files are written; leaving it cleanly makes `output` appear.

    Until then everything is in `folder`, a hidden folder beside `output`; leaving by an exception removes it.
    A killed process leaves that folder behind, and `output` as it was; the next writer to `output` clears it away.
    Unless it is to be `kept`, nobody waits until it is on the disk.

    Several processes may write one output: each its `own` files, the others `into` the folder of the first.
    """

    output: Path
    folder: Path
    total_bytes: int

    def __init__(
        self,
        output: str | os.PathLike[str],
        infos: Sequence[Entry],
        *,
        max_shard_size: int,
        force: bool = False,
        source: Path | None = None,
        kept: bool = True,
        shards: Sequence[Shard] | None = None,
        files: Files | None = None,
        own: Callable[[str], bool] | None = None,
        into: Path | None = None,
    ) -> None:
        self._kept, self._own, self._into = kept, own, into
        if files is None:
            # Files that are to be just as they were come with a layout of their own, and their own index.
            laid = lay_out(infos, max_shard_size) if shards is None else shards
            files = safetensors_files(laid, indexed=shards is None, check=partial(check_readable, laid))
        self._files = files
        self.total_bytes = sum(files.sizes.values())
        self._made: list[Path] = [] if into else make_parents(Path(output), source)
        try:
            needed = self.total_bytes
            self.output = into or check_destination(Path(output), source=source, needed=needed, force=force)
        except BaseException:
            unmake(self._made)
            raise
        self._force = force
        self._held: int | None = None
        self._written: Written = {name: {} for name in files.entries}
        self._names = set(files.sizes)
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> CheckpointWriter:
        if self._into:
            self.folder = self._into
            self._descriptors = {
                name: os.open(self.folder / name, os.O_RDWR) for name in filter(self._own, self._names)
            }
            return self
        try:
            with uninterrupted():
                self.folder, self._held = claim(self.output)
            allow_files(len(self._files.sizes))
            for name, size in self._files.sizes.items():
                self._create(name, size)
            for name, offset, raw in self._files.opening:
                _write_all(self._descriptors[name], memoryview(raw), offset)
            for name, raw in self._files.beside.items():
                self._add(name, raw)
        except OSError as error:
            self._discard()
            raise self._failed(error) from None
        except BaseException:
            self._discard()
            raise
        return self

    def _create(self, name: str, size: int) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
        self._descriptors[name] = fd
        _reserve(fd, size)

    def rows(self, name: str) -> range:
        """Return the rows of a tensor of which this process writes any number."""
        shape = self._files.entries[name][2]
        places = [chunk for chunk in self._files.places[name] if self._own is None or self._own(str(chunk.file))]
        if not places or not shape:
            return range(len(places[:1]))
        return range(min(c.at[0] for c in places), max(c.at[0] + c.sizes[0] for c in places))

    def write(self, name: str, start_row: int, tensor: torch.Tensor, start_column: int = 0) -> None:
        """Write rows `start_row` onwards of tensor `name` (a scalar is row 0); no copy if contiguous.

        The tensor may hold a part of the last axis, which then begins at `start_column`.
        """
        _, dtype, shape = self._files.entries[name]
        rows, width = (shape[0] if shape else 1), (shape[-1] if len(shape) > 1 else 1)
        count = (tensor.shape[0] if tensor.ndim else 0) if shape else 1
        part = tensor.shape[-1] if len(shape) > 1 and tensor.ndim else width
        wanted = (count, *shape[1:-1], part)[: len(shape)]
        if dtype_name(tensor.dtype) != dtype or tuple(tensor.shape) != wanted:
            found = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            raise ValueError(f"{found} does not fit tensor {name!r}, {dtype} {shape}")
        if not 0 <= start_row <= start_row + count <= rows:
            raise ValueError(f"rows {start_row} to {start_row + count} of {name!r}, which has {rows}")
        if not 0 <= start_column <= start_column + part <= width:
            raise ValueError(f"columns {start_column} to {start_column + part} of {name!r}, which has {width}")
        flat = bytes_of(tensor.detach().contiguous())
        row_bytes = entry_bytes((name, dtype, shape[1:]))
        begin, stride = start_row * row_bytes + start_column * tensor.itemsize, width * tensor.itemsize
        size = part * tensor.itemsize if part < width else len(flat)
        try:
            for piece in range(len(flat) // size if size else 0):
                self._put(name, begin + piece * stride, flat[piece * size : (piece + 1) * size], tensor.itemsize)
        except OSError as error:
            raise self._failed(error) from None
        with self._lock:
            written = self._written[name].setdefault((start_column, start_column + part), [])
            written.append((start_row, start_row + count))

    def noted(self, names: Iterable[str]) -> Written:
        """What was written of these tensors here, for the writer of another process, which has the same files open."""
        return {name: self._written[name] for name in names}

    def note_written(self, written: Written) -> None:
        """Count what another process has written."""
        for name, columns in written.items():
            for which, rows in columns.items():
                self._written[name].setdefault(which, []).extend(rows)

    def _put(self, name: str, begin: int, data: memoryview, size: int) -> None:
        """Write bytes `begin` onwards of a tensor, of so many bytes per number, to every chunk that holds any."""
        shape, places = self._files.entries[name][2], self._files.places[name]
        start, stop = begin // size, (begin + len(data)) // size
        for chunk in places:
            if self._own is not None and not self._own(str(chunk.file)):
                continue
            fd, base = self._descriptors[str(chunk.file)], chunk.item[0]
            if len(places) == 1 and chunk.sizes == shape and chunk.strides == contiguous(shape):
                _write_all(fd, data, base + chunk.begin * size + begin)
                return
            low, high = span(chunk, shape)
            for group in joined(runs(chunk, shape, start, stop)) if low < stop and start < high else ():
                buffers = [data[(place - start) * size : (place - start + count) * size] for place, _, count in group]
                write_through(fd, base + group[0][1] * size, buffers)

    def add_text(self, name: str, text: str) -> None:
        """Add a text file, in UTF-8."""
        self._add(name, text.encode())

    def add_file(self, file: BinaryIO, name: str) -> None:
        """Add a copy of what is left to read of an open file."""
        self._add(name, file)

    def add_tensors(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Add a safetensors file of its own, with tensors in memory."""
        entries = [(key, dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in weights.items()]
        (file,) = lay_out(entries, sum(map(entry_bytes, entries)))
        self._add(name, b"".join([file.header, *(bytes_of(weights[key].contiguous()) for key, _, _ in file.entries)]))

    def _add(self, name: str, content: bytes | BinaryIO) -> None:
        path = self._new_file(name)
        try:
            write_new(path, content)
        except OSError as error:
            raise self._failed(error) from None

    def files(self) -> list[str]:
        """The names of all that is in the folder by now, relative to it."""
        below = (Path(root, name) for root, _, names in os.walk(self.folder) for name in names)
        return sorted(path.relative_to(self.folder).as_posix() for path in below)

    def _new_file(self, name: str) -> Path:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in name:
            raise ValueError(f"{name!r} is not a file name inside the checkpoint")
        with self._lock:
            if str(pure) in self._names:
                raise ValueError(f"{name!r} was added before")
            self._names.add(str(pure))
        path = self.folder / pure
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._check_complete()
            self._sync()
            if self._into:
                return
            self._files.check(self.folder)
            move_in(self.folder, self.output, force=self._force)
            self._release()
        except OSError as problem:
            self._discard()
            raise self._failed(problem) from None
        except BaseException:
            self._discard()
            raise

    def _check_complete(self) -> None:
        """Every row of every tensor was written exactly once, and all of its columns."""
        for name, entry in self._files.entries.items():
            shape = entry[2]
            if not entry_bytes(entry):
                continue
            if self._own is not None:  # blocks of rows reach into those of other processes
                _check_within(self._written[name], self.rows(name), f"rows of tensor {name!r}")
                continue
            _check_joined(self._written[name], shape[-1] if len(shape) > 1 else 1, f"columns of tensor {name!r}")
            for rows in self._written[name].values():
                _check_joined(rows, shape[0] if shape else 1, f"rows of tensor {name!r}")

    def _sync(self) -> None:
        """Everything is on the disk, not just in its cache, before the rename that makes it count."""
        self._close()
        for root, _, names in os.walk(self.folder) if self._kept else ():
            for name in names:
                fd = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            sync_folder(Path(root))

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held = None

    def _discard(self) -> None:
        self._close()
        if self._held is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._release()
        unmake(self._made)

    def _failed(self, error: OSError) -> BadOutput:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = size_text(self.total_bytes)
            return BadOutput(
                f"needs {needed}, and the disk is full", "free some space, and start again", file=self.output
            )
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return BadOutput(
                "was created by someone else meanwhile",
                "choose another output, or replace it with --force",
                file=self.output,
            )
        if error.errno == errno.EFBIG:
            return BadOutput(
                "needs files larger than the system or `ulimit -f` allows",
                "raise that limit, or write smaller files with --shards",
                file=self.output,
            )
        if error.errno == errno.EMFILE:
            return BadOutput(
                "needs more open files than `ulimit -n` allows",
                "raise that limit, or write larger files with --shards",
                file=self.output,
            )
        return BadOutput(f"cannot be written ({error})", "choose another output", file=self.output)


def check_readable(shards: Sequence[Shard], folder: Path) -> None:
    """Our reader and the safetensors library both find exactly the tensors that were asked for."""
    from safetensors import SafetensorError, safe_open

    for shard in shards:
        path = folder / shard.name
        try:
            ours = tuple((t.name, t.dtype, t.shape) for t in read_header(path).tensors if t.nbytes)
            # By the name of what is open: the library takes no name that is not UTF-8.
            with open_file(path) as opened, safe_open(name_of(opened.fileno()), framework="pt") as file:
                theirs = set(file.keys())
        except (BadCheckpoint, SafetensorError, RuntimeError) as error:  # RuntimeError: no memory to map it in
            reason = " ".join(str(error).split())[:300]
            raise BadOutput(
                f"cannot be read back ({reason})", "check the disk and memory, and start again", file=path
            ) from None
        wanted = tuple(entry for entry in shard.entries if entry_bytes(entry))
        if ours != wanted or theirs != {entry[0] for entry in shard.entries}:
            raise BadOutput("reads back different from what was written", "check the disk, and start again", file=path)


def _check_joined(parts: Iterable[tuple[int, int]], size: int, what: str) -> None:
    """Raise if parts (start, stop) do not make up 0 to `size`."""
    position = 0
    for start, stop in sorted(parts):
        if start != position:
            raise ValueError(f"{what} are missing or written twice near {position}")
        position = stop
    if position != size:
        raise ValueError(f"{what} were written up to {position} of {size} only")


def _check_within(written: Mapping[tuple[int, int], Iterable[tuple[int, int]]], rows: range, what: str) -> None:
    """Raise unless all of these rows were written."""
    position = rows.start
    for start, stop in sorted(part for parts in written.values() for part in parts):
        position = max(position, stop) if start <= position else position
    if position < rows.stop:
        raise ValueError(f"{what} were written up to {position} of {rows.stop} only")


def _reserve(fd: int, size: int) -> None:
    """Give the file its size, and where the system can, its disk blocks: a full disk then shows at once."""
    if sys.platform == "linux":
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):  # one call writes at most 2 GiB
        done += os.pwrite(fd, data[done:], offset + done)
