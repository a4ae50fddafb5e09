"""Reads the `.metadata` of torch.distributed.checkpoint, a pickle, without running it.

A pickle is a program. Here it may build the records that torch writes, from stand-ins that only hold what they are
given, and plain containers; whatever else it names ends the reading. Neither torch nor any class of its own is needed.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NoReturn

from lemonx.checkpoints.chunks import cover
from lemonx.checkpoints.runs import Box, Item, Saved, Stored
from lemonx.checkpoints.safetensors_file import by_torch_name, item_size
from lemonx.errors import BadCheckpoint
from lemonx.guards.limits import MOST_TENSORS

METADATA = ".metadata"
MOST_BYTES = 1_000_000_000
_META, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
# The records that are kept as what they are given, by the module that defines them.
_RECORDS = {
    _META: (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta"),
    ),
    _FILES: ("_StorageInfo", "_StoragePrefix"),
}
_AGAIN = "save it again"
_MOST_AXES, _LONGEST_PATH = 64, 4096
# A weight, its moments, and a dozen settings of its group, each under a key of its own.
_MOST_KEYS = 16 * MOST_TENSORS


def read_metadata(raw: bytes, path: Path) -> Saved:
    """The content of a `.metadata`; `path` is for messages."""
    return _checked(_unpickled(raw, path), path)


def _broken(path: Path, found: str, remedy: str = _AGAIN) -> NoReturn:
    raise BadCheckpoint(found, remedy, file=path) from None


class _Asked(Exception):
    """A pickle names something that no metadata needs."""


def _unpickled(raw: bytes, path: Path) -> Any:
    try:
        return _Plain(raw).load()
    except _Asked as asked:
        _broken(
            path,
            f"asks for {str(asked)[:120]}, which no checkpoint's metadata needs, so nothing was read",
            "get this checkpoint from someone you trust, as safetensors",
        )
    except Exception as error:  # what a broken or hostile pickle raises is not known in advance
        _broken(path, f"is not the metadata of a distributed checkpoint ({type(error).__name__})")


class _Plain(pickle.Unpickler):
    """Builds stand-ins. Their classes are new for each reading, so that a pickle can change nothing that lasts."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self._known: dict[tuple[str, str], Any] = {
            (module, name): type(name, (), {}) for module, names in _RECORDS.items() for name in names
        }
        self._known[_META, "TensorProperties"] = type("TensorProperties", (), {"__setstate__": _keep_state})
        functions: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch", "Size"): _size,
            ("torch.serialization", "_get_layout"): str,
            (_META, "_MEM_FORMAT_ENCODING"): lambda number: number,
            ("collections", "OrderedDict"): lambda: {},
        }
        self._known.update(functions)
        for module in ("pathlib", "pathlib._local"):
            for name in ("PosixPath", "WindowsPath", "PurePosixPath"):
                self._known[module, name] = _path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and (dtype := by_torch_name(global_name)) is not None:
            return dtype
        try:
            return self._known[module_name, global_name]
        except KeyError:
            raise _Asked(f"{module_name}.{global_name}") from None

    def persistent_load(self, pid: Any, /) -> Any:
        raise _Asked("an object outside of it")


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    if len(sizes) > _MOST_AXES:
        raise ValueError("too many axes")  # a long list, copied a million times, would fill the memory
    return tuple(sizes)


def _path(*parts: str) -> str:
    if sum(map(len, parts)) > _LONGEST_PATH:
        raise ValueError("too long a path")
    return str(PurePosixPath(*parts))


def _keep_state(self: Any, state: Any) -> None:
    self.state = state


