"""Which spaces need frames, and of which type.

A frame is needed where a LayerNorm feeds a stream that LayerNorms read, at a width that is not a multiple of the
source's. There are two types:

PreNormFrame: the stream is in one frame A from beginning to end. The norm on the embeddings decides A, every block
adds A x, and every other norm reads it and gets even gains; the weights behind that norm absorb its own. Where linear
maps alone write a space, any A will do. It serves where means in the remainder would not: a norm over several vectors
in a row, `(4 stage)`, can read it, since A preserves mean and variance of each vector, and lengths and angles are kept,
because A^T A is a multiple of I.

PostNormFrame: the last norm of every block decides an A of its own, and the first norm of the next block reads it. The
MLP between the two norms of a block converts one frame into the next: it passes the stream through pairs of spare
neurons, act(a) - act(-a) = a. In a group of added blocks, where norms have no affine part, the stream stays in one
frame.

A row reads what the last norm before it in the order of computation (Spec.order) wrote. Not in the paper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lemonx.algebra.expansions import Expansion, dense, expansion, multiples_near
from lemonx.errors import Refused
from lemonx.frames.construction import group_sizes
from lemonx.specs.config import TIED
from lemonx.specs.norms import LayerNorm, UnitLength
from lemonx.specs.rows import Row
from lemonx.specs.signature import Side
from lemonx.specs.spaces import Space, Units
from lemonx.specs.spec import LAST, Spec
from lemonx.specs.weights import Linear


@dataclass(frozen=True, kw_only=True)
class FramePlacement(ABC):
    """The space `stream` that frames carry from `size` to `target` coordinates.

    `stack`: the blocks that add to it, if any do. `entry`: the norm outside of them that writes it; None if linear maps
    do. `readers`: norms that read it and write another space. `angles`: rows that divide it by its length.
    """

    spec: Spec
    stream: str
    stack: str | None
    size: int
    target: int
    entry: str | None
    readers: tuple[str, ...]
    angles: tuple[str, ...]

    @property
    def spaces(self) -> frozenset[str]:
        """Every space that a frame carries."""
        rows = self.spec.rows
        written = {rows[name].writes.axes[-1] for name in self.readers}
        read = {rows[self.entry].reads.axes[0]} if self.entry else set[str]()
        return frozenset({self.stream, *written, *read})

    @property
    def norms(self) -> frozenset[str]:
        """The norms that feed or read it."""
        return frozenset(self.readers) | ({self.entry} if self.entry else set())

    @property
    @abstractmethod
    def is_fed(self) -> bool:
        """Whether a norm writes it, whose gains then decide the frame."""

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The sizes of its dense blocks; Refused if no sizes can be solved for."""
        return group_sizes(self.size, self.target, fed=self.is_fed)

    @property
    def ends(self) -> bool:
        """Whether no other stream is made from it, so that a model without a head may return it."""
        others = {stack.stream for stack in self.spec.stacks.values()} - self.spaces
        after = [row for row in self.spec.rows.values() if not self.spaces.isdisjoint(row.reads.axes)]
        return others.isdisjoint(axis for row in after for axis in row.writes.axes)

    @property
    def shown(self) -> tuple[str, ...]:
        """Its norms whose output no row reads: a backbone returns that output, even where the stream goes on."""
        read = {axis for row in self.spec.rows.values() for axis in row.reads.axes}
        return tuple(name for name in self.readers if read.isdisjoint(self.spec.rows[name].writes.axes))

    @property
    def is_given_out(self) -> bool:
        """Whether a model without a head returns something in a frame."""
        return self.ends or bool(self.shown)

    def writes_into_entry(self, row: str) -> bool:
        """Whether the entry norm reads what this row writes."""
        if self.entry is None:
            return False
        axis = self.spec.rows[self.entry].reads.axes[0]
        written = self.spec.rows[row].writes.axes[-1] == axis
        return written and (axis != self.stream or self.spec.comes_before(row, self.entry))

    def norm_above(self, row: str) -> str | None:
        """The norm that wrote what this row reads: the last one before it."""
        times, axis = self.spec.rows[row].reads.repeats or (1, None)

        def written(norm: str) -> bool:
            each, space = self.spec.rows[norm].writes.repeats or (1, "")
            return space == axis and times % each == 0

        above = [n for n in self.readers if written(n) and self.spec.comes_before(n, row)]
        return above[-1] if above else None

    def expansions(self, target: Spec) -> dict[str, Expansion]:
        """The types of these spaces without their numbers, which depend on gains that have not been read."""
        return dict.fromkeys(self.spaces, dense(self.size, self.target))

    def require(self, target: Spec, rows: Collection[str]) -> None:
        """Raise Refused if a row cannot follow a frame."""
        advice = multiples_near(self.size, self.target)
        if mixed := sorted(self.spaces & set(self.spec.mixed)):
            raise Refused(
                f"{mixed[0]} holds what a LayerNorm writes added to what it reads, or to what another one writes, and "
                "cannot follow the change of basis that this width needs",
                f"try {advice}",
            )
        for name in rows:
            row = self.spec.rows[name]
            self._require_axis(name, row, advice)
            self._require_writer(name, row, advice)
            if self.spaces.isdisjoint(row.reads.axes) or name in {*self.norms, *self.angles}:
                continue
            if isinstance(row, LayerNorm) and self.entry:
                raise Refused(
                    f"{name} and {self.entry} read one space, of which the change of basis that this width needs can "
                    "only serve the latter",
                    f"try {advice}",
                )
            if not isinstance(row, Linear):
                raise Refused(
                    f"{name} is neither a linear layer nor a LayerNorm, so it cannot follow the change of basis that "
                    "this width needs",
                    f"try {advice}",
                )
            if _of(row.reads) != self.stream and self.norm_above(name) is None:
                raise Refused(
                    f"the table of this family lists {name} above the norm whose output it reads",
                    "list its rows in the order of computation",
                )
        norms = [self.spec.rows[name] for name in self.norms]
        if any(getattr(row, "each", None) or not getattr(row, "affine", True) for row in norms):
            raise Refused(
                "a LayerNorm without weights cannot take part in the change of basis that this width needs",
                f"choose a multiple of {self.size}",
            )

    def _require_axis(self, name: str, row: Row, advice: str) -> None:
        """A frame is an axis of its own; norms and linear maps may read several in a row."""
        for side, several in ((row.reads, name != self.entry), (row.writes, name in self.readers)):
            alone = side.repeats is not None and (several or not side.is_fused)
            if not self.spaces.isdisjoint(side.axes) and not alone:
                raise Refused(
                    f"{name} has an axis of several joined ones ({side}), which cannot follow the change of basis that "
                    "this width needs",
                    f"try {advice}",
                )

    def _require_writer(self, name: str, row: Row, advice: str) -> None:
        """What a norm writes beside its own gain and bias, no map can: only the stream, or what the entry reads."""
        added = {self.stream, *(self.spec.rows[self.entry].reads.axes if self.entry else ())}
        if name not in self.norms and not self.spaces.isdisjoint(set(row.writes.axes) - added):
            raise Refused(
                f"{name} adds to what a LayerNorm writes, which cannot follow the change of basis that this width "
                "needs",
                f"try {advice}",
            )

    def require_untied(self, target: Spec, rows: Collection[str]) -> None:
        """Raise Refused if a decoder is still the embedding: it would need a left inverse of one frame in another."""
        for name in rows:
            tied = getattr(target.rows[name], "tied", None)
            if tied and not self.spaces.isdisjoint({*target.rows[name].reads.axes, *target.rows[tied].writes.axes}):
                raise Refused(
                    f"{name}: the output head is tied to the embedding, so it cannot follow the change of basis that "
                    f"{self.size} -> {self.target} needs",
                    f"untie it with --set {TIED}=false, or choose a multiple of {self.size}",
                )


