"""What one of many processes holds of a model's tensors, whatever their placement, and the sink that fills it.

A DTensor may be cut along any axes, over meshes of any number of dimensions. What a process holds of it is then the
product of some indices along each axis, which torch itself tells. Tensors of a file may be boxes of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lemonx.checkpoints.chunks import Part
from lemonx.errors import BadTarget, Refused


@dataclass(frozen=True)
class Piece:
    """A box of a file's tensor, as a range per axis, and the memory in this process that holds it."""

    box: tuple[range, ...]
    local: torch.Tensor


@dataclass(frozen=True)
class Held:
    """What this process holds of a tensor of the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> range:
        """The rows of the first axis that are wanted; a tensor without axes has one."""
        if not self.shape:
            return range(len(self.pieces))
        return _hull(piece.box[0] for piece in self.pieces)

    @property
    def columns(self) -> range:
        """The same of the last axis."""
        return _hull(piece.box[-1] for piece in self.pieces) if self.shape else range(1)


def _hull(ranges: Iterator[range]) -> range:
    found = list(ranges)
    return range(min(r.start for r in found), max(r.stop for r in found)) if found else range(0)


@dataclass(frozen=True)
class HeldSink:
    """Takes rows of whole tensors and keeps what this process holds of them."""

    held: Mapping[str, Held]

    @classmethod
    def whole(cls, tensors: Mapping[str, torch.Tensor]) -> HeldSink:
        """A sink that fills these tensors, which nobody shares."""
        boxes = {name: tuple(map(range, tensor.shape)) for name, tensor in tensors.items()}
        return cls({n: Held(tuple(t.shape), t.dtype, (Piece(boxes[n], t),)) for n, t in tensors.items()})

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        held = self.held[name]
        if not held.shape:
            for piece in held.pieces:
                piece.local.copy_(values.reshape(()))
            return
        given = [range(size) for size in held.shape]
        given[0] = range(start, start + len(values))
        if len(held.shape) > 1:
            given[-1] = range(column, column + values.shape[-1])
        for piece in held.pieces:
            both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(given, piece.box, strict=True)]
            if all(both):
                there = tuple(slice(b.start - p.start, b.stop - p.start) for b, p in zip(both, piece.box, strict=True))
                here = tuple(slice(b.start - g.start, b.stop - g.start) for b, g in zip(both, given, strict=True))
                piece.local[there].copy_(values[here])


def held_of(name: str, part: Part, tensor: torch.Tensor) -> Held:
    """What this process holds of a tensor of the files, which is a part of a parameter."""
    if tensor.is_meta:
        raise BadTarget(f"{name} is on the meta device", "call model.to_empty(device=...) first")
    shape = tuple(part.sizes[axis] for axis in part.axes)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    ways = [_inside(runs, part.begin[axis], part.sizes[axis]) for axis, runs in enumerate(indices(name, tensor))]
    pieces = []
    for way in product(*ways):
        at = tuple(slice(low, low + count) if axis in part.axes else low for axis, (_, low, count) in enumerate(way))
        box = tuple(range(way[axis][0], way[axis][0] + way[axis][2]) for axis in part.axes)
        pieces.append(Piece(box, local[at]))
    return Held(shape, tensor.dtype, tuple(pieces))


def _inside(runs: Sequence[tuple[int, int, int]], begin: int, size: int) -> list[tuple[int, int, int]]:
    """Of runs (of the parameter, of what is held, how many), what lies in a box, counted from where the box begins."""
    found = []
    for place, own, count in runs:
        low, high = max(place, begin), min(place + count, begin + size)
        if low < high:
            found.append((low - begin, own + low - place, high - low))
    return found


def indices(name: str, tensor: torch.Tensor) -> list[list[tuple[int, int, int]]]:
    """For each axis, which of its indices this process holds, as runs: (in the tensor, in what is held, how many)."""
    axes = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return [[] for _ in axes]
        for place, placement in enumerate(tensor.placements):
            # Exact types: a subclass cuts in a way of its own.
            if isinstance(placement, Shard | _StridedShard) and type(placement) in (Shard, _StridedShard):
                axis, count = placement.dim, tensor.device_mesh.size(place)
                spread = axes[axis].reshape([-1 if a == axis else 1 for a in range(tensor.ndim)])
                cuts, _ = placement._split_tensor(spread, count, with_padding=False, contiguous=False)
                axes[axis] = cuts[coordinate[place]].flatten()
            elif type(placement) is not Replicate:
                raise Refused(
                    f"{name} is placed as {list(tensor.placements)}, and lemonx fills what is cut or copied",
                    "place it with Shard and Replicate",
                )
    return [_runs(axis) for axis in axes]


def _runs(axis: torch.Tensor) -> list[tuple[int, int, int]]:
    """Indices as stretches of consecutive ones."""
    if not len(axis):
        return []
    ends = [0, *(1 + torch.nonzero(axis.diff() != 1).flatten()).tolist(), len(axis)]
    return [(int(axis[low]), low, high - low) for low, high in pairwise(ends)]
