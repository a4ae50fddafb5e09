"""The frames of a plan once the gains of the norms that feed them are known: what every row reads and writes there."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from lemonx.algebra.dense import Frame
from lemonx.algebra.expansions import Expansion, dense
from lemonx.algebra.recipes import Spare, Vector
from lemonx.frames.construction import Feeder, Normed, any_frame, damped, even, feeder, normed
from lemonx.frames.placement import FramePlacement, PostNormFrame, PreNormFrame
from lemonx.specs.spec import OUTSIDE, Block

# Reads the gains of a norm, and its bias if it has one, by its row and its block in the source.
Affine = Callable[[str, int], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class Solved(ABC):
    """The frames of one stream.

    `entry`: the frame in front of all blocks, with the gains of the norm that writes it, if one does.
    """

    placement: FramePlacement
    affine: Affine
    entry: Feeder
    seconds: float
    _outputs: dict[tuple[str, Block], Normed] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    @property
    def feeders(self) -> tuple[Feeder, ...]:
        """Every frame that the stream is in."""
        return (self.entry,)

    @abstractmethod
    def _stream_after(self, index: int) -> Frame:
        """The stream behind a block of the source; -1: behind the last."""

    @abstractmethod
    def _stream_read(self, row: str, at: Block) -> Frame:
        """The stream as a row there reads it."""

    @abstractmethod
    def _stream_written(self, row: str, at: Block) -> Frame:
        """What a row there must add to the stream."""

    @property
    def spread(self) -> float:
        return max(found.spread for found in self.feeders)

    @property
    def residual(self) -> float:
        return max(found.residual for found in self.feeders)

    def stream_after(self, index: int) -> Expansion:
        """The stream behind a block of the source."""
        return _typed(self._stream_after(index))

    def read(self, row: str, at: Block) -> Expansion | None:
        """What a row there reads, if a frame carries it."""
        times, axis = self.placement.spec.rows[row].reads.repeats or (1, "")
        if axis not in self.placement.spaces:
            return None
        if axis == self.placement.stream:
            return _typed(self._stream_read(row, at).repeated(times))
        above = self.placement.norm_above(row)
        if above is None:
            return None
        each, _ = self.placement.spec.rows[above].writes.repeats or (1, "")
        read = self._output(above, at).read
        return _typed(read if times == each else read.woven(times // each, 1))

    def written(self, row: str, at: Block) -> Expansion | None:
        """What a row there must write, if a frame carries it."""
        if self.placement.writes_into_entry(row):
            return _typed(self.entry.inputs)
        if self.placement.spec.rows[row].writes.axes[-1] != self.placement.stream:
            return None
        return _typed(self._stream_written(row, at))

    def _output(self, norm: str, at: Block) -> Normed:
        """What a norm that reads the stream writes."""
        if (norm, at) not in self._outputs:
            self._outputs[norm, at] = self._normed(norm, at)
        return self._outputs[norm, at]

    def _normed(self, norm: str, at: Block) -> Normed:
        times, _ = self.placement.spec.rows[norm].reads.repeats or (1, "")
        gain, bias = self.affine(norm, at.source)
        stream = self._stream_read(norm, at).repeated(times)
        return normed(stream, gain, bias, even(gain, stream.forth.target_size))

    @property
    def outputs(self) -> list[Frame]:
        """The frames that a model without a head may return: of the stream as it ends, and of norms behind it."""
        placement = self.placement
        if not placement.ends:
            return [self._output(name, OUTSIDE).read for name in placement.shown]
        norms = [name for name in placement.readers if placement.spec.stack_of(name) is None]
        return [self._stream_after(-1), *(self._output(name, OUTSIDE).read for name in norms)]

    def norm(self, row: str, at: Block, suffix: str) -> Vector:
        """The parameters of one of the norms of this stream."""
        if row == self.placement.entry:
            return _feeding(self.entry, suffix)
        output = self._output(row, at)
        return _reading(output.carried, output.bias if suffix == "bias" else output.gains, suffix)

    def spare(self, row: str, at: Block) -> Spare | None:
        """The spare neurons of an MLP that converts one frame into the next."""
        return None


@dataclass(frozen=True)
class SolvedPreNorm(Solved):
    """One frame from beginning to end."""

    placement: PreNormFrame

    def _stream_after(self, index: int) -> Frame:
        return self.entry.stream

    def _stream_read(self, row: str, at: Block) -> Frame:
        return self.entry.stream

    def _stream_written(self, row: str, at: Block) -> Frame:
        return self.entry.stream


@dataclass(frozen=True)
class SolvedPostNorm(Solved):
    """A frame for every set of weights in `blocks`, which the last norm of the block writes.

    In a group of added blocks, the norms from the last one of the source's block to the first one of the closing block
    have no affine part. What they write, and so what they read, is in one frame that needs no gains.
    """

    placement: PostNormFrame
    blocks: tuple[Feeder, ...]

    @property
    def feeders(self) -> tuple[Feeder, ...]:
        return tuple({id(found): found for found in (self.entry, *self.blocks)}.values())

    def _stream_after(self, index: int) -> Frame:
        return self.blocks[index].stream

    @property
    def _within_group(self) -> Frame:
        return any_frame(self.placement.size, self.placement.target).stream

    def _before_block(self, at: Block) -> Frame:
        if at.added:
            return self._within_group
        return self._stream_after(at.source - 1) if at.source else self.entry.stream

    def _before_last_norm(self, at: Block) -> Frame:
        return self.blocks[at.source].inputs if at.closes else self._within_group

    def _stream_read(self, row: str, at: Block) -> Frame:
        if self.placement.spec.stack_of(row) != self.placement.stack:
            return self._stream_after(-1)
        if self.placement.is_between_norms(row):
            return self._output(self.placement.first, at).read
        return self._before_block(at)

    def _stream_written(self, row: str, at: Block) -> Frame:
        return self._before_last_norm(at) if self.placement.is_between_norms(row) else self._before_block(at)

    def _normed(self, norm: str, at: Block) -> Normed:
        if norm != self.placement.first:
            return super()._normed(norm, at)
        gain, bias = (np.ones(self.placement.size), None) if at.added else self.affine(norm, at.source)
        behind = self.blocks[at.source].gains if at.closes else np.ones(self.placement.target)
        return normed(self._before_block(at), gain, bias, damped(gain, behind))

    def norm(self, row: str, at: Block, suffix: str) -> Vector:
        if row != self.placement.last:
            return super().norm(row, at, suffix)
        if at.closes:
            return _feeding(self.blocks[at.source], suffix)
        return _reading(self._within_group, 0.0 if suffix == "bias" else 1.0, suffix)

    def spare(self, row: str, at: Block) -> Spare | None:
        """They read the stream as it is, and write what has to be added to it."""
        if row not in (self.placement.up, self.placement.down):
            return None
        output = self._output(self.placement.first, at)
        assert output.carried.back is not None
        if row == self.placement.up:
            return Spare(output.carried.back.rows, self.placement.size)
        wanted = self._before_last_norm(at).forth
        return Spare(lambda start, stop: output.turned(wanted, start, stop), self.placement.size)


def _typed(frame: Frame) -> Expansion:
    return dense(frame.forth.size, frame.forth.target_size, frame)


def _feeding(found: Feeder, suffix: str) -> Vector:
    """The parameters of a norm that writes a frame: gains of its own, and the source's bias in that frame."""
    where, rule = _typed(found.stream), "LayerNorm into a frame"
    if suffix == "bias":
        return Vector(where, np.ones(where.target_size), rule=f"{rule}, bias")
    return Vector(where, np.zeros(where.target_size), rule=rule, rest=found.gains)


