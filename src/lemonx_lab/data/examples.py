"""The base of all data sets: examples by index, randomness as a function of (seed, epoch, index), and the split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.model import Model

Example = Mapping[str, Tensor]
# The validation set draws the same numbers in every run, and a training set draws others.
VALIDATION_STREAM, TRAINING_STREAM = 0, 1
# The share of the data that is held out for validation.
FRACTION = 0.05
# Both sides of the data, in the order in which functions take them.
SIDES = ("training", "validation")


class Data(Strict):
    """A kind of data: its fields are the options, and `prepare` makes the examples."""

    called: ClassVar[str] = "this kind of data"

    @property
    def where(self) -> str:
        """The path of the data, or the name of a kind that has none; for messages."""
        return str(getattr(self, "path", type(self).__name__.lower()))

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        raise NotImplementedError


class Examples(Dataset[Example]):
    """Examples by index; a batch of indices is served at once.

    All randomness in example i comes from its own row of `uniforms`, whenever, wherever and in whichever batch it is
    read. So a resumed run, or a run with more processes, sees the same examples.
    """

    def __init__(self, count: int, seed: int | None = None) -> None:
        """A training set has the run's seed, a validation set none."""
        self._count = count
        self._stream = (VALIDATION_STREAM, 0) if seed is None else (TRAINING_STREAM, seed)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: a training set then draws new random numbers; a validation set stays the same."""
        if self._stream[0] == TRAINING_STREAM:
            self._epoch = epoch

    def uniforms(self, indices: Sequence[int], count: int) -> np.ndarray:
        """The random numbers in [0, 1) of each example: a row of `count` per index."""
        return uniforms((*self._stream, self._epoch), indices, count)

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Example:
        # A sequence ends with an IndexError: without it, `for example in examples` would not end.
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.__getitems__([index % len(self)])[0]


def uniforms(key: Sequence[int], indices: Sequence[int], count: int) -> np.ndarray:
    """Numbers in [0, 1), a row of `count` for each index: a function of (key, index) alone.

    A numpy generator for each example would cost 20 to 50 us, as much as a small model's own step. splitmix64 (Steele,
    Lea, Flood: Fast splittable pseudorandom number generators, 2014) makes all rows at once.

    >>> rows = uniforms((1, 2), range(3), 4)
    >>> bool((uniforms((1, 2), [2], 4) == rows[2]).all())
    True
    """
    start = np.frombuffer(hashlib.sha256(repr(tuple(map(int, key))).encode()).digest()[:8], np.uint64)
    rows = _mix(start + np.asarray(indices, np.uint64) * _GOLDEN)
    values = _mix(rows[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return (values >> np.uint64(11)) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, odd: multiples of it visit every value


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's output function; unsigned arithmetic wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def normals(uniform: np.ndarray) -> np.ndarray:
    """Standard normal numbers from as many in [0, 1), an even number per row, by Box and Muller's formula."""
    radius, angle = np.split(uniform, 2, axis=-1)
    radius, angle = np.sqrt(-2 * np.log1p(-radius)), 2 * np.pi * angle
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)


def stack(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch of examples of one shape."""
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def digest(parts: Iterable[bytes | str | np.ndarray]) -> str:
    """A sha256 of all parts, each with its length, so that different lists of parts have different digests.

    >>> digest(["ab", "c"]) == digest(["a", "bc"])
    False
    """
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            total.update(f"{part.dtype.str}{part.shape}".encode())
            part = np.ascontiguousarray(part).tobytes()
        elif isinstance(part, str):
            part = part.encode(errors="surrogateescape")  # the name of a file may hold any byte
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def held_out(name: str, fraction: float = FRACTION) -> bool:
    """Return True for a share of all names: the items of these names are for validation.

    >>> sum(held_out(f"module_{i}.py") for i in range(2000))
    104
    """
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") < fraction * 2**64


def split(names: Iterable[str], fraction: float = FRACTION) -> tuple[np.ndarray, np.ndarray]:
    """The indices of training and of validation items, by the hash of their names; both can be empty."""
    out = np.array([held_out(name, fraction) for name in names], bool)
    return np.flatnonzero(~out), np.flatnonzero(out)


def spread(count: int, limit: int | None) -> np.ndarray:
    """At most `limit` of `count` indices, evenly spread.

    >>> spread(10, 3).tolist()
    [0, 3, 6]
    """
    limit = min(count, limit or count)
    return np.arange(limit) * count // max(limit, 1)
