"""Constants that maps read, such as sinusoids of positions: where a larger model has the numbers of a smaller one.

A map may read what the model computes from the width alone. If every column of such a constant is one of the larger
model's too, the map's columns go there, and the others of the larger model are not read yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lemonx.tracing.axes import ATOM, Axis, atoms, find
from lemonx.tracing.compare import Matched
from lemonx.tracing.tracer import Tracer

# Columns are the same if they differ by no more than this, relative to the largest number of both.
_ROUNDING = 1e-12


@dataclass(eq=False)
class _Read:
    """What maps read along one axis: the numbers of both models, a row for every vector."""

    axis: Axis
    small: list[torch.Tensor]
    large: list[torch.Tensor]


def place_constants(found: Matched) -> None:
    """Note for every axis along which maps read nothing but constants where its entries are in the larger model."""
    theirs = _by_module(found.large)
    reads: dict[int, _Read] = {}
    unknown: set[int] = set()
    for path, large in theirs.items():
        origin = found.origin(path, added=False)
        small = _by_module(found.small).get(origin or "", [])
        for (axis, ours), (_, other) in zip(small, large, strict=False):
            atom = find(axis)
            read = reads.setdefault(id(atom), _Read(atom, [], []))
            if len(small) != len(large) or ours.shape[0] != other.shape[0]:
                unknown.add(id(atom))
            read.small.append(ours)
            read.large.append(other)
    written = _written(found.small)
    for key, read in reads.items():
        grows = read.axis.kind == ATOM and found.size(read.axis) > read.axis.size
        if grows and key not in unknown and key not in written and not read.axis.facts.keys() - {"constant"}:
            at = _same_columns(torch.cat(read.small), torch.cat(read.large))
            if at is not None:
                found.placed[key] = at


def _by_module(tracer: Tracer) -> dict[str, list[tuple[Axis, torch.Tensor]]]:
    found: dict[str, list[tuple[Axis, torch.Tensor]]] = {}
    for path, axis, numbers in tracer.constants:
        found.setdefault(path, []).append((axis, numbers))
    return found


def _written(tracer: Tracer) -> set[int]:
    """The atoms that something other than a constant holds: what a weight writes, and what norms and sums see."""
    others = [axis for norm in tracer.norms for axis in (norm.reads, norm.out)]
    others += [axis for pair in tracer.pairs for axis in (pair.first, pair.second)]
    others += [axis for scalar in tracer.scalars for axis in (scalar.reads, scalar.writes)]
    others += [*tracer.ties.values(), *tracer.shown]
    for name, info in tracer.parameters.items():
        roles = [(name, place) in tracer.reads and (name, place) not in tracer.wrote for place in range(len(info.axes))]
        others += [axis for axis, read in zip(info.axes, roles, strict=True) if axis is not None and not read]
    return {id(atom) for axis in others for atom in atoms(axis)}


def _same_columns(small: torch.Tensor, large: torch.Tensor) -> tuple[int, ...] | None:
    """For every column of one matrix the number of the same column of another; None if one has none of its own."""
    limit = _ROUNDING * max(float(small.abs().max()), float(large.abs().max()))
    distance = torch.cdist(small.T.contiguous(), large.T.contiguous(), p=float("inf"))
    nearest, at = distance.min(1)
    chosen = tuple(int(place) for place in at)
    return chosen if float(nearest.max()) <= limit and len(set(chosen)) == len(chosen) else None
