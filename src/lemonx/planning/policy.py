"""A policy for the rows of a spec: what a method makes of copies, of added blocks, and of further units.

LEMON is one policy; every method it is compared with is another (methods/), so none of them needs to know an
architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from lemonx.algebra.free_parameters import BEFORE, EVEN, INTERLEAVED, Free
from lemonx.algebra.recipes import KEEP, MUTED
from lemonx.errors import Refused
from lemonx.planning import depth
from lemonx.planning.half_silent import halved
from lemonx.specs.rows import Row
from lemonx.specs.spec import Block, Spec, Stack

# Where the further units of a block come from: copies of its own, the next block's, or copies with noise.
COPY, NEXT, JITTER = "copy", "next", "jitter"

Arrange = Callable[[str, Stack, int], tuple[Block, ...]]
Mode = Callable[[Row, bool, str, Block], str]
Further = Callable[[Block, str], tuple[str, ...]]


@dataclass(frozen=True)
class Change:
    """What is asked for: two specs of one family, with the same spaces and stacks."""

    source: Spec
    target: Spec

    @property
    def widens(self) -> bool:
        return any(self.target.spaces[name].size != space.size for name, space in self.source.spaces.items())

    @property
    def deepens(self) -> bool:
        return any(self.target.stacks[name].size != stack.size for name, stack in self.source.stacks.items())

    @property
    def whole_streams(self) -> bool:
        """Every stream that a norm reads or writes grows by a whole multiple; units may grow at will."""
        streams = {name: space.size for name, space in self.source.spaces.items() if space.kind in ("avg", "zero")}
        return all(self.target.spaces[name].size % size == 0 for name, size in streams.items())


@dataclass(frozen=True)
class GrowthPolicy:
    """How a method reads the rows.

    `lossless`: the type check must pass and the result must verify; otherwise norms are copied as they are and
    `kinds` maps each kind of space to the kind that the method uses instead. `arrange` places added blocks, `mode`
    says what becomes of a row in a block, `further` where further units come from, in order of preference.
    `notes` go into the certificate (a recipe that belongs to the method, such as freezing). `made`: the rows give
    names and shapes only, and this is how the method makes all tensors instead ("fresh", "learned").
    """

    free: Free
    lossless: bool
    mode: Mode
    further: Further
    arrange: Arrange = depth.arrange
    kinds: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    made: str | None = None
    method: str = "lemon"


def copies(block: Block, mode: str) -> tuple[str, ...]:
    """Further units are copies of the block's own, everywhere."""
    return (COPY,)


def kept(row: Row, last_norm: bool, stream: str, block: Block) -> str:
    """Nothing is silenced in any block."""
    return KEEP


# Added blocks write zeros: identity blocks, as LEMON's type 1.
silenced = partial(depth.mode, depth_type=1)


def in_order(sources: Iterable[int]) -> tuple[Block, ...]:
    """Blocks that come from these source blocks, none of them silenced."""
    return tuple(Block(source, added=False, closes=True) for source in sources)


def placed(arrange: Arrange, *notes: str) -> GrowthPolicy:
    """Trained blocks in another order, with nothing silenced: what stacking methods do, and why they are lossy."""
    return GrowthPolicy(EVEN, lossless=False, mode=kept, further=copies, arrange=arrange, notes=notes)


def stacked(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """The whole stack on top of itself until it is full; blocks that change the shape stand first, once.

    >>> [block.source for block in stacked("layers", Stack(2, "residual"), 5)]
    [0, 1, 0, 1, 0]
    """
    depth.require_copyable(name, stack, target)
    first, others = list(range(stack.pinned)), list(range(stack.pinned, stack.size))
    return in_order([*first, *(others[i % len(others)] for i in range(target - len(first)))])


def _own_first(change: Change) -> str | None:
    """A stack that grows deeper, and whose first block has rows of its own and could be moved."""
    for name, stack in change.source.stacks.items():
        own = any(row.startswith(f"{name}.0.") for row in change.source.rows)
        if own and not stack.pinned and change.target.stacks[name].size != stack.size:
            return name
    return None


def lemon(change: Change, free: Free) -> GrowthPolicy:
    """LEMON: copies differ by their fan-out, or by their fan-in inside silent blocks, where the fan-out is zero."""

    def further(block: Block, mode: str) -> tuple[str, ...]:
        if not block.added or mode not in (KEEP, MUTED) or free.depth_type == 2 or free.ramp:
            return (COPY,)
        return (NEXT, JITTER) if free.append_next else (JITTER,)

    post_ln = any(depth.stream_norms(change.source, name) for name in change.source.stacks)
    if change.deepens and post_ln and free.placement != INTERLEAVED:
        raise Refused(
            "an added Post-LN layer must stand right behind the one it copies, whose norm it takes over, and "
            f"{free.placement} puts it elsewhere",
            f"leave placement out, or give {INTERLEAVED}",
        )
    if free.placement == BEFORE and (stack := _own_first(change)) is not None:
        raise Refused(
            f"the first layer of {stack} has weights that no other has, so no layer can stand in front of it",
            f"leave placement out, or give {INTERLEAVED}",
        )
    if free.ramp and (post_ln or not change.deepens):
        why = "a copied Post-LN layer norms the stream, so it cannot come in slowly" if post_ln else "no layer is added"
        raise Refused(f"a ramp opens added layers, but {why}", "leave ramp out")
    half = None
    if change.deepens and free.depth_type == 3:
        half = change.source, halved(change.source)
        if not half[1]:
            raise Refused(
                "depth type 3 needs a branch whose last weight writes the stream and reads values, or units of a gated "
                "MLP, and no layer of this model has one",
                "use depth_type: 1",
            )
    mode = partial(depth.mode, depth_type=free.depth_type, half=half)
    return GrowthPolicy(free, lossless=True, mode=mode, further=further, arrange=depth.PLACEMENTS[free.placement])
