"""Reads a checkpoint lazily: headers when it is opened, rows of a tensor when they are needed.

Tensors are read with preadv, never memory-mapped. If a mapped file shrinks, SIGBUS kills the process; a short read is
an error that can be reported.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, final

from lemonx.checkpoints import copying, pickles, quantised
from lemonx.checkpoints.chunks import InChunks
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.copying import link_weights, row_pieces, write_copy
from lemonx.checkpoints.finding import (
    checked_headers,
    config_beside,
    instead_of_a_file,
    instead_of_nothing,
    no_model,
    open_run,
)
from lemonx.checkpoints.folder import (
    CONFIG,
    INDEX,
    PICKLED,
    WEIGHTS,
    has,
    has_weights,
    no_weights,
    other_files,
    pickled_weights,
    weight_map,
)
from lemonx.checkpoints.opening import changed, file_inside, identity, open_inside, read_inside
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.runs import Naming, RunFolder
from lemonx.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, torch_dtype
from lemonx.checkpoints.temporary import Temporary
from lemonx.checkpoints.values import blocks, bytes_of, held_infos, read_into
from lemonx.errors import BadCheckpoint, raise_first

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22


class NotDownloaded(BadCheckpoint):
    """A weight was asked for, but only the headers of the weights are here."""


@final
class Checkpoint:
    """A validated Hugging Face folder: config.json and one or more safetensors files.

    `config` is config.json; `tensors` is name to TensorInfo, in file order; `companions` is relative name to
    real path of the other files to carry along; `left_behind` names the rest. Reads may come from any thread.
    `origin` is the folder that was asked for; `path` is another only where weights were `converted`, from what that
    says. `nbytes`: the size of the weights before conversion. `config_file` is where errors find config.json. Where no
    safetensors hold the weights, `run` does, the checkpoint of a run on many processes, or `weights` are they.
    """

    path: Path
    origin: Path
    config: dict[str, JsonValue]
    tensors: Mapping[str, TensorInfo]
    companions: Mapping[str, Path]
    left_behind: tuple[str, ...]
    converted: str | None = None
    run: RunFolder | None = None

    def __init__(
        self,
        path: Path,
        *,
        origin: Path | None = None,
        config: Path | None = None,
        naming: Naming | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        run: bool = False,
    ) -> None:
        self.path = path
        self.weights = weights
        self.origin = origin or path
        self._temporary: list[Temporary] = []
        self._kept: list[RunFolder] = []
        self._descriptors: dict[Path, int] = {}
        self._states: dict[Path, tuple[int, ...]] = {}
        self._closed = self._headers_only = False
        file, self._beside, self._config_bytes = config_beside(path, config)
        self.config = parse_config(self._config_bytes, file)
        self.config_file = file if config is not None else self.origin / CONFIG
        self._files: list[SafetensorsFile] = []
        try:
            if weights is not None:
                self.tensors = held_infos(weights, path)
            elif (found := open_run(path, first=run)) is not None:
                self.run = found
                self.keep(self.run)
                shapes = {name: stored.shape for name, stored in self.run.weights.items()}
                self.tensors = self.run.infos(naming(self.config, shapes) if naming else None)
            else:
                self._files = self._open_shards()
                self.tensors = {tensor.name: tensor for file in self._files for tensor in file.tensors}
            used = {CONFIG, INDEX, WEIGHTS, *(file.path.name for file in self._files)}
            self.companions, self.left_behind = other_files(self._beside, used)
        except BaseException:
            self.close()
            raise
        self.nbytes = sum(info.nbytes for info in self.tensors.values())

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        allow_pickle: bool | str = False,
        config: Path | None = None,
        naming: Naming | None = None,
        run: bool = False,
    ) -> Checkpoint:
        """The checkpoint in the folder `path`, its config, index and headers validated.

        `allow_pickle`: if there are only pickled weights, convert them to a temporary copy, as plain tensors; a word
        is the name under which the file has those that are meant, where it has an average too. `config`: a
        config.json, or a folder with one and the files beside it, in place of those in `path`. `naming`: what the
        tensors of a distributed checkpoint are called in a model's files. `run`: prefer the weights of a run's own
        checkpoint, where safetensors lie beside it.
        """
        given = Path(path)
        try:
            folder = given.resolve(strict=True)
            if folder.is_dir():
                raise_first(no_model(folder, given))
                pickled = pickled_weights(folder) if allow_pickle and not has_weights(folder) else None
                if pickled:
                    return cls._unpickled(folder, pickled, allow_pickle)
                return cls._in_floats(folder, config, naming, run)
            if allow_pickle and folder.name.endswith(PICKLED) and has(folder.parent, CONFIG):
                return cls._unpickled(folder.parent, folder.name, allow_pickle)
        except (FileNotFoundError, RuntimeError):
            raise BadCheckpoint("does not exist", instead_of_nothing(given), file=given) from None
        except OSError as error:
            raise BadCheckpoint(f"cannot be read ({error.strerror})", "check its permissions", file=given) from None
        raise BadCheckpoint("is not a folder", instead_of_a_file(given), file=given)

    @classmethod
    def _unpickled(cls, folder: Path, name: str, allowed: bool | str) -> Checkpoint:
        named = allowed if isinstance(allowed, str) else None
        what = "pickles, read as plain tensors" + (f" under {named!r}" if named else "")
        return cls.converted_copy(folder, lambda into: (pickles.convert(folder, into, name, named), what, None))

    @classmethod
    def _in_floats(cls, folder: Path, config: Path | None, naming: Naming | None, run: bool) -> Checkpoint:
        """The checkpoint as it is, or converted to floats where its weights are quantised in a known way."""
        stored = cls(folder, config=config, naming=naming, run=run)
        if not quantised.is_known(stored.config):
            return stored
        with stored:
            return cls.converted_copy(folder, lambda into: (*quantised.convert(stored, into), stored.nbytes))

    @classmethod
    def converted_copy(
        cls, origin: Path, convert: Callable[[Path], tuple[Path, str, int | None]], *, headers: bool = False
    ) -> Checkpoint:
        """The checkpoint that `convert` writes into a temporary folder; `close` removes it.

        `convert` also says from what, and how many bytes that takes, if they are not as many. `headers`: it writes the
        headers of the weights only.
        """
        temporary = Temporary()
        try:
            copy, what, nbytes = convert(temporary.path)
            checkpoint = cls(copy, origin=origin)
        except BaseException:
            temporary.close()
            raise
        checkpoint.converted, checkpoint._headers_only = what, headers
        checkpoint.nbytes = checkpoint.nbytes if nbytes is None else nbytes
        checkpoint._temporary.append(temporary)
        return checkpoint

    @classmethod
    def of_headers(cls, folder: Temporary, origin: Path) -> Checkpoint:
        """The checkpoint of a folder that has the headers of all weights, and no number: enough for a plan."""
        checkpoint = cls(folder.path, origin=origin)
        checkpoint._headers_only = True
        checkpoint._temporary.append(folder)
        return checkpoint

    def _open_shards(self) -> list[SafetensorsFile]:
        if not has_weights(self.path):
            raise no_weights(self.path)
        mapping = weight_map(self.path) if has(self.path, INDEX) else None
        shards = [WEIGHTS] if mapping is None else sorted(set(mapping.values()))
        for shard in shards:
            self._descriptors[self.path / shard] = open_inside(self.path, shard)
            self._states[self.path / shard] = identity(self._descriptors[self.path / shard])
        return checked_headers(self.path, self._descriptors, mapping)

    def keep(self, other: RunFolder) -> None:
        """Close another part of the same run with this one, and check that it does not change either."""
        self._kept.append(other)

    def open_companion(self, name: str) -> BinaryIO:
        """Open a companion."""
        return file_inside(self._beside, name)

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        columns: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor, along its first axis, in a fresh tensor or in `out`.

        `columns`: only these of its last axis.
        """
        import torch

        info = self.tensors[name]
        rows = info.shape[0] if info.shape else 1
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start} to {stop} of {name!r}, which has {rows}")
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        if columns is not None:
            if columns.step != 1 or not 0 <= columns.start < columns.stop <= info.shape[-1]:
                raise ValueError(f"columns {columns} of {name!r}, which has {info.shape[-1]}")
            shape = (*shape[:-1], len(columns))
        dtype = torch_dtype(info.dtype)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        elif out.shape != shape or out.dtype != dtype or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"out for {name!r} must be contiguous, on the CPU, {dtype} of shape {shape}")
        row_bytes = info.nbytes // rows if rows else 0
        begin, buffer = start * row_bytes, bytes_of(out)
        stride = size = (stop - start) * row_bytes
        if columns is not None and len(columns) < info.shape[-1]:
            stride, size = info.shape[-1] * dtype.itemsize, len(columns) * dtype.itemsize
            begin += columns.start * dtype.itemsize
        for piece in range(len(buffer) // size if size else 0):
            part = buffer[piece * size : (piece + 1) * size]
            self._fill(info, begin + piece * stride, part)
        return out

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor's numbers in order, as flat pieces of a few megabytes; each is valid until the next is read."""
        info = self.tensors[name]
        return blocks(info, lambda begin, buffer: self._fill(info, begin, buffer))

    def pieces(self, name: str, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """A tensor as groups of rows, each with its first; `nbytes`: what the whole takes once it is converted."""
        info = self.tensors[name]
        if not info.shape:
            yield 0, self.read(name)
            return
        for start, stop in row_pieces(info.shape[0], nbytes, copying.BLOCK):
            yield start, self.read(name, start, stop)

    def same(self, name: str, other: str, rows: range | None = None) -> bool:
        """Whether two tensors, or these rows of them, are equal bit for bit; they are compared piece by piece."""
        a, b = self.tensors[name], self.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        rows = range(a.shape[0]) if rows is None else rows
        piece = max(1, _BLOCK * a.shape[0] // max(1, a.nbytes))
        starts = range(rows.start, rows.stop, piece)
        ends = (min(start + piece, rows.stop) for start in starts)
        return all(
            self.read(name, start, end).equal(self.read(other, start, end))
            for start, end in zip(starts, ends, strict=True)
        )

    def _fill(self, info: TensorInfo, begin: int, buffer: memoryview) -> None:
        """Read bytes `begin` onwards of a tensor."""
        if self.weights is not None:
            self._require_weights()
            buffer[:] = bytes_of(self.weights[info.name])[begin : begin + len(buffer)]
        elif self.run is not None and isinstance(info, InChunks):
            self._require_weights()
            self.run.fill(info, begin, buffer)
        else:
            read_into(self._descriptor(info.file), info.file, info.begin + begin, buffer)

    def _descriptor(self, file: Path) -> int:
        self._require_weights()
        return self._descriptors[file]

    def _require_weights(self) -> None:
        if self._closed:
            raise ValueError(f"{str(self.path)!r} is closed")
        if self._headers_only:
            raise NotDownloaded("is open for its headers only", "download and open it first", file=self.origin)

    @property
    def in_safetensors(self) -> bool:
        """Whether the weights lie in files as loaders read them."""
        return bool(self._files)

    @functools.cached_property
    def bare(self) -> Path:
        """A folder with only the weights, under the names that loaders know; `close` removes it.

        What no safetensors hold is copied there. Otherwise it has links to the files.
        """
        self._require_weights()
        temporary = Temporary()
        self._temporary.append(temporary)
        if not self.in_safetensors:
            entries = [(info.name, info.dtype, info.shape) for info in self.tensors.values()]
            pieces = (
                (info.name, start, rows)
                for info in self.tensors.values()
                for start, rows in self.pieces(info.name, info.nbytes)
            )
            import torch

            # Whoever runs torch in another dtype than code asks for still wants what is stored.
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
                return write_copy(temporary.path / "copy", entries, pieces, self._config_bytes, {})
        return link_weights(temporary.path, self._descriptors, self.tensors)

    def check_unchanged(self) -> None:
        """BadCheckpoint if a weight file was written to since it was opened."""
        for path, fd in self._descriptors.items():
            if identity(fd) != self._states[path]:
                raise changed(path)
        for held in self._kept:
            held.check_unchanged()

    def digest(self) -> str:
        """SHA-256 of config.json and of every weight file's name, size and header: cheap, but blind to values."""
        total = hashlib.sha256(hashlib.sha256(self._config_bytes).digest())
        for file in self._files:
            total.update(os.fsencode(f"{file.path.name}\0{file.size}\0{file.header_sha256}\n"))
        if self.run is not None:
            total.update(self.run.digest.encode())
        return total.hexdigest()

    def content_digest(self, progress: Callable[[int], None] | None = None) -> str:
        """SHA-256 of config.json and of every byte of the weights; `progress` gets counts of bytes read.

        What no safetensors hold counts as tensors, wherever these lie.
        """
        total = hashlib.sha256(hashlib.sha256(self._config_bytes).digest())
        buffer = memoryview(bytearray(_BLOCK))
        for file in self._files:
            total.update(os.fsencode(f"{file.path.name}\0{file.size}\n"))
            for offset in range(0, file.size, _BLOCK):
                block = buffer[: min(_BLOCK, file.size - offset)]
                read_into(self._descriptor(file.path), file.path, offset, block)
                total.update(block)
                if progress is not None:
                    progress(len(block))
        for info in () if self.in_safetensors else self.tensors.values():
            total.update(f"{info.name}\0{info.dtype}\0{list(info.shape)}\n".encode())
            for piece in self.blocks(info.name):
                total.update(bytes_of(piece))
                if progress is not None:
                    progress(piece.nbytes)
        return total.hexdigest()

    def opening_bytes(self) -> dict[str, bytes]:
        """config.json, the index if there is one, and the header of every file of weights without its length."""
        found = {CONFIG: self._config_bytes}
        if has(self.path, INDEX):
            found[INDEX] = read_inside(self.path, INDEX)
        for file in self._files:
            fd = self._descriptor(file.path)
            found[file.path.name] = os.pread(fd, int.from_bytes(os.pread(fd, 8, 0), "little"), 8)
        return found

    def close(self) -> None:
        """Close the files; reading after this is an error."""
        self._closed = True
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        while self._kept:
            self._kept.pop().close()
        while self._temporary:
            self._temporary.pop().close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
