"""Which spaces are framed, and by what: where LayerNorms feed a stream that LayerNorms read, at an indivisible width.

The table's order is the order of computation: what a row reads was written by the nearest norm above it.

Pre-LN with a norm on the embeddings: that norm decides A; every block adds A x; every other norm reads it and gets
even gains, its own being taken over by what reads it. Post-LN: the last norm of every block decides an A of its
own; the first norm of the next block reads it; and the MLP between the two, which must turn the one into the other,
passes the stream through pairs of spare neurons, act(a) - act(-a) = a. Inside a group of added blocks, where norms
have no affine part, the stream is one frame throughout. Where linear maps alone write a space, and
means in it would not do, any A does: a norm over several vectors in a row, `(4 stage)`, reads it, since mean and
variance stay in each of them; and lengths and angles are kept, because A^T A is a multiple of I. Not in the paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lemonx.algebra.expansions import DENSE, SPARE, Expansion, expansion, multiples_near
from lemonx.errors import Refused
from lemonx.frames.construction import group_sizes
from lemonx.specs.config import TIED
from lemonx.specs.norms import LayerNorm, UnitLength
from lemonx.specs.rows import Row
from lemonx.specs.signature import Side
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Linear


@dataclass(frozen=True)
class FramePlacement:
    """A space that frames carry: `entry` feeds it first (if a norm does), `first` and `last` are a Post-LN block's.

    `stack`: the blocks that add to it, if it is a stream. `angles`: what divides it by its length. `up` and `down`: the
    rows of the MLP whose spare neurons pass the stream through, `hidden` their space.
    """

    spec: Spec
    stream: str
    stack: str | None
    size: int
    target: int
    entry: str | None
    readers: tuple[str, ...] = ()
    angles: tuple[str, ...] = ()
    first: str | None = None
    last: str | None = None
    up: str | None = None
    down: str | None = None
    hidden: str | None = None

    @property
    def spaces(self) -> frozenset[str]:
        """Every space that a frame carries."""
        rows = self.spec.rows
        written = {rows[name].writes.axes[-1] for name in self.readers}
        read = {rows[self.entry].reads.axes[0]} if self.entry else set[str]()
        return frozenset({self.stream, *written, *read})

    @property
    def norms(self) -> frozenset[str]:
        return frozenset(name for name in (self.entry, self.first, self.last, *self.readers) if name)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The sizes of its blocks; Refused if there are none that norms can feed."""
        return group_sizes(self.size, self.target, fed=bool(self.entry or self.last))

    @property
    def sets(self) -> int:
        """How many sets of weights its blocks have."""
        return self.spec.stacks[self.stack].stored if self.stack else 0

    @property
    def ends(self) -> bool:
        """No row makes the stream of other blocks of it, so what a model without a head gives out may be in it."""
        others = {stack.stream for stack in self.spec.stacks.values()} - self.spaces
        after = [row for row in self.spec.rows.values() if not self.spaces.isdisjoint(row.reads.axes)]
        return others.isdisjoint(axis for row in after for axis in row.writes.axes)

    @property
    def shown(self) -> tuple[str, ...]:
        """Norms of it whose output no row reads: a backbone gives that out, also where the stream goes on."""
        read = {axis for row in self.spec.rows.values() for axis in row.reads.axes}
        return tuple(name for name in self.readers if read.isdisjoint(self.spec.rows[name].writes.axes))

    @property
    def is_given_out(self) -> bool:
        """A model without a head gives out what a frame carries."""
        return self.ends or bool(self.shown)

    def expansions(self, target: Spec) -> dict[str, Expansion]:
        """The types of these spaces, without values: all that can be known before a gain is read."""
        dense = Expansion(self.size, np.full(self.target, DENSE), np.ones(self.target))
        found = dict.fromkeys(self.spaces, dense)
        if self.hidden:
            size, wide = self.spec.spaces[self.hidden].size, target.spaces[self.hidden].size
            copies = expansion("circ", size, wide - 2 * self.size)
            source = np.append(copies.source, np.full(2 * self.size, SPARE))
            found[self.hidden] = Expansion(size, source, np.ones(wide))
        return found


