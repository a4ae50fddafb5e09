"""What torch.save wrote, read without running it: plain containers, and tensors as places in the file.

The archive's pickle may say only what tensors need (a dtype, a shape, strides and a storage), and the records that its
reader admits by name. Numbers are read from the file later, a few rows at a time.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from lemonx.checkpoints.safetensors_file import by_torch_name, item_size
from lemonx.errors import BadCheckpoint

# What one tensor's archive may take beside its numbers.
_MOST_PICKLE = 1 << 16
_MOST_AXES = 64
_LOCAL_HEADER = 30  # then the name and the extra field, whose lengths are its last four bytes
_STORAGES = {
    **{"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"},
    **{"LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8"},
    **{"BoolStorage": "BOOL", "ComplexFloatStorage": "C64"},
}


class Placed(NamedTuple):
    """The numbers of a tensor in a file: from byte `begin` on, with `strides` in elements.

    A tuple, because a pickle cannot change it once it is checked.
    """

    begin: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class DType(str):
    """A dtype that a pickle holds, by the name that safetensors has for it."""

    __slots__ = ()


class Asked(ValueError):
    """A pickle names something that is not admitted; nothing of it is run."""


def locate(fd: int, path: Path, offset: int, length: int) -> Placed:
    """Find the one tensor in bytes `offset` to `offset + length` of an open file; `path` is for messages."""
    try:
        tensor = contents(Window(fd, offset, length))
        if not isinstance(tensor, Placed):
            raise ValueError(f"it holds a {type(tensor).__name__}, not a tensor")
        return tensor._replace(begin=offset + tensor.begin)
    except Exception as error:  # what a broken or hostile archive raises is not known in advance
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise BadCheckpoint(f"holds no readable tensor at byte {offset} ({why})", "save it again", file=path) from None


def contents(file: io.RawIOBase) -> Any:
    """Return the object in an archive, which holds a tensor and little else; any exception if it is broken."""
    with zipfile.ZipFile(cast("BinaryIO", file)) as archive:
        entries = archive.infolist()
        named = {entry.filename.partition("/")[2]: entry for entry in entries}
        if len(named) != len(entries) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed, which torch does not do")
        order = archive.read(named["byteorder"]) if "byteorder" in named else b"little"
        if order != b"little" or named["data.pkl"].file_size > _MOST_PICKLE:
            raise ValueError("its numbers are big-endian, or it is no tensor")
        raw = archive.read(named["data.pkl"])
    return _Plain(raw, file, named).load()


class Window(io.RawIOBase):
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


class _Storage(NamedTuple):
    """Where a storage lies, and how many bytes it has."""

    dtype: str
    begin: int
    size: int


class _Plain(pickle.Unpickler):
    """Builds descriptions of tensors, plain containers and the records that are admitted, and nothing else."""

    def __init__(self, raw: bytes, file: io.RawIOBase, entries: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._file, self._entries = file, entries
        self._length = file.seek(0, os.SEEK_END)
        self._known: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
            ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_untyped,
            ("collections", "OrderedDict"): _empty,
        }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (found := self._known.get((module_name, global_name))) is not None:
            return found
        if module_name == "torch" and (dtype := by_torch_name(global_name) or _STORAGES.get(global_name)):
            return DType(dtype)
        if (module_name, global_name) in (("torch.storage", "UntypedStorage"), ("torch", "UntypedStorage")):
            return "U8"
        raise Asked(f"it asks for {module_name}.{global_name}, which no tensor needs"[:120])

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise ValueError("it refers to something else than its storage")
        entry = self._entries[f"data/{key}"]
        self._file.seek(entry.header_offset)
        raw = self._file.read(_LOCAL_HEADER)
        if not raw or len(raw) < _LOCAL_HEADER or not raw.startswith(b"PK\x03\x04"):
            raise ValueError("its directory leads nowhere")
        names = int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
        begin = entry.header_offset + _LOCAL_HEADER + names
        if begin + entry.file_size > self._length:
            raise ValueError("it is truncated")
        return _Storage(dtype, begin, entry.file_size)


class _Ordered(dict[Any, Any]):
    """A dict whose attributes, which torch gives to a module's state, do not count."""

    def __setstate__(self, state: Any) -> None:
        pass


def _empty() -> dict[Any, Any]:
    """What is put into it comes later; a list given at once could be copied a million times."""
    return _Ordered()


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Placed:
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > _MOST_AXES:
        raise ValueError("it is not a plain tensor")
    if not all(type(number) is int and 0 <= number < 2**62 for number in (offset, *shape, *strides)):
        raise ValueError("its shape is not one of natural numbers")
    size = item_size(storage.dtype)
    last = offset + sum(max(0, n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if (last + 1) * size > storage.size and 0 not in shape:
        raise ValueError("its storage is smaller than its shape")
    return Placed(storage.begin + offset * size, storage.dtype, tuple(shape), tuple(strides))


def _rebuilt_untyped(storage: Any, offset: Any, shape: Any, strides: Any, _: Any, __: Any, dtype: Any) -> Placed:
    """The form of dtypes that have no storage class of their own."""
    if not isinstance(storage, _Storage) or not isinstance(dtype, str):
        raise ValueError("its dtype is unknown")
    return _rebuilt(storage._replace(dtype=dtype), offset, shape, strides)
