"""Tensors that lie in pieces: which bytes of which files hold a stretch of a tensor, whatever its pieces look like.

A piece is a box of the tensor. Its numbers lie in a file with any strides, so a box of a larger tensor (an expert of a
fused weight, the queries of a fused QKV) is a piece like any other. Reading and writing use the same arithmetic.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx.checkpoints.safetensors_file import TensorInfo

if TYPE_CHECKING:
    import torch

# Buffers of one system call: the least that every system allows is 16, Linux allows 1024.
_MOST_BUFFERS = 512


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, from `at` on and of `sizes`, and where its numbers lie: from `begin` on, with `strides`.

    `begin` and `strides` count elements, `begin` from the first number of `item`. What is an item, and its shape, is
    up to the kind of file.
    """

    file: Path
    at: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int = 0
    item: tuple[int, int] = (0, 0)
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that is itself a box of the stored tensor `key`: every `steps`-th entry from `begin` on.

    `sizes`, `steps` and `begin` are per axis of the stored tensor, `at` per axis of the tensor, which has the stored
    axes `axes`; the others have size 1 in the box.
    """

    key: str
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    at: tuple[int, ...]
    axes: tuple[int, ...]


# By name of a tensor, what it is made of.
Views = Mapping[str, tuple[Part, ...]]


@dataclass(frozen=True, slots=True)
class InChunks(TensorInfo):
    """A tensor that lies in chunks."""

    chunks: tuple[Chunk, ...] = ()


def whole(key: str, shape: Sequence[int]) -> tuple[Part, ...]:
    """A tensor that is a stored tensor."""
    zeros = (0,) * len(shape)
    return (Part(key, zeros, tuple(shape), (1,) * len(shape), zeros, tuple(range(len(shape)))),)


def shape_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """The shape of the tensor that is made of these."""
    axes = range(len(parts[0].at))
    return tuple(max(part.at[axis] + part.sizes[part.axes[axis]] for part in parts) for axis in axes)


def stored_shapes(views: Views) -> dict[str, tuple[int, ...]]:
    """The shapes of the stored tensors that these boxes make up."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for parts in views.values() for part in parts):
        ends = tuple(b + (n - 1) * s + 1 for b, n, s in zip(part.begin, part.sizes, part.steps, strict=True))
        shapes[part.key] = tuple(map(max, shapes.get(part.key, ends), ends))
    return shapes


def in_keys(views: Views, keys: Mapping[str, str]) -> dict[str, tuple[Part, ...]]:
    """The same boxes of tensors that have other keys."""
    return {name: tuple(replace(part, key=keys[part.key]) for part in parts) for name, parts in views.items()}


def seen_as(parts: Sequence[Part], stored: Mapping[str, Sequence[Chunk]]) -> tuple[Chunk, ...]:
    """The chunks of a tensor, from those of the stored tensors that it is made of."""
    seen = (seen_through(part, chunk) for part in parts for chunk in stored[part.key])
    return tuple(chunk for chunk in seen if chunk is not None)