def find(source: Spec, target: Spec, rows: Collection[str], refusing: Collection[str]) -> tuple[FramePlacement, ...]:
    """The spaces that only frames can carry to this width, since these rows refuse what else there is; () if none can.

    Raises Refused where what would be in the way is known.
    """
    wanted = [axis for name in source.rows if name in refusing for axis in _in_the_way(source, source.rows[name])]
    found = list[FramePlacement]()
    for stream in dict.fromkeys(wanted):
        size, wide = source.spaces[stream].size, target.spaces[stream].size
        framed = _found(source, stream, rows, size, wide) if wide % size else None
        if framed is None:
            return ()
        _require(framed, source, target, rows)
        _ = framed.groups
        found.append(framed)
    norms = Counter(name for framed in found for name in framed.norms)
    return tuple(found) if max(norms.values(), default=0) == 1 else ()


def _in_the_way(source: Spec, row: Row) -> Iterator[str]:
    """The space that, in a frame instead of means, this row could follow: the stream it feeds, or what it reads."""
    streams = {stack.stream for stack in source.stacks.values()}
    axis = None
    if isinstance(row, LayerNorm) and not row.writes.is_fused and row.writes.axes[0] in streams:
        axis = row.writes.axes[0]
    elif isinstance(row, UnitLength) or (isinstance(row, LayerNorm) and row.reads.is_fused):
        axis = _of(row.reads)
    if axis is not None and axis in source.spaces and source.spaces[axis].kind == "avg":
        yield axis


def _found(source: Spec, stream: str, rows: Collection[str], size: int, wide: int) -> FramePlacement | None:
    stacks = [name for name, stack in source.stacks.items() if stack.stream == stream]
    norms = [n for n in source.rows if n in rows and isinstance(source.rows[n], LayerNorm)]
    fed = [n for n in norms if stream in source.rows[n].writes.axes]
    for stack in stacks:
        _require_turns(source, stream, [n for n in fed if source.stack_of(n) == stack], multiples_near(size, wide))
    stack = stacks[0] if stacks else None
    inside = [n for n in fed if stack and source.stack_of(n) == stack]
    outside = [n for n in fed if n not in inside]
    readers = tuple(n for n in norms if _of(source.rows[n].reads) == stream and n not in fed)
    angles = tuple(n for n in rows if isinstance(source.rows[n], UnitLength) and _of(source.rows[n].reads) == stream)
    entry = outside[0] if outside else None
    if len(outside) > 1 or len(inside) not in (0, 2):
        return None
    if not inside:
        return FramePlacement(source, stream, stack, size, wide, entry, readers, angles)
    first, last = inside
    mlp = _mlp(source, stream, first, last)
    if mlp is None:
        return None
    hidden = source.rows[mlp[0]].writes.axes[0]
    return FramePlacement(source, stream, stack, size, wide, entry, readers, angles, first, last, *mlp, hidden)


def _of(side: Side) -> str | None:
    """The axis that a side is, once or several times over."""
    return side.repeats[1] if side.repeats else None


def _mlp(source: Spec, stream: str, above: str, below: str) -> tuple[str, str] | None:
    """The two rows of the one MLP between two norms."""
    order = list(source.rows)
    between = order[order.index(above) + 1 : order.index(below)]
    ups = [n for n in between if source.rows[n].reads.axes == (stream,)]
    downs = [n for n in between if source.rows[n].writes.axes == (stream,)]
    if len(ups) != 1 or len(downs) != 1 or source.rows[ups[0]].writes != source.rows[downs[0]].reads:
        return None
    return ups[0], downs[0]


def _require_turns(source: Spec, stream: str, norms: Sequence[str], advice: str) -> None:
    """Raise Refused if a Post-LN block has a norm with no MLP before or behind it: docs/errata.md has the count."""
    norms = [n for n in norms if source.rows[n].reads == source.rows[n].writes]
    turns = [_mlp(source, stream, above, below) is not None for above, below in pairwise(norms)]
    if len(norms) < 3:
        return
    for norm, before, behind in zip(norms, [False, *turns], [*turns, False], strict=True):
        if not before and not behind:
            raise Refused(
                f"{norm} sits between two LayerNorms with no MLP that could convert between their bases, so this width "
                f"cannot be reached exactly: try {advice}"
            )


