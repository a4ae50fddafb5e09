"""The header of a GGUF file: settings by name, and tensors with their type, shape and place, all of them checked.

The readers of other libraries believe every count in a file. This one reads through an open descriptor, within limits,
and every way in which a file can be broken raises BadCheckpoint with one line; only then do others see the file.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from lemonx.checkpoints.creating import write_new
from lemonx.errors import BadCheckpoint
from lemonx.guards.limits import MOST_TENSORS

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Above every real file: a vocabulary of a million words has a few entries for each.
_MOST_SETTINGS, _MOST_ENTRIES, _LONGEST, _MOST_AXES = 10_000, 4_000_000, 1_000_000, 8
# A list as long as a vocabulary is not kept: only how long it is matters here.
_KEPT = 4096

Setting = str | int | float | bool | list["Setting"]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file: its type's number, its shape with the first axis first, and where its bytes begin."""

    name: str
    kind: int
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself; `settings` has the shorter lists only, `lengths` how long each is.

    `places`: the bytes of every setting that is whole, and of the list of tensors.
    """

    size: int
    settings: dict[str, Setting]
    lengths: dict[str, int]
    tensors: tuple[GgufTensor, ...]
    places: tuple[tuple[int, int], ...]


def read_gguf(file: BinaryIO, path: Path) -> GgufHeader:
    """The checked header of an open GGUF file; `path` is for messages."""
    return _Header(file, path).read()


def write_brief(file: BinaryIO, header: GgufHeader, path: Path) -> Path:
    """A GGUF file with the header's tensors and whole settings. Its numbers are a hole, which takes no room."""
    file.seek(0)
    opening = file.read(8)
    parts = [opening, struct.pack("<QQ", len(header.tensors), len(header.places) - 1)]
    for begin, end in header.places:
        file.seek(begin)
        parts.append(file.read(end - begin))
    write_new(path, b"".join(parts))
    os.truncate(path, header.size)
    return path


def check_places(header: GgufHeader, bytes_of: Callable[[GgufTensor], int], path: Path) -> None:
    """BadCheckpoint if a tensor reaches beyond the end of the file, or two of them overlap."""
    end, last = 0, ""
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            _broken(path, f"has tensors that overlap ({last} and {tensor.name})")
        end, last = tensor.begin + bytes_of(tensor), tensor.name
        if end > header.size:
            _broken(path, f"is truncated: {tensor.name} ends at {end}, the file has {header.size} bytes")


class _Header:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self._entries = file, path, 0
        self._size = os.fstat(file.fileno()).st_size

    def read(self) -> GgufHeader:
        if self._bytes(4) != MAGIC:
            _broken(self._path, "is not a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            _broken(self._path, f"is GGUF of version {version}, and only 2 and 3 are read", "convert it again")
        tensors, count = self._number("Q"), self._number("Q")
        if tensors > MOST_TENSORS or count > _MOST_SETTINGS:
            _broken(self._path, f"claims {tensors} tensors and {count} settings, more than any model has")
        settings, lengths = dict[str, Setting](), dict[str, int]()
        places: list[tuple[int, int]] = []
        for _ in range(count):
            begin, name = self._file.tell(), self._name()
            if name in settings:
                _broken(self._path, f"has the setting {name!r} twice")
            settings[name], lengths[name] = self._value(self._number("I"))
            if lengths[name] <= _KEPT:
                places.append((begin, self._file.tell()))
        begin = self._file.tell()
        found = [self._tensor() for _ in range(tensors)]
        if len({tensor.name for tensor in found}) < len(found):
            _broken(self._path, "names two tensors alike")
        places.append((begin, start := self._file.tell()))
        start += -start % self._alignment(settings)
        placed = (GgufTensor(one.name, one.kind, one.shape, start + one.begin) for one in found)
        return GgufHeader(self._size, settings, lengths, tuple(placed), tuple(places))

    def _alignment(self, settings: dict[str, Setting]) -> int:
        found = settings.get("general.alignment", 32)
        if type(found) is not int or found < 1 or found & (found - 1) or found > _LONGEST:
            _broken(self._path, f"has the alignment {str(found)[:40]}")
        return found

    def _tensor(self) -> GgufTensor:
        name, axes = self._name(), self._number("I")
        if not 1 <= axes <= _MOST_AXES:
            _broken(self._path, f"gives {name} {axes} axes")
        shape = tuple(reversed([self._number("Q") for _ in range(axes)]))
        if math.prod(shape) > 1 << 48 or 0 in shape:
            _broken(self._path, f"gives {name} the shape {list(shape)}")
        return GgufTensor(name, self._number("I"), shape, self._number("Q"))

    def _value(self, kind: int) -> tuple[Setting, int]:
        """A setting, and for a list how long it is."""
        if kind != _ARRAY:
            return self._single(kind), 1
        inner, count = self._number("I"), self._number("Q")
        self._entries += count
        if self._entries > _MOST_ENTRIES:
            _broken(self._path, f"has lists of more than {_MOST_ENTRIES} entries")
        kept: list[Setting] = []
        for index in range(count):
            value = self._single(inner)
            if index < _KEPT:
                kept.append(value)
        return kept, count

    def _single(self, kind: int) -> Setting:
        if kind == _STRING:
            return self._text()
        if kind not in _SCALARS:
            _broken(self._path, f"has a setting of the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _name(self) -> str:
        name = self._text()
        if not name or not name.isprintable() or len(name) > 200:
            _broken(self._path, f"holds the impossible name {name[:80]!a}")
        return name

    def _text(self) -> str:
        length = self._number("Q")
        if length > _LONGEST:
            _broken(self._path, f"claims a text of {length} bytes")
        return self._bytes(length).decode(errors="replace")

    def _number(self, letter: str) -> int:
        return struct.unpack(f"<{letter}", self._bytes(struct.calcsize(f"<{letter}")))[0]

    def _bytes(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) < count:
            _broken(self._path, "ends in the middle of its header")
        return found


def _broken(path: Path, found: str, remedy: str = "download it again") -> NoReturn:
    raise BadCheckpoint(found, remedy, file=path)
