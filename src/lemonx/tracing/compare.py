"""Two runs of one class at two sizes: which axis of the one is which of the other, and what else differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from lemonx.errors import Refused
from lemonx.specs.spec import Block
from lemonx.tracing.axes import ATOM, DATA, Axis, Misfit, find, leaves, say, unify
from lemonx.tracing.blocks import (
    ONE_MODEL,
    SMALL,
    Alike,
    close,
    origin_of,
    starred,
    to_stack,
)
from lemonx.tracing.operations import Call, Scalar
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Norm, shape_of

# Operations whose one number a weight in front of them can take up.
FACTORS = frozenset(("mul", "div"))


@dataclass
class Matched:
    """Two runs and the stacks that are deeper in the second; `sizes`: each atom of the first in the second.

    `placed`: where the second has the entries of an atom along which maps read constants.
    """

    small: Tracer
    large: Tracer
    stacks: dict[str, Alike]
    sizes: dict[int, int] = field(default_factory=dict)
    placed: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def blocks(self) -> dict[str, tuple[Block, ...]]:
        """The blocks of the larger model, as they are arranged: which comes from which, and which are added."""
        return {name: alike.blocks(name) for name, alike in self.stacks.items()}

    def starred(self, name: str) -> str:
        """A name in the smaller model by its stack, with `*` for the number of its block unless that is pinned."""
        return self.numbered(name)[0]

    def numbered(self, name: str, side: int = SMALL) -> tuple[str, str]:
        """The same, and that number."""
        pinned = {stack: alike.pinned for stack, alike in self.stacks.items()}
        return starred(to_stack(name, self.stacks, side), pinned)

    def origin(self, name: str, *, added: bool = True) -> str | None:
        """What a parameter or module of the larger model is in the smaller one; None for one in an added block."""
        return origin_of(name, self.stacks, added=added)

    def size(self, axis: Axis) -> int:
        """The size of an atom in the larger model."""
        return self.sizes.get(id(find(axis)), find(axis).size)


def match(found: Matched) -> Matched:
    """What of two runs belongs together; Refused where they are not the same but for sizes."""
    for tracer in (found.small, found.large):
        for problem in tracer.problems:
            raise Refused(problem, "write a table for it (docs/add-an-architecture.md)")
    for side, tracer in enumerate((found.small, found.large)):
        for stack in found.stacks:
            _unify_blocks(found, tracer, side, stack)
        _unify_shared(tracer)
    _align_all(found)
    return found


def _unify_blocks(found: Matched, tracer: Tracer, side: int, stack: str) -> None:
    """Blocks that are alike are described once: what is in one is what is in the others."""
    here = f"{stack}.*"
    first: dict[str, list[Axis | None]] = {}
    for name, info in tracer.parameters.items():
        general, number = found.numbered(name, side)
        if number and general.startswith(here):
            _unify_all(first.setdefault(general, info.axes), info.axes, name)
    norms: dict[tuple[str, int], Norm] = {}
    count: dict[str, int] = {}
    for norm in tracer.norms:
        general, number = found.numbered(norm.path, side)
        if number and general.startswith(here):
            count[norm.path] = count.get(norm.path, 0) + 1
            other = norms.setdefault((general, count[norm.path]), norm)
            _unify_all([other.reads, other.out], [norm.reads, norm.out], norm.path)
    _unify_streams(found, tracer, side, stack)
    _unify_chains([norm for norm in tracer.norms if found.numbered(norm.path, side)[0].startswith(f"{stack}.")])


def _unify_streams(found: Matched, tracer: Tracer, side: int, stack: str) -> None:
    """What a block is given and what it gives in its place is one stream, also where a norm stands between."""
    for run in tracer.blocks:
        if found.numbered(run.path, side)[0] == f"{stack}.*" and run.given and run.made:
            one, two = run.given[0].axes, run.made[0].axes
            if shape_of(run.given[0]) == shape_of(run.made[0]):
                for a, b in zip(one, two, strict=True):
                    with contextlib.suppress(Misfit):
                        tracer.unified(a, b)


def _unify_chains(norms: list[Norm]) -> None:
    """Norms that lead from a stream back into it stand in the stream: all they pass is the stream."""
    for norm in norms:
        reached, size = {id(find(norm.out))}, 0
        while len(reached) > size:
            size = len(reached)
            reached |= {id(find(other.out)) for other in norms if id(find(other.reads)) in reached}
        if id(find(norm.reads)) in reached:
            _unify_all([norm.reads], [norm.out], norm.path)


def _unify_shared(tracer: Tracer) -> None:
    """A norm's gain that several norms have reads and writes one space in all of them."""
    first: dict[str, Norm] = {}
    for norm in tracer.norms:
        if norm.gain is not None:
            other = first.setdefault(norm.gain, norm)
            _unify_all([other.reads, other.out], [norm.reads, norm.out], norm.path)
            if (other.kind, other.eps, other.offset, other.bias) != (norm.kind, norm.eps, norm.offset, norm.bias):
                say(norm.reads, "fixed", f"{norm.place}: norms that are not alike share a gain")


def _unify_all(mine: list[Axis | None], other: list[Axis | None], name: str) -> None:
    for a, b in zip(mine, other, strict=True):
        if a is not None and b is not None:
            try:
                unify(a, b)
            except Misfit as misfit:
                raise Refused(f"{name} is used in two ways, which want {misfit}", "keep the depth") from None


