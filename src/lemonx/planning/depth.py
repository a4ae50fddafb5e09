"""Lossless depth expansion: where added blocks stand, and what is silenced in them.

Whatever writes the stream in an added block writes nothing, so the stream passes unchanged and the block may stand
anywhere. Type 1: its writers are zero. Type 2: they are copies that cancel. Type 3: half of the units that a branch
computes are silenced where they are written, zero columns of its last weight, and the other half where they are read,
zero rows of a weight that is a factor of what it computes (values; the ungated half of a gated MLP). So half of the
output weights stay, and every weight has a gradient at the first step. A branch without such a weight has type 1.

Post-LN has norms *in* the stream. There the source block's last norm and all norms of the added blocks lose
their affine part, and the last norm of the group takes it: Norm(Norm(x)) = Norm(x) up to eps, and
algebra/norm_chains.py has what that comes to. (The paper prints the group in the other order,
which is not lossless: docs/errata.md.)

Paper: section 4.3 and appendix D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lemonx.algebra import free_parameters
from lemonx.algebra.norm_chains import Chain
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT
from lemonx.errors import Refused
from lemonx.planning import half_silent
from lemonx.specs.norms import Norm
from lemonx.specs.rows import IDENTITY, Row
from lemonx.specs.spec import Block, Spec, Stack


def arrange(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """The blocks of a stack of `target` blocks, added ones spread evenly and next to their origin.

    >>> [(block.source, block.added) for block in arrange("layers", Stack(2, "residual"), 3)]
    [(0, False), (1, False), (1, True)]
    """
    order = _spread(name, stack, target, before=False)
    return tuple(
        Block(source, is_added, closes=i + 1 == len(order) or order[i + 1][0] != source)
        for i, (source, is_added) in enumerate(order)
    )


def in_front(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """The same, but each added block in front of its origin, so that it reads exactly what its origin reads.

    >>> [(block.source, block.added) for block in in_front("layers", Stack(2, "residual"), 4)]
    [(0, True), (0, False), (1, True), (1, False)]
    """
    return _as_blocks(_spread(name, stack, target, before=True))


def in_the_middle(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """The blocks in the middle of the stack once more behind themselves, in their order.

    >>> [(block.source, block.added) for block in in_the_middle("layers", Stack(4, "residual"), 6)]
    [(0, False), (1, False), (2, False), (1, True), (2, True), (3, False)]
    """
    own = stack.size - stack.pinned
    # Whole periods, so that what follows keeps its phase; the rest goes last.
    whole = (target - stack.size) // stack.period * stack.period
    size = min(whole, own // stack.period * stack.period)
    if not size:
        return arrange(name, stack, target)
    first = stack.pinned + (own - size) // 2 // stack.period * stack.period
    order = [(i, False) for i in range(first + size)]
    order += [(first + i % size, True) for i in range(whole)]
    order += [(i, False) for i in range(first + size, stack.size)]
    return _as_blocks([*order, *[(stack.size - 1, True)] * (target - stack.size - whole)])


# A block of the source, and whether it is a further copy.
_Order = list[tuple[int, bool]]


def _as_blocks(order: _Order) -> tuple[Block, ...]:
    return tuple(Block(source, added, closes=True) for source, added in order)


def _spread(name: str, stack: Stack, target: int, *, before: bool) -> _Order:
    """The order of a stack whose added blocks are spread evenly, behind or `before` the blocks they copy."""
    if len(stack.order) == target:
        return list(stack.order)
    require_copyable(name, stack, target)
    extra = target - stack.size
    # Whole periods are added beside a period, so that what follows keeps its phase; the rest goes last.
    period = min(stack.period, stack.size - stack.pinned) or 1
    added, rest = divmod(extra, stack.period)
    units = max(1, (stack.size - stack.pinned) // period)
    order: _Order = [(i, False) for i in range(stack.pinned)]
    for unit in range(units):
        first = stack.pinned + unit * period
        members = list(range(first, first + period if unit < units - 1 else stack.size))
        times = (unit + 1) * added // units - unit * added // units
        near = members[: stack.period] if before else members[-stack.period :]
        copied = [(i, True) for i in (near * stack.period)[: stack.period]] * times
        own = [(i, False) for i in members]
        order += copied + own if before else own + copied
    return [*order, *[(stack.size - 1, True)] * rest]


def on_top(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """The source's blocks as they are, then added copies of them in turn: all that is new is on top.

    >>> [(block.source, block.added) for block in on_top("layers", Stack(2, "residual"), 5)]
    [(0, False), (1, False), (0, True), (1, True), (0, True)]
    """
    require_copyable(name, stack, target)
    copied = range(stack.pinned, stack.size)
    order = [(i, False) for i in range(stack.size)]
    return _as_blocks([*order, *[(copied[i % len(copied)], True) for i in range(target - stack.size)]])


# Where added blocks stand. The first is what orthogonal growth and LLaMA-Pro do too, the last what MIDAS does.
PLACEMENTS = {"interleaved": arrange, "before": in_front, "stacked": on_top, "middle": in_the_middle}
assert PLACEMENTS.keys() == set(free_parameters.PLACEMENTS)


def require_copyable(name: str, stack: Stack, target: int) -> None:
    """Refused if a stack of `target` blocks needs copies, and every block of the source changes the shape."""
    if target > stack.size and stack.size <= stack.pinned:
        raise Refused(
            f"every layer of {name} changes the shape of its input, so none can be copied",
            f"keep its depth at {stack.size}",
        )


def check_added(source: Spec, target: Spec) -> None:
    """Refused if a stack is to have more blocks, and none can be copied, or a silent one would not be the identity."""
    for name, stack in source.stacks.items():
        require_copyable(name, stack, target.stacks[name].size)
        if stack.still and target.stacks[name].size != stack.size:
            raise Refused(f"{name} cannot grow deeper, since {stack.still}", f"keep its depth at {stack.size}")


def placed(
    name: str, source: Stack, target: Stack, arrange: Callable[[str, Stack, int], tuple[Block, ...]] = arrange
) -> tuple[Block, ...]:
    """Every set of weights of the target's stack as a block, with the set that it comes from."""
    if target.stored != target.size:  # shared, as before: the check has seen to that
        return arrange(name, replace(source, size=source.stored), target.stored)
    blocks = arrange(name, source, target.size)
    if len(source.order) == target.size and [(block.source, block.added) for block in blocks] != [*source.order]:
        raise Refused(
            f"the layers of {name} are of several kinds, so added ones can only stand where the model's class has them",
            "leave placement out",
        )
    return tuple(replace(block, source=source.set_of(block.source)) for block in blocks)


