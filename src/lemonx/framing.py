"""Which spaces are framed, and by what: LayerNorms that feed a stream which LayerNorms read, at an indivisible width.

The table's order is the order of computation: what a row reads was written by the nearest norm above it.

Pre-LN with a norm on the embeddings: that norm decides A; every block adds A x; every other norm reads it and gets
gains of one, its own being taken over by what reads it. Post-LN: the last norm of every block decides an A of its
own; the first norm of the next block reads it; and the MLP between the two, which must turn the one into the other,
passes the stream through pairs of spare neurons, act(a) - act(-a) = a. Not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lemonx.errors import Refused
from lemonx.frames import Feeder, Frame, feeder, group_sizes, reader
from lemonx.modules import LayerNorm, Linear, Vector
from lemonx.operators import Spare
from lemonx.spec import TIED, Spec
from lemonx.vectors import DENSE, SPARE, Expansion, expansion, multiples_near

# Reads the gains of a norm, by its row and its block in the source.
Gains = Callable[[str, int], np.ndarray]


@dataclass(frozen=True)
class Framed:
    """A stream that frames carry: `entry` feeds it first (if a norm does), `first` and `last` are a Post-LN block's.

    `up` and `down`: the rows of the MLP whose spare neurons pass the stream through, `hidden` their space.
    """

    spec: Spec
    stream: str
    stack: str
    size: int
    target: int
    entry: str | None
    readers: tuple[str, ...] = ()
    first: str | None = None
    last: str | None = None
    up: str | None = None
    down: str | None = None
    hidden: str | None = None

    @property
    def spaces(self) -> frozenset[str]:
        """Every space that a frame carries."""
        rows = self.spec.rows
        written = {rows[name].writes.axes[0] for name in self.readers}
        read = {rows[self.entry].reads.axes[0]} if self.entry else set[str]()
        return frozenset({self.stream, *written, *read})

    @property
    def norms(self) -> frozenset[str]:
        return frozenset(name for name in (self.entry, self.first, self.last, *self.readers) if name)

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


def find(source: Spec, target: Spec, rows: Collection[str]) -> Framed | None:
    """The stream that only frames can carry to this width, if there is one; Refused if they cannot either."""
    for name, stack in source.stacks.items():
        size, wide = source.spaces[stack.stream].size, target.spaces[stack.stream].size
        norms = [n for n in source.rows if n in rows and isinstance(source.rows[n], LayerNorm)]
        fed = [n for n in norms if stack.stream in source.rows[n].writes.axes]
        if wide % size == 0 or not fed:
            continue
        found = _found(source, name, norms, fed, size, wide)
        if found is not None:
            _require(found, source, target, rows)
            group_sizes(size, wide)
            return found
    return None


def _found(source: Spec, stack: str, norms: list[str], fed: list[str], size: int, wide: int) -> Framed | None:
    stream = source.stacks[stack].stream
    inside = [n for n in fed if source.stack_of(n) == stack]
    outside = [n for n in fed if n not in inside]
    readers = tuple(n for n in norms if source.rows[n].reads.axes == (stream,) and n not in fed)
    entry = outside[0] if outside else None
    if len(outside) > 1 or len(inside) not in (0, 2):
        return None
    if not inside:
        return Framed(source, stream, stack, size, wide, entry, readers)
    first, last = inside
    order = list(source.rows)
    between = order[order.index(first) + 1 : order.index(last)]
    ups = [n for n in between if source.rows[n].reads.axes == (stream,)]
    downs = [n for n in between if source.rows[n].writes.axes == (stream,)]
    if len(ups) != 1 or len(downs) != 1 or source.rows[ups[0]].writes != source.rows[downs[0]].reads:
        return None
    hidden = source.rows[ups[0]].writes.axes[0]
    return Framed(source, stream, stack, size, wide, entry, readers, first, last, ups[0], downs[0], hidden)


def _require(found: Framed, source: Spec, target: Spec, rows: Collection[str]) -> None:
    """Raise Refused if a row cannot follow a frame."""
    order, advice = list(source.rows), multiples_near(found.size, found.target)
    for name in rows:
        row = source.rows[name]
        for side in (row.reads, row.writes):
            if not found.spaces.isdisjoint(side.axes) and side.is_fused:
                raise Refused(
                    f"{name}: {side} is fused of several axes, and a frame must be an axis of its own: try {advice}"
                )
        if found.spaces.isdisjoint(row.reads.axes) or name in found.norms:
            continue
        if not isinstance(row, Linear):
            raise Refused(
                f"{name}: only linear maps and LayerNorms can read {row.reads}, which a frame carries: try {advice}"
            )
        above = [n for n in found.readers if order.index(n) < order.index(name)]
        if row.reads.axes[0] not in (found.stream, *(source.rows[n].writes.axes[0] for n in above)):
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
    if found.entry and order.index(found.entry) > order.index(found.first or ""):
        raise Refused(f"{found.entry} stands below the blocks it feeds: the rows of a spec are in order of computation")
    if source.stacks[found.stack].size != target.stacks[found.stack].size:
        raise Refused("a Post-LN model cannot become deeper and indivisibly wider at once: expand twice, depth first")
    _require_spare(found, source, target)


def require_untied(found: Framed, target: Spec, rows: Collection[str]) -> None:
    """Raise Refused if a decoder is still the embedding: it would need a left inverse of one frame in another."""
    for name in rows:
        tied = getattr(target.rows[name], "tied", None)
        if tied and not found.spaces.isdisjoint({*target.rows[name].reads.axes, *target.rows[tied].writes.axes}):
            raise Refused(
                f"{name}: a decoder that is the embedding cannot read a frame, which {found.size} -> {found.target} "
                f"needs: give --set {TIED}=false, or a multiple of {found.size}"
            )


def _require_spare(found: Framed, source: Spec, target: Spec) -> None:
    hidden = found.hidden or ""
    size, wide = source.spaces[hidden].size, target.spaces[hidden].size
    if not source.spaces[hidden].passes:
        raise Refused(
            f"{found.stream} at {found.size} -> {found.target} has to pass {hidden} in pairs of neurons, which takes "
            "an activation with act(a) - act(-a) = a, and blocks with weights of their own: choose a multiple"
        )
    if wide < size + 2 * found.size:
        raise Refused(
            f"{found.stream} at {found.size} -> {found.target} passes through {2 * found.size} spare neurons, and "
            f"{wide} leave {wide - size} beside the source's {size}: give --ffn {size + 2 * found.size} or more"
        )


@dataclass(frozen=True)
class Solved:
    """The frames of a plan: what feeds the stream from where on, and what every norm that reads it writes."""

    framed: Framed
    feeders: Mapping[int, Feeder]  # by block; -1: the entry, or any frame if no norm is there
    gains: Gains
    seconds: float = 0.0
    _written: dict[tuple[str, int], Frame] = field(default_factory=dict, compare=False, repr=False)

    @property
    def spread(self) -> float:
        return max(found.spread for found in self.feeders.values())

    @property
    def residual(self) -> float:
        return max(found.residual for found in self.feeders.values())

    def stream_before(self, index: int) -> Feeder:
        """What the stream is when it enters a block of the source."""
        return self.feeders[index - 1 if self.framed.last else -1]

    def _after(self, norm: str, index: int) -> Frame:
        """What a norm that reads the stream writes."""
        if (norm, index) not in self._written:
            at = index if self.framed.spec.stack_of(norm) else self._blocks
            self._written[norm, index] = reader(self.stream_before(at).stream, self.gains(norm, index))
        return self._written[norm, index]

    @property
    def _blocks(self) -> int:
        return self.framed.spec.stacks[self.framed.stack].size

    def _place(self, row: str) -> int:
        return list(self.framed.spec.rows).index(row)

    def read(self, row: str, index: int) -> dict[str, Expansion]:
        """What the framed spaces that a row reads are, there."""
        framed, spec = self.framed, self.framed.spec
        result = {}
        for axis in framed.spaces & set(spec.rows[row].reads.axes):
            if axis == framed.stream:
                result[axis] = self._typed(self._stream_read(row, index))
                continue
            above = [
                n for n in framed.readers if spec.rows[n].writes.axes[0] == axis and self._place(n) < self._place(row)
            ]
            if above:
                result[axis] = self._typed(self._after(above[-1], index))
        return result

    def _stream_read(self, row: str, index: int) -> Frame:
        framed = self.framed
        if framed.spec.stack_of(row) != framed.stack:
            return self.stream_before(self._blocks).stream
        if framed.first and self._place(row) > self._place(framed.first):
            return self._after(framed.first, index)
        return self.stream_before(index).stream

    def written(self, row: str, index: int) -> dict[str, Expansion]:
        """What the framed spaces that a row writes must be, there."""
        framed, spec = self.framed, self.framed.spec
        result = {}
        for axis in framed.spaces & set(spec.rows[row].writes.axes):
            entered = framed.entry and axis == spec.rows[framed.entry].reads.axes[0]
            if entered and (axis != framed.stream or self._place(row) < self._place(framed.entry or "")):
                result[axis] = self._typed(self.feeders[-1].inputs)
            elif axis == framed.stream:
                inside = framed.first and spec.stack_of(row) == framed.stack
                between = inside and self._place(row) > self._place(framed.first or "")
                frame = self.feeders[index].inputs if between else self.stream_before(index).stream
                result[axis] = self._typed(frame)
        return result

    def stream_after(self, index: int) -> Expansion:
        """What the stream is behind a block of the source."""
        return self._typed(self.stream_before(index + 1).stream)

    @property
    def output(self) -> Expansion:
        """What the last hidden state is."""
        framed = self.framed
        last = [n for n in framed.readers if framed.spec.stack_of(n) is None]
        return self._typed(self._after(last[-1], 0)) if last else self.stream_after(self._blocks - 1)

    @property
    def backs(self) -> tuple[Callable[[np.ndarray], np.ndarray], ...]:
        """The ways back from what a model without a head gives out: the stream itself, or its last norm's output."""
        return self.output.back, self.stream_after(self._blocks - 1).back

    def _typed(self, frame: Frame) -> Expansion:
        wide = self.framed.target
        return Expansion(self.framed.size, np.full(wide, DENSE), np.ones(wide), frame=frame)

    def norm(self, row: str, index: int, suffix: str) -> Vector | None:
        """The parameters of a norm that feeds or reads the stream."""
        framed, wide = self.framed, self.framed.target
        if row not in framed.norms:
            return None
        if row in (framed.entry, framed.last):
            found = self.feeders[index if row == framed.last else -1]
            frame, gains, rule = found.stream, found.gains, "LayerNorm into a frame"
        else:
            frame, gains, rule = self._after(row, index), np.ones(wide), "LayerNorm of a frame"
        where = self._typed(frame)
        if suffix == "bias":
            return Vector(where, np.ones(wide), rule=f"{rule}, bias")
        return Vector(where, np.zeros(wide), rule=rule, rest=gains)

    def spare(self, row: str, index: int) -> Spare | None:
        """The spare neurons of a block's MLP: they read the stream as it is, and write what turns it."""
        framed = self.framed
        if row not in (framed.up, framed.down):
            return None
        now = self._after(framed.first or "", index)
        assert now.back is not None
        if row == framed.up:
            return Spare(now.back.rows, framed.size)
        new = self.feeders[index].inputs
        return Spare(lambda start, stop: new.forth.columns(start, stop) - now.forth.columns(start, stop), framed.size)


def solve(framed: Framed, gains: Gains) -> Solved:
    """Solve for every frame of a plan, from the gains of the norms that feed the stream."""
    import time

    began = time.monotonic()
    entry = gains(framed.entry, 0) if framed.entry else np.ones(framed.size)
    feeders: dict[int, Any] = {-1: feeder(entry, framed.target, framed.entry or framed.stream)}
    if framed.last:
        for index in range(framed.spec.stacks[framed.stack].size):
            feeders[index] = feeder(gains(framed.last, index), framed.target, framed.last.replace("*", str(index)))
    return Solved(framed, feeders, gains, time.monotonic() - began)