def taken(parts: Sequence[Part], stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that is made of these boxes of tensors in memory."""
    made = stored[parts[0].key].new_empty(shape_of(parts))
    for part in parts:
        here, there = _slices(part)
        made[here] = stored[part.key][there].reshape(made[here].shape)
    return made


def put(parts: Sequence[Part], tensor: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> None:
    """Write a tensor into the boxes that it is made of."""
    for part in parts:
        here, there = _slices(part)
        stored[part.key][there] = tensor[here].reshape(stored[part.key][there].shape)


def _slices(part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a box lies in the tensor, and in the stored one."""
    here = tuple(slice(at, at + part.sizes[axis]) for at, axis in zip(part.at, part.axes, strict=True))
    there = zip(part.begin, part.sizes, part.steps, strict=True)
    return here, tuple(slice(begin, begin + (size - 1) * step + 1, step) for begin, size, step in there)


def contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a box that lies in one piece.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def seen_through(part: Part, stored: Chunk) -> Chunk | None:
    """The chunk of a tensor that lies in a chunk of the stored tensor; None where they do not meet."""
    at, sizes, strides, begin = [], [], [], stored.begin
    for axis in range(len(stored.at)):
        step, low, high = part.steps[axis], stored.at[axis], stored.at[axis] + stored.sizes[axis]
        first = max(0, -(-(low - part.begin[axis]) // step))
        stop = min(part.sizes[axis], -(-(high - part.begin[axis]) // step))
        if first >= stop:
            return None
        begin += (part.begin[axis] + first * step - low) * stored.strides[axis]
        if axis in part.axes:
            at.append(part.at[part.axes.index(axis)] + first)
            sizes.append(stop - first)
            strides.append(stored.strides[axis] * step)
    return Chunk(stored.file, tuple(at), tuple(sizes), tuple(strides), begin, stored.item, stored.shape)


def cover(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (begin, sizes) make up all of a tensor, each number once.

    >>> cover((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]), cover((4,), [((0,), (3,))])
    (True, False)
    """
    import numpy as np

    boxes = [box for box in boxes if math.prod(box[1])]
    inside = all(b + n <= size for begin, sizes in boxes for b, n, size in zip(begin, sizes, shape, strict=True))
    if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    cuts = [
        sorted({0, size, *(b[axis] for b, _ in boxes), *(b[axis] + n[axis] for b, n in boxes)})
        for axis, size in enumerate(shape)
    ]
    if math.prod(map(len, cuts)) > 1 << 24:
        return False
    cells = np.zeros([max(1, len(cut) - 1) for cut in cuts], np.int32)
    places = [{position: index for index, position in enumerate(cut)} for cut in cuts]
    for begin, sizes in boxes:
        here = zip(places, begin, sizes, strict=True)
        cells[tuple(slice(place[b], place[b + n]) for place, b, n in here)] += 1
    return bool((cells == 1).all()) or not math.prod(shape)


def runs(chunk: Chunk, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """What a chunk holds of the tensor's elements `start` to `stop`, in order: (in the tensor, in the file, how many).

    >>> list(runs(Chunk(Path(), (0, 2), (2, 2), (2, 1)), (2, 4), 0, 8))
    [(2, 0, 2), (6, 2, 2)]
    """
    own, inner = contiguous(shape), len(shape)
    length = 1
    # The last axes, as long as they lie in one piece both here and there.
    while inner and chunk.strides[inner - 1] == own[inner - 1] == length:
        inner -= 1
        length *= chunk.sizes[inner]
        if chunk.sizes[inner] != shape[inner]:
            break
    if inner and length == own[inner - 1] and chunk.sizes[inner - 1] == 1:
        inner -= 1
    outer = [range(size) for size in chunk.sizes[:inner]]
    if outer:  # of the first axis, only what can meet the stretch
        low, high = start // own[0] - chunk.at[0], -(-stop // own[0]) - chunk.at[0]
        outer[0] = outer[0][max(0, low) : max(0, high)]
    base = sum(a * stride for a, stride in zip(chunk.at, own, strict=True))
    for index in product(*outer):
        place = base + sum(i * stride for i, stride in zip(index, own, strict=False))
        low, high = max(place, start), min(place + length, stop)
        if low < high:
            inside = chunk.begin + sum(i * stride for i, stride in zip(index, chunk.strides, strict=False))
            yield low, inside + low - place, high - low


def span(chunk: Chunk, shape: Sequence[int]) -> tuple[int, int]:
    """The first of the tensor's elements that a chunk holds, and the one behind its last."""
    own = contiguous(shape)
    first = sum(a * stride for a, stride in zip(chunk.at, own, strict=True))
    return first, 1 + first + sum((n - 1) * stride for n, stride in zip(chunk.sizes, own, strict=True))


def joined(found: Iterator[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Runs in groups that lie one behind the other in their file, so that one system call moves each group."""
    group: list[tuple[int, int, int]] = []
    for run in found:
        if group and (run[1] != group[-1][1] + group[-1][2] or len(group) == _MOST_BUFFERS):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def write_through(fd: int, offset: int, buffers: list[memoryview]) -> None:
    """Write buffers one behind the other."""
    done = os.pwritev(fd, buffers, offset)
    ends = [0]
    for buffer in buffers:
        ends.append(ends[-1] + len(buffer))
    for buffer, (begin, end) in zip(buffers, pairwise(ends), strict=True):
        while done < end:  # one call writes at most 2 GiB
            done += os.pwrite(fd, buffer[done - begin :], offset + done)
