"""What the frames of a plan are, once the gains of the norms that feed them are read: every row's own types."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lemonx.algebra.dense import Frame
from lemonx.algebra.expansions import DENSE, Expansion
from lemonx.algebra.recipes import Spare, Vector
from lemonx.frames.construction import Feeder, Normed, any_frame, damped, even, feeder, normed
from lemonx.frames.placement import FramePlacement, norm_above

# Reads the gains of a norm, and its bias if it has one, by its row and its block in the source.
Affine = Callable[[str, int], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class Place:
    """A block of the target: the set of weights that it comes from, and its place in a group of added ones.

    In a Post-LN group the norms from the last of the block that is not added to the first of the one that closes it
    have no affine part.
    """

    index: int = 0
    added: bool = False
    closes: bool = True


@dataclass(frozen=True)
class Solved:
    """The frames of one stream: what feeds it from where on, and what every norm that reads it writes."""

    framed: FramePlacement
    feeders: Mapping[int, Feeder]  # by set of weights; -1: in front of all
    affine: Affine
    seconds: float = 0.0
    _written: dict[tuple[str, Place], Normed] = field(default_factory=dict, compare=False, repr=False)

    @property
    def number(self) -> int:
        """How many frames there are."""
        return len({id(found) for found in self.feeders.values()})

    @property
    def spread(self) -> float:
        return max(found.spread for found in self.feeders.values())

    @property
    def residual(self) -> float:
        return max(found.residual for found in self.feeders.values())

    def stream_before(self, index: int) -> Feeder:
        """What the stream is when it enters a block of the source."""
        return self.feeders[index - 1 if self.framed.last else -1]

    def _after(self, norm: str, at: Place) -> Normed:
        """What a norm that reads the stream writes."""
        if (norm, at) not in self._written:
            self._written[norm, at] = self._read_by(norm, at)
        return self._written[norm, at]

    def _read_by(self, norm: str, at: Place) -> Normed:
        if norm == self.framed.first:
            gain, bias = (np.ones(self.framed.size), None) if at.added else self.affine(norm, at.index)
            behind = self.feeders[at.index].gains if at.closes else np.ones(self.framed.target)
            return normed(self._before(at), gain, bias, damped(gain, behind))
        index = at.index if self.framed.spec.stack_of(norm) == self.framed.stack else self.framed.sets
        times, _ = self.framed.spec.rows[norm].reads.repeats or (1, "")
        gain, bias = self.affine(norm, at.index)
        stream = self.stream_before(index).stream.repeated(times)
        return normed(stream, gain, bias, even(gain, stream.forth.target_size))

    def _place(self, row: str) -> int:
        return list(self.framed.spec.rows).index(row)

    @property
    def _unit(self) -> Frame:
        """What norms without an affine part write when they read it, and so read when they wrote it."""
        return any_frame(self.framed.size, self.framed.target).stream

    def _before(self, at: Place) -> Frame:
        """The stream in front of a block of the target."""
        return self._unit if self.framed.last and at.added else self.stream_before(at.index).stream

    def _behind(self, at: Place) -> Frame:
        """The stream between the MLP of a Post-LN block and its last norm."""
        return self.feeders[at.index].inputs if at.closes else self._unit

    def read(self, row: str, at: Place) -> Expansion | None:
        """What a row reads there, if a frame carries it."""
        reads = self.framed.spec.rows[row].reads
        if reads.repeats is None or reads.repeats[1] not in self.framed.spaces:
            return None
        times, axis = reads.repeats
        if axis == self.framed.stream:
            return _typed(self._stream_read(row, at).repeated(times))
        above = norm_above(self.framed, row)
        return _typed(self._after(above, at).read) if above else None

    def _stream_read(self, row: str, at: Place) -> Frame:
        framed = self.framed
        if framed.spec.stack_of(row) != framed.stack:
            return self.stream_before(framed.sets).stream
        if framed.first and self._place(row) > self._place(framed.first):
            return self._after(framed.first, at).read
        return self._before(at)

    def written(self, row: str, at: Place) -> Expansion | None:
        """What a row must write there, if a frame carries it."""
        framed, spec, axis = self.framed, self.framed.spec, self.framed.spec.rows[row].writes.axes[-1]
        if axis not in framed.spaces:
            return None
        entered = framed.entry and axis == spec.rows[framed.entry].reads.axes[0]
        if entered and (axis != framed.stream or self._place(row) < self._place(framed.entry or "")):
            return _typed(self.feeders[-1].inputs)
        if axis != framed.stream:
            return None
        inside = framed.first and spec.stack_of(row) == framed.stack
        between = inside and self._place(row) > self._place(framed.first or "")
        return _typed(self._behind(at) if between else self._before(at))

    def stream_after(self, index: int) -> Expansion:
        """What the stream is behind a block of the source."""
        return _typed(self.stream_before(index + 1).stream)

    @property
    def outputs(self) -> list[Frame]:
        """What a model without a head may give out of it: the stream as it ends, or what a norm behind it writes."""
        framed = self.framed
        if not framed.ends:
            return [self._after(name, Place()).read for name in framed.shown]
        norms = [name for name in framed.readers if framed.spec.stack_of(name) is None]
        return [self.stream_before(framed.sets).stream, *(self._after(name, Place()).read for name in norms)]

    def norm(self, row: str, at: Place, suffix: str) -> Vector | None:
        """The parameters of a norm that feeds or reads the stream."""
        framed, bias = self.framed, suffix == "bias"
        if row not in framed.norms:
            return None
        if row == framed.last and not at.closes:
            where, own, rule = _typed(self._unit), (1.0, 0.0), "LayerNorm of a frame"
        elif row in (framed.entry, framed.last):
            found = self.feeders[at.index if row == framed.last else -1]
            where, own, rule = _typed(found.stream), (found.gains, None), "LayerNorm into a frame"
        else:
            read = self._after(row, at)
            where, own, rule = _typed(read.carried), (read.gains, read.bias), "LayerNorm of a frame"
        if bias:
            factor = np.full(where.target_size, 1.0 if own[1] is None else 0.0)
            return Vector(where, factor, rule=f"{rule}, bias", rest=0.0 if own[1] is None else own[1])
        return Vector(where, np.zeros(where.target_size), rule=rule, rest=own[0])

    def spare(self, row: str, at: Place) -> Spare | None:
        """The spare neurons of a block's MLP: they read the stream as it is, and write what turns it."""
        framed = self.framed
        if row not in (framed.up, framed.down):
            return None
        now, new = self._after(framed.first or "", at), self._behind(at)
        assert now.carried.back is not None
        if row == framed.up:
            return Spare(now.carried.back.rows, framed.size)
        return Spare(lambda start, stop: now.turned(new.forth, start, stop), framed.size)