@dataclass(frozen=True, kw_only=True)
class PreNormFrame(FramePlacement):
    """One frame from beginning to end: norms inside the blocks, if there are any, only read the stream."""

    @property
    def is_fed(self) -> bool:
        return self.entry is not None


@dataclass(frozen=True, kw_only=True)
class PostNormFrame(FramePlacement):
    """A frame for every block, which its `last` norm feeds.

    The MLP between its `first` and its last norm, with the rows `up` and `down`, has spare neurons that convert.
    """

    stack: str
    first: str
    last: str
    up: str
    down: str

    @property
    def norms(self) -> frozenset[str]:
        return super().norms | {self.first, self.last}

    @property
    def is_fed(self) -> bool:
        return True

    @property
    def hidden(self) -> str:
        """The space of the MLP's neurons."""
        return self.spec.rows[self.up].writes.axes[0]

    @property
    def sets(self) -> int:
        """How many sets of weights its blocks have."""
        return self.spec.stacks[self.stack].stored

    def is_between_norms(self, row: str) -> bool:
        """Whether a row stands behind the first norm of its block."""
        return self.spec.stack_of(row) == self.stack and self.spec.comes_before(self.first, row)

    def expansions(self, target: Spec) -> dict[str, Expansion]:
        size, wide = self.spec.spaces[self.hidden].size, target.spaces[self.hidden].size
        copies = expansion("circ", size, wide - 2 * self.size)
        return super().expansions(target) | {self.hidden: copies.with_spare(2 * self.size)}

    def require(self, target: Spec, rows: Collection[str]) -> None:
        super().require(target, rows)
        if self.entry and self.spec.comes_before(self.first, self.entry):
            raise Refused(
                f"the table of this family lists {self.entry} below the layers that it feeds",
                "list its rows in the order of computation",
            )
        self._require_spare_neurons(self.spec.spaces[self.hidden], target.spaces[self.hidden].size)
        # A set of weights reads one frame. Used again, it reads its own norm's: only the first set can be written that.
        stack = self.spec.stacks[self.stack]
        uses = Counter(stack.set_of(block) for block in range(stack.size))
        if any(count > 1 and (index or self.entry) for index, count in uses.items()):
            raise Refused(
                f"layers in {self.stack} share their weights, and would have to read two different bases",
                f"choose a multiple of {self.size}, or first expand with --set {stack.sets_in}={stack.size} alone",
            )

    def _require_spare_neurons(self, units: Space, wide: int) -> None:
        if not isinstance(units, Units) or not units.passes:
            raise Refused(
                f"{self.size} -> {self.target} needs pairs of MLP neurons that pass a number on unchanged, act(a) - "
                "act(-a) = a, which this activation does not allow",
                f"choose a multiple of {self.size}",
            )
        if wide < units.size + 2 * self.size:
            raise Refused(
                f"{self.size} -> {self.target} needs {2 * self.size} new MLP neurons that only pass activations on, "
                f"and {wide} leave {wide - units.size} beside the source's {units.size}",
                f"give --ffn {units.size + 2 * self.size} or more",
            )


