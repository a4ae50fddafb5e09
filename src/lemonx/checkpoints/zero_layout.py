"""How DeepSpeed's ZeRO cuts parameters over processes: pure arithmetic, for reading and for writing.

Every process keeps flat vectors. In stage 3 each parameter is cut into as many equal pieces as there are processes, the
last one padded, and a process's pieces of a group lie one behind the other; a group that is too large is several flat
vectors. In stages 1 and 2 a whole group is one vector, padded and then cut into equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]
# How many numbers of a process's pieces begin a new flat vector in stage 3, unless the run says otherwise.
SUB_GROUP = 1_000_000_000
# Stages 1 and 2 pad a group to a multiple of so many numbers for each process.
_ALIGN = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """Numbers `start` to `start + count` of a parameter lie in a flat vector of a process, from `at` on."""

    process: int
    flat: int
    at: int
    start: int
    count: int


@dataclass(frozen=True)
class Cuts:
    """Where all parameters of all groups lie.

    `sizes`: the length of each flat vector, with its padding, which is the same in all processes. `groups`: the group
    of each flat vector. `unpadded`: the length of each without padding, by process.
    """

    parameters: Mapping[str, Sequence[Cut]]
    sizes: Sequence[int]
    groups: Sequence[int]
    unpadded: Sequence[Sequence[int]]


def each_cut(groups: Sequence[Shapes], processes: int, most: int) -> Cuts:
    """Stage 3: every parameter in equal pieces; a flat vector ends when it has `most` numbers or more."""
    found: dict[str, list[Cut]] = {}
    sizes, owners = list[int](), list[int]()
    for number, group in enumerate(groups):
        pieces = {name: -(-math.prod(shape) // processes) for name, shape in group.items()}
        limit, at = most if sum(pieces.values()) > most else math.inf, 0
        for name, piece in pieces.items():
            total, flat = math.prod(group[name]), len(sizes)
            starts = [(process, process * piece) for process in range(processes) if process * piece < total]
            found[name] = [Cut(process, flat, at, start, min(piece, total - start)) for process, start in starts]
            at += piece
            if at >= limit:
                sizes.append(at)
                owners.append(number)
                at = 0
        if at or not group:
            sizes.append(at)
            owners.append(number)
    return Cuts(found, sizes, owners, [sizes] * processes)


def one_vector(
    groups: Sequence[Shapes], processes: int, sizes: Sequence[int] | None = None, gaps: object = None
) -> Cuts:
    """Stages 1 and 2: a group as one vector.

    `sizes`: of each process's part, if they are known. `gaps`: numbers that are left out behind each parameter.
    """
    found: dict[str, list[Cut]] = {}
    made, unpadded = list[int](), list[list[int]]([[] for _ in range(processes)])
    for flat, group in enumerate(groups):
        behind = gaps[flat] if isinstance(gaps, list) else [0] * len(group)
        total = sum(map(math.prod, group.values())) + sum(behind)
        step = _ALIGN * processes
        size = -(-total // step) * step // processes if sizes is None else sizes[flat]
        made.append(size)
        # Only the last process says that it is padded.
        for process in range(processes):
            last = process == processes - 1
            unpadded[process].append(max(0, size - (size * processes - total)) if last else size)
        at = 0
        for (name, shape), gap in zip(group.items(), behind, strict=True):
            count, found[name] = math.prod(shape), []
            for process in range(at // size, -(-(at + count) // size)) if size else ():
                low, high = max(at, process * size), min(at + count, (process + 1) * size)
                if low < high:
                    found[name].append(Cut(process, flat, low - process * size, low - at, high - low))
            at += count + gap
    return Cuts(found, made, range(len(groups)), unpadded)
