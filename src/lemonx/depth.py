"""Lossless depth expansion: where added blocks stand, and what is silenced in them.

An added block stands right after the block it comes from. Whatever writes the stream in it writes nothing
(type 1: zeros; type 2: copies that cancel), so the stream passes unchanged.

Post-LN has norms *in* the stream. There the source block's last norm and all norms of the added blocks lose
their affine part, and the last norm of the group takes it: Norm(Norm(x)) = Norm(x) up to eps. (The paper
prints the group in the other order, which is not lossless: docs/errata.md.)

Paper: section 4.3 and appendix D.
"""

from __future__ import annotations

from dataclasses import dataclass

from lemonx.errors import Refused
from lemonx.operators import CANCEL, KEEP, SILENT
from lemonx.rows import IDENTITY, Row
from lemonx.spec import Spec, Stack


@dataclass(frozen=True)
class Block:
    """A block of the target: the source block it comes from, and its place among that one's copies."""

    source: int
    added: bool
    closes: bool


def arrange(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """The blocks of a stack of `target` blocks, added ones spread evenly and next to their origin.

    >>> [(block.source, block.added) for block in arrange("layers", Stack(2, "residual"), 3)]
    [(0, False), (1, False), (1, True)]
    """
    extra = target - stack.size
    if extra and stack.size <= stack.pinned:
        raise Refused(
            f"{name} has only blocks that change the shape of their input, and none of them can be copied: "
            f"its depth must stay {stack.size}"
        )
    # Whole periods are added after a period, so that what follows keeps its phase; the rest goes last.
    period = min(stack.period, stack.size - stack.pinned) or 1
    added, rest = divmod(extra, stack.period)
    units = max(1, (stack.size - stack.pinned) // period)
    order: list[tuple[int, bool]] = [(i, False) for i in range(stack.pinned)]
    for unit in range(units):
        first = stack.pinned + unit * period
        members = list(range(first, first + period if unit < units - 1 else stack.size))
        order += [(i, False) for i in members]
        times = (unit + 1) * added // units - unit * added // units
        copied = (members[-stack.period :] * stack.period)[: stack.period]
        order += [(i, True) for i in copied] * times
    order += [(stack.size - 1, True)] * rest
    return tuple(
        Block(source, is_added, closes=i + 1 == len(order) or order[i + 1][0] != source)
        for i, (source, is_added) in enumerate(order)
    )


def on_top(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """The source's blocks as they are, then added copies of them in turn: all that is new is on top.

    >>> [(block.source, block.added) for block in on_top("layers", Stack(2, "residual"), 5)]
    [(0, False), (1, False), (0, True), (1, True), (0, True)]
    """
    copied = range(stack.pinned, stack.size)
    if target > stack.size and not copied:
        return arrange(name, stack, target)  # which says why not
    order = [(i, False) for i in range(stack.size)]
    order += [(copied[i % len(copied)], True) for i in range(target - stack.size)]
    return tuple(Block(source, added, closes=True) for source, added in order)


def in_stream(row: Row, stream: str) -> bool:
    """A norm that stands in the stream itself: Post-LN."""
    return row.is_norm and stream in row.reads.axes and stream in row.writes.axes


def stream_norms(spec: Spec, stack: str) -> list[str]:
    """The norms in the stream of a stack's blocks, in order; Pre-LN blocks have none."""
    stream = spec.stacks[stack].stream
    return [name for name, row in spec.rows.items() if name.startswith(f"{stack}.*.") and in_stream(row, stream)]


def mode(row: Row, last_norm: bool, stream: str, block: Block, depth_type: int) -> str:
    """What becomes of a row in this block; `last_norm`: the last norm in the stream of a Post-LN block."""
    if in_stream(row, stream):
        takes_affine = block.closes if last_norm else not block.added
        return KEEP if takes_affine else IDENTITY
    if block.added and stream in row.writes.axes:
        return SILENT if depth_type == 1 else CANCEL
    return KEEP