def find(source: Spec, target: Spec, rows: Collection[str], refusing: Collection[str]) -> tuple[FramePlacement, ...]:
    """The spaces that frames must carry to this width, given the rows that refuse copies, means and zeros.

    () if frames cannot help; Refused if it is known what is in their way.
    """
    wanted = [axis for name in source.in_order(refusing) for axis in _in_the_way(source, source.rows[name])]
    found = list[FramePlacement]()
    for stream in dict.fromkeys(wanted):
        size, wide = source.spaces[stream].size, target.spaces[stream].size
        framed = _placed(source, stream, rows, size, wide) if wide % size else None
        if framed is None:
            return ()
        found.append(framed)
    norms = Counter(name for framed in found for name in framed.norms)
    if max(norms.values(), default=0) != 1:
        return ()
    for framed in found:
        framed.require(target, rows)
        _ = framed.groups
    return tuple(found)


def _in_the_way(source: Spec, row: Row) -> Iterator[str]:
    """The space that this row could follow if it were in a frame: the stream it feeds, or what it reads."""
    axis, written = None, row.writes.axes[0]
    if isinstance(row, LayerNorm) and not row.writes.is_fused and _is_mean(source, written):
        axis = written
    elif isinstance(row, UnitLength) or (isinstance(row, LayerNorm) and row.reads.is_fused):
        axis = _of(row.reads)
    if axis is not None and _is_mean(source, axis):
        yield axis


