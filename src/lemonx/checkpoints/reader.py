"""A checkpoint on disk, read lazily: headers when it is opened, rows of a tensor when they are asked for.

Tensors are read with preadv, never mapped: a file that shrinks while it is mapped kills the process with
SIGBUS, a short read is an error that can be reported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from lemonx.checkpoints.folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    check_no_stray_weights,
    no_weights,
    other_files,
    parse_object,
    read_bytes,
    real_file,
    weight_map,
)
from lemonx.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, read_header_from, torch_dtype
from lemonx.errors import BadCheckpoint

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22


@final
class Checkpoint:
    """A validated Hugging Face folder: config.json and one or more safetensors files.

    `config` is config.json; `tensors` is name to TensorInfo, in file order; `companions` is relative name to
    real path of the other files to carry along; `left_behind` names the rest. Reads may come from any thread.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    companions: Mapping[str, Path]
    left_behind: tuple[str, ...]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: dict[Path, int] = {}
        self._states: dict[Path, tuple[int, int]] = {}
        self._closed = False
        self._config_bytes = read_bytes(real_file(path, CONFIG))
        self.config = parse_object(self._config_bytes, path / CONFIG)
        try:
            self._files = self._open_shards()
            used = {CONFIG, INDEX, *(file.path.name for file in self._files)}
            self.companions, self.left_behind = other_files(path, used)
        except BaseException:
            self.close()
            raise
        self.tensors = {tensor.name: tensor for file in self._files for tensor in file.tensors}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in the folder `path`, its config, index and headers validated."""
        given = Path(path)
        try:
            folder = given.resolve(strict=True)
            if folder.is_dir():
                return cls(folder)
        except (FileNotFoundError, RuntimeError):
            raise BadCheckpoint(f"{str(given)!r} does not exist: give the folder of a saved model") from None
        except OSError as error:
            raise BadCheckpoint(f"{str(given)!r} cannot be read ({error.strerror}): check its permissions") from None
        raise BadCheckpoint(f"{str(given)!r} is not a folder: give the folder that holds config.json")

    def _open_shards(self) -> list[SafetensorsFile]:
        if (self.path / INDEX).is_symlink() or (self.path / INDEX).exists():
            mapping = weight_map(self.path)
            shards = sorted(set(mapping.values()))
        elif (self.path / WEIGHTS).is_symlink() or (self.path / WEIGHTS).exists():
            mapping, shards = None, [WEIGHTS]
        else:
            raise no_weights(self.path)
        for shard in shards:
            self._open_file(self.path / shard, real_file(self.path, shard))
        check_no_stray_weights(self.path, set(shards))
        files = [read_header_from(fd, path) for path, fd in self._descriptors.items()]
        if not any(file.tensors for file in files):
            raise BadCheckpoint(f"{str(self.path)!r} holds no tensors: save the model again")
        _check_unique(files)
        if mapping is not None:
            _check_index(mapping, files, self.path / INDEX)
        return files

    def _open_file(self, path: Path, real: Path) -> None:
        try:
            self._descriptors[path] = os.open(real, os.O_RDONLY)
        except OSError as error:
            raise BadCheckpoint(f"{str(path)!r} cannot be opened ({error.strerror}): check its permissions") from None
        self._states[path] = _state(self._descriptors[path])

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor, along its first axis, in a fresh tensor or in `out`."""
        import torch

        info = self.tensors[name]
        rows = info.shape[0] if info.shape else 1
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start} to {stop} of {name!r}, which has {rows}")
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        dtype = torch_dtype(info.dtype)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        elif out.shape != shape or out.dtype != dtype or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"out for {name!r} must be contiguous, on the CPU, {dtype} of shape {shape}")
        row_bytes = info.nbytes // rows if rows else 0
        buffer = out.reshape(-1).view(torch.uint8).numpy().data
        self._read_into(info.file, info.begin + start * row_bytes, buffer[: (stop - start) * row_bytes])
        return out

    def _read_into(self, file: Path, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise ValueError(f"{str(self.path)!r} is closed")
        done = 0
        while done < len(buffer):  # one call returns at most 2 GiB
            try:
                count = os.preadv(self._descriptors[file], [buffer[done:]], offset + done)
            except OSError as error:
                raise BadCheckpoint(f"{str(file)!r} cannot be read ({error.strerror}): check the disk") from None
            if count == 0:
                raise _changed(file)
            done += count

    def check_unchanged(self) -> None:
        """BadCheckpoint if a weight file was written to since it was opened."""
        for path, fd in self._descriptors.items():
            if _state(fd) != self._states[path]:
                raise _changed(path)

    def digest(self) -> str:
        """SHA-256 of config.json and of every weight file's name, size and header: cheap, blind to values."""
        total = hashlib.sha256(hashlib.sha256(self._config_bytes).digest())
        for file in self._files:
            total.update(f"{file.path.name}\0{file.size}\0{file.header_sha256}\n".encode())
        return total.hexdigest()

    def content_digest(self, progress: Callable[[int], None] | None = None) -> str:
        """SHA-256 of config.json and of every byte of the weights; `progress` gets counts of bytes read."""
        total = hashlib.sha256(hashlib.sha256(self._config_bytes).digest())
        buffer = memoryview(bytearray(_BLOCK))
        for file in self._files:
            total.update(f"{file.path.name}\0{file.size}\n".encode())
            for offset in range(0, file.size, _BLOCK):
                block = buffer[: min(_BLOCK, file.size - offset)]
                self._read_into(file.path, offset, block)
                total.update(block)
                if progress is not None:
                    progress(len(block))
        return total.hexdigest()

    def close(self) -> None:
        """Close the files; reading after this is an error."""
        self._closed = True
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _state(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


def _changed(path: Path) -> BadCheckpoint:
    return BadCheckpoint(f"{str(path)!r} changed while it was read: start again when nothing writes to it")


def _check_unique(files: list[SafetensorsFile]) -> None:
    home: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in home:
                raise BadCheckpoint(
                    f"{str(file.path)!r} holds tensor {tensor.name!r}, and so does {home[tensor.name]!r}: "
                    "keep one of them"
                )
            home[tensor.name] = file.path.name


def _check_index(mapping: dict[str, str], files: list[SafetensorsFile], index: Path) -> None:
    """The index and the shards say exactly the same."""
    actual = {tensor.name: file.path.name for file in files for tensor in file.tensors}
    for name, shard in mapping.items():
        if name not in actual:
            raise BadCheckpoint(f"{str(index)!r} names tensor {name[:200]!r}, but no shard holds it: save it again")
        if actual[name] != shard:
            raise BadCheckpoint(
                f"{str(index)!r} puts tensor {name!r} in {shard!r}, but {actual[name]!r} has it: save again"
            )
    missing = next((name for name in actual if name not in mapping), None)
    if missing is not None:
        raise BadCheckpoint(f"{str(index)!r} omits tensor {missing!r} of {actual[missing]!r}: save it again")