def _checked(metadata: Any, path: Path) -> Saved:
    """The records as data, each number checked."""
    kind = type(metadata).__name__
    entries, places = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if kind != "Metadata" or not isinstance(entries, dict) or not isinstance(places, dict):
        _broken(path, "is not the metadata of a distributed checkpoint")
    if len(entries) > _MOST_KEYS:
        _broken(path, f"holds more than {_MOST_KEYS} entries")
    items = {}
    for index, info in places.items():
        offset = getattr(index, "offset", None)
        items[getattr(index, "fqn", None), None if offset is None else _sizes(offset, path)] = _item(info, path)
    tensors, objects = {}, {}
    for key, entry in entries.items():
        if not isinstance(key, str) or not key or not key.isprintable():
            _broken(path, f"holds an entry with the impossible name {str(key)[:80]!a}")
        if type(entry).__name__ == "BytesStorageMetadata":
            objects[key] = _found(items, key, None, path)
        elif type(entry).__name__ == "TensorStorageMetadata":
            tensors[key] = _stored(key, entry, items, path)
        else:
            _broken(path, f"describes {key[:200]!r} as neither a tensor nor an object")
    return Saved(tensors, objects, _paths(getattr(metadata, "planner_data", None), entries))


def _item(info: Any, path: Path) -> Item:
    file, offset, length = (getattr(info, name, None) for name in ("relative_path", "offset", "length"))
    if getattr(info, "transform_descriptors", None):
        _broken(path, "says that its files are compressed or encrypted", "save it again without extensions")
    plain = isinstance(file, str) and file and PurePath(file).name == file and "\\" not in file and file.isprintable()
    if not plain or not isinstance(file, str):
        _broken(path, f"names {str(file)[:200]!r}, which is not a file beside it")
    if type(offset) is not int or type(length) is not int or not 0 <= offset < 2**62 or not 0 <= length < 2**62:
        _broken(path, f"gives a place in {file!r} that is none")
    return Item(file, offset, length)


def _found(items: Mapping[Any, Item], key: str, offset: tuple[int, ...] | None, path: Path) -> Item:
    item = items.get((key, offset)) or (items.get((key, None)) if not any(offset or ()) else None)
    if item is None:
        _broken(path, f"does not say which file holds {key[:200]!r}" + (f" from {list(offset)} on" if offset else ""))
    return item


def _stored(key: str, entry: Any, items: Mapping[Any, Item], path: Path) -> Stored:
    shape = _sizes(getattr(entry, "size", None), path)
    dtype = next(iter(getattr(getattr(entry, "properties", None), "state", None) or ()), None)
    chunks = getattr(entry, "chunks", None)
    if not isinstance(dtype, str) or not isinstance(chunks, list) or not chunks:
        _broken(path, f"describes the tensor {key[:200]!r} by something else than dtype, size and chunks")
    try:
        item_size(dtype)
    except KeyError:
        _broken(path, f"gives the tensor {key[:200]!r} the unknown dtype {dtype[:40]!r}")
    boxes = []
    for chunk in chunks:
        begin, sizes = (_sizes(getattr(chunk, name, None), path) for name in ("offsets", "sizes"))
        if len(begin) != len(shape) or len(sizes) != len(shape):
            _broken(path, f"gives a chunk of {key[:200]!r} another number of axes than the tensor")
        if math.prod(sizes) or not math.prod(shape):
            boxes.append(Box(begin, sizes, _found(items, key, begin, path)))
    if math.prod(shape) and not cover(shape, [(box.begin, box.sizes) for box in boxes]):
        _broken(path, f"has chunks that lack a part of {key[:200]!r}, or overlap", "copy the files of all processes")
    return Stored(dtype, shape, tuple(boxes))


def _sizes(value: Any, path: Path) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > _MOST_AXES:
        _broken(path, "gives a size that is not a list of natural numbers")
    if not all(type(number) is int and 0 <= number < 2**40 for number in value):
        _broken(path, "gives a size that is not a list of natural numbers")
    return tuple(value)


def _paths(planner: Any, entries: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """How each key was flattened; a key is its own path where nothing is said."""
    said = planner if isinstance(planner, dict) else {}
    result = {}
    for key in entries:
        path = said.get(key)
        known = isinstance(path, tuple | list) and path and all(isinstance(part, str | int) for part in path)
        result[key] = tuple(path) if known and path is not None else (key,)
    return result