def _is_mean(source: Spec, axis: str) -> bool:
    """Whether LayerNorms read this space, so that new entries would hold the mean."""
    return axis in source.spaces and source.spaces[axis].kind == "avg"


def _placed(source: Spec, stream: str, rows: Collection[str], size: int, wide: int) -> FramePlacement | None:
    """The type of frame that this space needs, by the norms that write it; None if neither fits."""
    stacks = [name for name, stack in source.stacks.items() if stack.stream == stream]
    norms = [n for n in source.in_order(rows) if isinstance(source.rows[n], LayerNorm)]
    fed = [n for n in norms if stream in source.rows[n].writes.axes]
    for stack in stacks:
        _require_mlps(source, stream, [n for n in fed if source.stack_of(n) == stack], multiples_near(size, wide))
    stack = stacks[0] if stacks else None
    inside = [n for n in fed if stack and source.stack_of(n) == stack]
    outside = [n for n in fed if n not in inside]
    if len(outside) > 1 or len(inside) not in (0, 2):
        return None
    readers = tuple(n for n in norms if _of(source.rows[n].reads) == stream and n not in fed)
    angles = tuple(n for n in rows if isinstance(source.rows[n], UnitLength) and _of(source.rows[n].reads) == stream)
    plain = PreNormFrame(
        spec=source,
        stream=stream,
        stack=stack,
        size=size,
        target=wide,
        entry=outside[0] if outside else None,
        readers=readers,
        angles=angles,
    )
    if not inside:
        return plain
    first, last = inside
    mlp = _mlp(source, stream, first, last)
    # Behind its first norm a block's stream has gains in it, under which no further norm finds mean and variance. A
    # norm of the last block alone is refused by the type check, which knows what to do about it.
    every = [n for n in readers if source.stack_of(n) == stack and not n.startswith(f"{stack}.{LAST}.")]
    if mlp is None or every:
        return None
    return PostNormFrame(**vars(plain), first=first, last=last, up=mlp[0], down=mlp[1])


def _of(side: Side) -> str | None:
    """The one axis that a side consists of, once or several times."""
    return side.repeats[1] if side.repeats else None


def _mlp(source: Spec, stream: str, above: str, below: str) -> tuple[str, str] | None:
    """The two rows of the one MLP between two norms."""
    between = [n for n in source.order if source.comes_before(above, n) and source.comes_before(n, below)]
    ups = [n for n in between if source.rows[n].reads.axes == (stream,)]
    downs = [n for n in between if source.rows[n].writes.axes == (stream,)]
    if len(ups) != 1 or len(downs) != 1 or source.rows[ups[0]].writes != source.rows[downs[0]].reads:
        return None
    return ups[0], downs[0]


def _require_mlps(source: Spec, stream: str, norms: Sequence[str], advice: str) -> None:
    """Raise Refused if a norm of a Post-LN block has no MLP before or behind it: docs/errata.md counts the unknowns."""
    norms = [n for n in norms if source.rows[n].reads == source.rows[n].writes]
    turns = [_mlp(source, stream, above, below) is not None for above, below in pairwise(norms)]
    if len(norms) < 3:
        return
    for norm, before, behind in zip(norms, [False, *turns], [*turns, False], strict=True):
        if not before and not behind:
            raise Refused(
                f"{norm} sits between two LayerNorms with no MLP that could convert between their bases, so this "
                "width cannot be reached exactly",
                f"try {advice}",
            )