def _reading(frame: Frame, values: np.ndarray | float, suffix: str) -> Vector:
    """The parameters of a norm that reads a frame: none of the source's."""
    where, rule = _typed(frame), "LayerNorm of a frame" + (", bias" if suffix == "bias" else "")
    return Vector(where, np.zeros(where.target_size), rule=rule, rest=values)


@dataclass(frozen=True)
class SolvedFrames:
    """The frames of a plan, stream by stream; a row reads one stream and may write another."""

    streams: tuple[Solved, ...]

    def types(self, row: str, at: Block) -> tuple[Expansion | None, Expansion | None]:
        """What a row there reads and what it writes, as far as frames carry it."""
        read = (found for stream in self.streams if (found := stream.read(row, at)))
        written = (found for stream in self.streams if (found := stream.written(row, at)))
        return next(read, None), next(written, None)

    def norm(self, row: str, at: Block, suffix: str) -> Vector | None:
        """The parameters of a norm that feeds or reads a frame."""
        return next((stream.norm(row, at, suffix) for stream in self.streams if row in stream.placement.norms), None)

    def spare(self, row: str, at: Block) -> Spare | None:
        """The spare neurons of an MLP that converts one frame into the next."""
        return next((found for stream in self.streams if (found := stream.spare(row, at))), None)

    def of_stack(self, stack: str) -> Solved | None:
        """The frames of the stream that these blocks add to."""
        return next((stream for stream in self.streams if stream.placement.stack == stack), None)

    def ways_back(self, width: int) -> list[np.ndarray]:
        """The matrices that turn hidden states of the target into the source's: one for every frame they may be in."""
        outputs = [output for stream in self.streams for output in stream.outputs]
        return [back.rows(0, back.size) for frame in outputs if (back := frame.back) and back.target_size == width]


def solve(framed: tuple[FramePlacement, ...], affine: Affine) -> SolvedFrames:
    """Solve for every frame of a plan, from the gains of the norms that feed the streams."""

    def fed(placement: FramePlacement, norm: str, index: int) -> Feeder:
        return feeder(affine(norm, index)[0], placement.target, norm.replace("*", str(index)))

    return SolvedFrames(tuple(_solved(placement, affine, fed) for placement in framed))


def outline(framed: tuple[FramePlacement, ...]) -> SolvedFrames:
    """As many frames in the same places, without reading a gain: their numbers are others."""

    def fed(placement: FramePlacement, norm: str, index: int) -> Feeder:
        return replace(any_frame(placement.size, placement.target))  # each norm's own, for `feeders` to count

    def ones(norm: str, index: int) -> tuple[np.ndarray, None]:
        return np.ones(framed[0].spec.side_size(framed[0].spec.rows[norm].reads) or 0), None

    return SolvedFrames(tuple(_solved(placement, ones, fed) for placement in framed))


def _solved(placement: FramePlacement, affine: Affine, fed: Callable[[FramePlacement, str, int], Feeder]) -> Solved:
    began = time.monotonic()
    entry = fed(placement, placement.entry, 0) if placement.entry else None
    if isinstance(placement, PostNormFrame):
        blocks = tuple(fed(placement, placement.last, index) for index in range(placement.sets))
        # Linear maps can write any frame: that of the first block, which can then be used several times.
        return SolvedPostNorm(placement, affine, entry or blocks[0], time.monotonic() - began, blocks)
    assert isinstance(placement, PreNormFrame)
    entry = entry or any_frame(placement.size, placement.target)
    return SolvedPreNorm(placement, affine, entry, time.monotonic() - began)