def _typed(frame: Frame) -> Expansion:
    wide = frame.forth.target_size
    return Expansion(frame.forth.size, np.full(wide, DENSE), np.ones(wide), frame=frame)


@dataclass(frozen=True)
class SolvedFrames:
    """The frames of a plan, stream by stream; a row reads one stream and may write another."""

    streams: tuple[Solved, ...]

    def types(self, row: str, at: Place) -> tuple[Expansion | None, Expansion | None]:
        """What a row reads and what it writes there, as far as frames carry it."""
        read = (found for stream in self.streams if (found := stream.read(row, at)))
        written = (found for stream in self.streams if (found := stream.written(row, at)))
        return next(read, None), next(written, None)

    def norm(self, row: str, at: Place, suffix: str) -> Vector | None:
        """The parameters of a norm that feeds or reads a frame."""
        return next((found for stream in self.streams if (found := stream.norm(row, at, suffix))), None)

    def spare(self, row: str, at: Place) -> Spare | None:
        """The spare neurons of an MLP that turns one frame into another."""
        return next((found for stream in self.streams if (found := stream.spare(row, at))), None)

    def of_stack(self, stack: str) -> Solved | None:
        """The frames of the stream that these blocks add to."""
        return next((stream for stream in self.streams if stream.framed.stack == stack), None)

    def ways_back(self, width: int) -> list[np.ndarray]:
        """What makes the source's hidden states of the target's, as matrices: one for every frame they may be in."""
        outputs = [output for stream in self.streams for output in stream.outputs]
        return [back.rows(0, back.size) for frame in outputs if (back := frame.back) and back.target_size == width]


def solve(framed: tuple[FramePlacement, ...], affine: Affine) -> SolvedFrames:
    """Solve for every frame of a plan, from the gains of the norms that feed the streams."""
    return SolvedFrames(tuple(_solved(stream, affine) for stream in framed))


def outline(framed: tuple[FramePlacement, ...]) -> SolvedFrames:
    """The same for norms whose gains are not read: as many frames, in their places, with other numbers in them."""
    return SolvedFrames(tuple(_outlined(stream) for stream in framed))


def _outlined(framed: FramePlacement) -> Solved:
    one = any_frame(framed.size, framed.target)
    feeders = {index: replace(one) for index in range(framed.sets) if framed.last}
    feeders[-1] = replace(one) if framed.entry else feeders.get(0, one)

    def ones(row: str, index: int) -> tuple[np.ndarray, None]:
        return np.ones(framed.spec.side_size(framed.spec.rows[row].reads) or framed.size), None

    return Solved(framed, feeders, ones)


def _solved(framed: FramePlacement, affine: Affine) -> Solved:
    began = time.monotonic()
    feeders = dict[int, Feeder]()
    for index in range(framed.sets) if framed.last else ():
        feeders[index] = feeder(affine(framed.last or "", index)[0], framed.target, _named(framed.last or "", index))
    if framed.entry:
        feeders[-1] = feeder(affine(framed.entry, 0)[0], framed.target, framed.entry)
    else:
        # Linear maps can write any frame: that of the first block, so that this may be used again, or just one.
        feeders[-1] = feeders.get(0) or any_frame(framed.size, framed.target)
    return Solved(framed, feeders, affine, time.monotonic() - began)


def _named(row: str, index: int) -> str:
    return row.replace("*", str(index))