# A spec, and the axes whose units type 3 silences on either side.
Half = tuple[Spec, frozenset[str]]


def in_stream(row: Row, stream: str) -> bool:
    """A norm that stands in the stream itself: Post-LN."""
    return row.is_norm and stream in row.reads.axes and stream in row.writes.axes


def written_stream(spec: Spec, row: Row, stream: str) -> str:
    """The space by which a row of a block writes its stream: what a number makes the stream of, or the stream."""
    like = (axis for axis in row.writes.axes if axis in spec.spaces and spec.spaces[axis].like == stream)
    return stream if stream in row.writes.axes else next(like, stream)


def stream_norms(spec: Spec, stack: str) -> list[str]:
    """The norms in the stream of a stack's blocks, in order; Pre-LN blocks have none."""
    stream = spec.stacks[stack].stream
    return [name for name in spec.order if name.startswith(f"{stack}.*.") and in_stream(spec.rows[name], stream)]


def eps_of(spec: Spec, norm: str, config: Mapping[str, Any]) -> float:
    """The eps of a norm, from config.json or from the code of its model."""
    row = spec.rows[norm]
    assert isinstance(row, Norm)
    where = spec.eps if row.eps is None else row.eps
    return float(config[where] if isinstance(where, str) else where or 0.0)


def chains(
    source: Spec, target: Spec, config: Mapping[str, Any], share: float | None = None
) -> dict[tuple[str, int], tuple[Chain, ...]]:
    """The norms in a row behind the last norm of Post-LN blocks with copies, by stack and set of weights.

    A set that several blocks of the source share has a chain for each of them, in order. `share`: that of small gains,
    if there are to be any.
    """
    found: dict[tuple[str, int], tuple[Chain, ...]] = {}
    small = {} if share is None else {"small": True, "share": share}
    for name, stack in source.stacks.items():
        norms = stream_norms(source, name)
        run = [norm for norm in norms if not getattr(source.rows[norm], "idle", False)]
        eps = eps_of(source, norms[-1], config) if norms else 0.0
        if not eps or target.stacks[name].size == stack.size:
            continue
        counts: dict[int, list[int]] = {}
        for block in placed(name, stack, target.stacks[name]):
            uses = counts.setdefault(block.source, [])
            if block.added:
                uses[-1] += len(run)
            else:
                uses.append(0)
        found |= {(name, i): tuple(Chain(eps, n, **small) for n in uses) for i, uses in counts.items() if any(uses)}
    return found


def mode(row: Row, last_norm: bool, stream: str, block: Block, depth_type: int, half: Half | None = None) -> str:
    """What becomes of a row in this block; `last_norm`: the last norm in the stream of a Post-LN block.

    `half`: for type 3, the spec and the axes whose units are silenced on either side.
    """
    if row.is_factor:
        return IDENTITY if block.added else KEEP
    if in_stream(row, stream):
        takes_affine = block.closes if last_norm else not block.added
        return KEEP if takes_affine else IDENTITY
    if not block.added:
        return KEEP
    writes = stream in row.writes.axes
    if half is not None:
        return half_silent.mode(*half, row, writes, otherwise=SILENT)
    return KEEP if not writes else SILENT if depth_type == 1 else CANCEL