def _require(found: FramePlacement, source: Spec, target: Spec, rows: Collection[str]) -> None:
    """Raise Refused if a row cannot follow a frame."""
    advice = multiples_near(found.size, found.target)
    for name in rows:
        row = source.rows[name]
        _require_axis(found, name, row, advice)
        if found.spaces.isdisjoint(row.reads.axes) or name in {*found.norms, *found.angles}:
            continue
        if not isinstance(row, Linear):
            raise Refused(
                f"{name}: only linear maps and LayerNorms can read {row.reads}, which a frame carries: try {advice}"
            )
        if _of(row.reads) != found.stream and norm_above(found, name) is None:
            raise Refused(
                f"{name} stands above the norm whose output it reads: rows of a spec are in order of computation"
            )
    if any(getattr(source.rows[name], "each", None) or not getattr(source.rows[name], "affine", True)
           for name in found.norms):  # fmt: skip
        raise Refused(
            f"a LayerNorm without gains of its own cannot feed {found.stream}: choose a multiple of its width"
        )
    if found.hidden is None:
        return
    order = list(source.rows)
    if found.entry and order.index(found.entry) > order.index(found.first or ""):
        raise Refused(f"{found.entry} stands below the blocks it feeds: the rows of a spec are in order of computation")
    _require_spare(found, source, target)


def _require_axis(found: FramePlacement, name: str, row: Row, advice: str) -> None:
    """A frame is an axis of its own; norms and linear maps may read it several times over."""
    for side, several in ((row.reads, name != found.entry), (row.writes, name in found.readers)):
        alone = side.repeats is not None and (several or not side.is_fused)
        if not found.spaces.isdisjoint(side.axes) and not alone:
            raise Refused(
                f"{name}: {side} is fused of several axes, and a frame must be an axis of its own: try {advice}"
            )


def norm_above(found: FramePlacement, row: str) -> str | None:
    """The norm that wrote what a row reads of a frame: the nearest above it."""
    rows = found.spec.rows
    order = list(rows)
    above = [n for n in found.readers if rows[n].writes == rows[row].reads and order.index(n) < order.index(row)]
    return above[-1] if above else None


def require_untied(found: FramePlacement, target: Spec, rows: Collection[str]) -> None:
    """Raise Refused if a decoder is still the embedding: it would need a left inverse of one frame in another."""
    for name in rows:
        tied = getattr(target.rows[name], "tied", None)
        if tied and not found.spaces.isdisjoint({*target.rows[name].reads.axes, *target.rows[tied].writes.axes}):
            raise Refused(
                f"{name}: a decoder that is the embedding cannot read a frame, which {found.size} -> {found.target} "
                f"needs: give --set {TIED}=false, or a multiple of {found.size}"
            )


def _require_spare(found: FramePlacement, source: Spec, target: Spec) -> None:
    hidden, stack = found.hidden or "", source.stacks[found.stack or ""]
    size, wide = source.spaces[hidden].size, target.spaces[hidden].size
    if not source.spaces[hidden].passes:
        raise Refused(
            f"{found.stream} at {found.size} -> {found.target} has to pass {hidden} in pairs of neurons, which takes "
            "an activation with act(a) - act(-a) = a: choose a multiple"
        )
    if wide < size + 2 * found.size:
        raise Refused(
            f"{found.stream} at {found.size} -> {found.target} passes through {2 * found.size} spare neurons, and "
            f"{wide} leave {wide - size} beside the source's {size}: give --ffn {size + 2 * found.size} or more"
        )
    # A set of weights reads one frame. Used again, it reads its own norm's: only the first set can be written that.
    uses = Counter(stack.set_of(block) for block in range(stack.size))
    if any(count > 1 and (index or found.entry) for index, count in uses.items()):
        raise Refused(
            f"blocks in {found.stack} share their weights, and would have to read both the frame that comes to them "
            f"and the one that they write: choose a multiple of {found.size}, or first expand with --set "
            f"{stack.sets_in}={stack.size} alone"
        )