def _align_all(found: Matched) -> None:
    """Find the size in the larger model of every atom of the smaller."""
    small, large = found.small, found.large
    for name, info in large.parameters.items():
        origin = found.origin(name)
        mine = small.parameters.get(origin or "")
        if mine is None:
            raise Refused(f"{name} is a parameter of the larger model alone", ONE_MODEL)
        for place, (a, b) in enumerate(zip(mine.axes, info.axes, strict=True)):
            _align(found, a, b, f"{name}, axis {place}")
    for name, axis in large.ties.items():
        if name not in small.ties:
            raise Refused(f"{name} is a decoder too in the larger model alone", ONE_MODEL)
        _align(found, small.ties[name], axis, name)
    for place, norm in enumerate(large.norms):
        if norm.gain is None and found.origin(norm.path, added=False) is not None:
            mine = _same_norm(found, norm, place)
            _align(found, mine.reads, norm.reads, norm.path)
            _align(found, mine.out, norm.out, norm.path)
    for one, two in both_scalars(found):
        _align(found, one.reads, two.reads, one.place)
        _align(found, one.writes, two.writes, one.place)


def both_scalars(found: Matched) -> Iterator[tuple[Scalar, Scalar]]:
    """Every multiplication of the smaller model by a number that the sizes decide, with that of the larger."""
    mine: dict[str, list[Scalar]] = {}
    for scalar in found.small.scalars:
        mine.setdefault(scalar.path, []).append(scalar)
    paths = {scalar.path for scalar in found.large.scalars}
    for path in sorted(paths):
        if (origin := found.origin(path, added=False)) is not None:
            other = [scalar for scalar in found.large.scalars if scalar.path == path]
            if len(other) != len(mine.get(origin, [])):
                raise Refused(f"{other[0].place}, and the smaller model has not as many of them", ONE_MODEL)
            yield from zip(mine[origin], other, strict=True)


def _same_norm(found: Matched, norm: Norm, place: int) -> Norm:
    """A norm without parameters is known by its module and its number there."""
    before = sum(other.path == norm.path for other in found.large.norms[:place])
    mine = [other for other in found.small.norms if other.path == found.origin(norm.path)]
    if before >= len(mine):
        raise Refused(f"{norm.place}: the smaller model has no such norm", ONE_MODEL)
    return mine[before]


def _align(found: Matched, first: Axis | None, second: Axis | None, where: str) -> None:
    """Pair the atoms of two structures; what is said of either is said of both."""
    if first is None and second is None:
        return
    if first is None or second is None:
        raise Refused(f"{where}: an axis of one entry cannot grow, nor an axis become one", "give larger sizes")
    a, b = find(first), find(second)
    if a.kind != b.kind:
        raise _split_otherwise(where, a, b)
    if a.kind == DATA:
        if a.size != b.size:
            raise Refused(f"{where}: {a.size} entries of it belong to the inputs, and would be {b.size}", "keep them")
        return
    for fact, why in b.facts.items():
        say(a, fact, why)
    if a.kind == ATOM:
        if found.sizes.setdefault(id(a), b.size) != b.size:
            raise Refused(
                f"{where}: what is one size in the smaller model is {found.sizes[id(a)]} and {b.size} in the larger",
                "give both the same size",
            )
        return
    mine, other = leaves(a, a.kind), leaves(b, b.kind)
    if len(mine) != len(other):
        raise _split_otherwise(where, a, b)
    for x, y in zip(mine, other, strict=True):
        _align(found, x, y, where)


def _split_otherwise(where: str, small: Axis, large: Axis) -> Refused:
    """Refused: a factor of one entry in either model is none, say."""
    return Refused(
        f"{where}: its entries are {small!r} in the smaller model and {large!r} in the larger, which divides them up "
        "in another way",
        ONE_MODEL,
    )


def differing(found: Matched) -> frozenset[tuple[str, int]]:
    """The multiplications, by module and number, whose numbers the sizes decide; Refused for any other difference."""
    result = set()
    for path, place, mine, other in _calls(found):
        if mine.op != other.op:
            raise Refused(
                f"{path or 'the model'}: its operation {place} is {mine.op} in the smaller model and {other.op} in the "
                "larger",
                ONE_MODEL,
            )
        equal = len(mine.numbers) == len(other.numbers) and all(map(close, mine.numbers, other.numbers))
        if not equal and mine.op in FACTORS and len(mine.numbers) == 1 == len(other.numbers):
            result.add((path, place))
        elif not equal:
            raise Refused(
                f"{path or 'the model'}, {mine.op}: its numbers are {mine.numbers} in the smaller model and "
                f"{other.numbers} in the larger",
                "the sizes must not change them",
            )
        for one, two in zip(mine.constants, other.constants, strict=False):
            if one.shape == two.shape and one.is_another(two):
                raise Refused(
                    f"{path or 'the model'}, {mine.op}: a constant has other numbers in the larger model", ONE_MODEL
                )
    return frozenset(result)


def _calls(found: Matched) -> Iterator[tuple[str, int, Call, Call]]:
    """Every call of the smaller model with the one that the larger has in its place."""
    for path, calls in found.large.calls.items():
        origin = found.origin(path, added=False)
        if origin is None:
            continue
        mine = found.small.calls.get(origin, [])
        if len(mine) != len(calls):
            raise Refused(
                f"{path or 'the model'} runs {len(mine)} operations in the smaller model and {len(calls)} in the "
                "larger",
                "what is run for every block of a list, such as adding it to the stream, must be in its own forward",
            )
        for place, (one, two) in enumerate(zip(mine, calls, strict=True)):
            yield origin, place, one, two
