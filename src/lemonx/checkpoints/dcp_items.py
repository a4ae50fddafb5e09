"""Where the numbers of a tensor lie in an item of a .distcp file: a zip archive, as torch.save writes it.

The archive's pickle is not run. It may say only what a plain tensor needs: a dtype, a shape, strides and one storage,
and its numbers are then read from the file, a few rows at a time.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemonx.checkpoints.safetensors_file import by_torch_name, item_size
from lemonx.errors import BadCheckpoint

_MOST_PICKLE = 1 << 16
_LOCAL_HEADER = 30  # then the name and the extra field, whose lengths are its last four bytes
_STORAGES = {
    **{"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"},
    **{"LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8"},
    **{"BoolStorage": "BOOL", "ComplexFloatStorage": "C64"},
}


@dataclass(frozen=True, slots=True)
class Placed:
    """The numbers of a tensor in an open file: from byte `begin` on, with `strides` in elements."""

    begin: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def locate(fd: int, path: Path, offset: int, length: int) -> Placed:
    """Find the tensor in bytes `offset` to `offset + length` of an open file; `path` is for messages."""
    try:
        with zipfile.ZipFile(_Window(fd, offset, length)) as archive:
            entries = archive.infolist()
            named = {entry.filename.partition("/")[2]: entry for entry in entries}
            if len(named) != len(entries) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("it is compressed, which torch does not do")
            order = archive.read(named["byteorder"]) if "byteorder" in named else b"little"
            if order != b"little" or named["data.pkl"].file_size > _MOST_PICKLE:
                raise ValueError("its numbers are big-endian, or it is no tensor")
            tensor = _Plain(archive.read(named["data.pkl"])).load()
        if not isinstance(tensor, _Tensor):
            raise ValueError(f"it holds a {type(tensor).__name__}, not a tensor")
        storage = named[f"data/{tensor.storage.key}"]
        data = _data_offset(fd, offset + storage.header_offset)
        size = item_size(tensor.storage.dtype)
        last = tensor.offset + sum(
            max(0, n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        inside = (last + 1) * size <= storage.file_size and data + storage.file_size <= offset + length
        if not inside and 0 not in tensor.shape:
            raise ValueError("its storage is smaller than its shape")
        return Placed(data + tensor.offset * size, tensor.storage.dtype, tensor.shape, tensor.strides)
    except BadCheckpoint:
        raise
    except Exception as error:  # what a broken or hostile archive raises is not known in advance
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise BadCheckpoint(f"holds no readable tensor at byte {offset} ({why})", "save it again", file=path) from None


def _data_offset(fd: int, header: int) -> int:
    """Where the content of an archive's entry begins, behind its local header."""
    raw = os.pread(fd, _LOCAL_HEADER, header)
    if len(raw) < _LOCAL_HEADER or not raw.startswith(b"PK\x03\x04"):
        raise ValueError("its directory leads nowhere")
    return header + _LOCAL_HEADER + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")


class _Window(io.RawIOBase):
    """A stretch of an open file as a file of its own."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length, self._at = fd, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("before the beginning")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._length - self._at)
        raw = os.pread(self._fd, left if size < 0 else min(size, left), self._offset + self._at)
        self._at += len(raw)
        return raw


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Plain(pickle.Unpickler):
    """Builds the description of one tensor, and nothing else."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _rebuilt_untyped
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return lambda *items: None
        if module_name == "torch" and (dtype := by_torch_name(global_name)):
            return dtype
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        if (module_name, global_name) in (("torch.storage", "UntypedStorage"), ("torch", "UntypedStorage")):
            return "U8"
        raise ValueError(f"it asks for {module_name}.{global_name}, which no tensor needs"[:120])

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise ValueError("it refers to something else than its storage")
        return _Storage(dtype, key)


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise ValueError("it is not a plain tensor")
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError("its shape is not one of natural numbers")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuilt_untyped(storage: Any, offset: Any, shape: Any, strides: Any, _: Any, __: Any, dtype: Any) -> _Tensor:
    """The form of dtypes that have no storage class of their own."""
    made = _rebuilt(storage, offset, shape, strides)
    if not isinstance(dtype, str):
        raise ValueError("its dtype is unknown")
    return _Tensor(_Storage(dtype, made.storage.key), made.offset, made.shape, made.strides)
