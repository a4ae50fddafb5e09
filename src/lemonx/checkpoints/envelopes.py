"""Files as torch.save writes them, without their numbers: what stands around these, and where they go.

torch leaves the place of the numbers empty if it is asked to (`skip_data`); they are written there later, in any order.
"""

from __future__ import annotations

import bisect
import copyreg
import io
import os
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from lemonx.checkpoints.archives import contents


@dataclass(frozen=True)
class Envelope:
    """A saved object without the numbers of its tensors: pieces and their places, and its length."""

    pieces: tuple[tuple[int, bytes], ...]
    length: int

    def tree(self) -> Any:
        """Return the object as a reader of the finished file will find it: tensors as the places of their numbers."""
        return contents(_Pieces(self))


class Record:
    """An object of a library that is not needed here, as the name of its class and what it is made of.

    `given`: what its class was called with; None if it was made without a call, and `state` set afterwards.
    """

    module, name = "", ""
    given: tuple[Any, ...] | None = None
    state: Any = None

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:  # a pickle may set this, and nothing else
        self.state = state


def record_class(module: str, name: str) -> type[Record]:
    """A class that stands for the one of this name."""
    return type(name, (Record,), {"module": module, "name": name})


def envelope(content: Any) -> Envelope:
    """What torch.save writes of an object, but for the numbers of its tensors."""
    import torch

    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(content, cast("BinaryIO", recorder), pickle_module=_MODULE)
    joined: list[tuple[int, bytearray]] = []
    for place, raw in recorder.pieces:
        if joined and joined[-1][0] + len(joined[-1][1]) == place:
            joined[-1][1].extend(raw)
        else:
            joined.append((place, bytearray(raw)))
    return Envelope(tuple((place, bytes(raw)) for place, raw in joined), recorder.position)


def saved(content: Any) -> bytes:
    """Return what torch.save writes of an object."""
    import torch

    file = io.BytesIO()
    torch.save(content, file, pickle_module=_MODULE)
    return file.getvalue()


# The one that is written in Python, since only that lets a class be written down by a name that leads nowhere here.
_Python: Any = pickle._Pickler  # pyright: ignore


class _Pickler(_Python):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Record):
            return NotImplemented
        if obj.given is not None:
            return type(obj), obj.given, obj.state
        return copyreg.__newobj__, (type(obj),), obj.state  # pyright: ignore[reportAttributeAccessIssue]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, Record):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


_MODULE = SimpleNamespace(__name__=__name__, Pickler=_Pickler)


class _Recorder(io.RawIOBase):
    """A file that keeps what is written, and where; numbers are skipped by a seek."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, raw: Any, /) -> int:
        self.pieces.append((self.position, bytes(raw)))
        self.position += len(raw)
        return len(raw)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self.position = offset + (self.position if whence == os.SEEK_CUR else 0)
        return self.position

    def tell(self) -> int:
        return self.position


class _Pieces(io.RawIOBase):
    """An envelope as a file to read, with zeros for numbers."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope, self._at = envelope, 0
        self._begins = [place for place, _ in envelope.pieces]

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._envelope.length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._envelope.length - self._at)
        stop = self._at + (left if size < 0 else min(size, left))
        raw = bytearray(stop - self._at)
        for place, piece in self._envelope.pieces[max(0, bisect.bisect(self._begins, self._at) - 1) :]:
            if place >= stop:
                break
            low, high = max(place, self._at), min(place + len(piece), stop)
            if low < high:
                raw[low - self._at : high - self._at] = piece[low - place : high - place]
        self._at = stop
        return bytes(raw)
