"""Numbers written over others: over all of a tensor, or over parts of it, one after the other."""

from __future__ import annotations

import torch

from lemonx.tracing.axes import Axis, data, fused, part, split
from lemonx.tracing.operations import Op, rule
from lemonx.tracing.rules.pointwise import broadcast, constants, pin, short
from lemonx.tracing.tracer import ZERO, Tracer
from lemonx.tracing.values import Info


@rule("copy")
def copied(tracer: Tracer, op: Op) -> None:
    """Numbers written over others: of those that were there, nothing is left."""
    source = tracer.info(op.args[1])
    if source is not None and tracer.info(op.args[0]) is None and op.out._is_view() and _piece(tracer, op, source):
        return
    axes = broadcast(tracer, op.out.shape, [op.args[1]])
    before = tracer.info(op.args[0])
    if source is not None and before is not None:
        for place in range(len(axes)):
            if short(source, len(axes), place):
                axes[place] = before.axes[place]
                tracer.act([axes[place]], "one number is written to all entries")
    if source is None:  # a constant over something tracked
        axes = broadcast(tracer, op.out.shape, [op.args[0]])
        found = constants(tracer, axes, [op.args[1]])
        pin(tracer, axes, found)
        tracer.act([axis for axis, how in zip(axes, found, strict=True) if how - {ZERO}])
    tracer.put(op.out, axes)


def _piece(tracer: Tracer, op: Op, source: Info) -> bool:
    """Numbers written to a part of a tensor that others are written to as well: axes of it are sums.

    An axis of which single entries are chosen to write to, one after the other, is one of the inputs.
    """
    view, base = op.out, op.out._base
    if base is None or (base not in tracer.infos and base not in tracer.blank):
        return False
    if (places := _within(view, base)) is None:
        return False
    if base not in tracer.infos:
        kinds = [Axis if place in places else data for place in range(base.dim())]
        axes = [None if size == 1 else kind(size) for kind, size in zip(kinds, base.shape, strict=True)]
        tracer.infos[base] = Info(axes)
    known, rest = tracer.infos[base], view.storage_offset() - base.storage_offset()
    starts = [0] * base.dim()
    for place in sorted(range(base.dim()), key=lambda p: -base.stride()[p]):
        starts[place], rest = divmod(rest, base.stride()[place]) if base.shape[place] > 1 else (0, rest)
    axes = [None] * (view.dim() - len(source.axes)) + list(source.axes)
    for place, whole in enumerate(known.axes):
        if whole is None:
            continue
        if place not in places:
            tracer.fix(whole, "single entries of it are written")
            continue
        at = places[place]
        here, axis = part(whole, starts[place], starts[place] + view.shape[at]), axes[at]
        if here is not None and axis is not None:
            axes[at] = tracer.unified(here, axis)
        elif here is not None:
            tracer.act([here], "one number is written to all entries")
            axes[at] = here
    known.silent, known.version = None, None
    tracer.infos[view] = Info(axes)
    tracer.fresh += [base, view]
    return True


def _within(view: torch.Tensor, base: torch.Tensor) -> dict[int, int] | None:
    """The axis of a view that each axis of its base is; single entries may be selected from others."""
    found: dict[int, int] = {}
    rest = [place for place in range(base.dim()) if base.shape[place] > 1]
    for at, size in enumerate(view.shape):
        if size == 1:
            continue
        while rest and (base.stride()[rest[0]] != view.stride()[at] or base.shape[rest[0]] < size):
            rest.pop(0)
        if not rest:
            return None
        found[rest.pop(0)] = at
    return found


@rule("pixel_shuffle")
def shuffled(tracer: Tracer, op: Op) -> None:
    """Channels that become pixels: each channel of the result was so many in a row."""
    axes, times = tracer.axes(op.args[0]), op.args[1] ** 2
    channels = axes[-3]
    if channels is None or op.out.shape[-3] == 1:
        tracer.opaque(op, "all channels become pixels")
        return
    outer, inner = split(channels, channels.size // times)
    tracer.fix(inner, "it becomes pixels")
    tracer.numbers = (float(times),)
    info = tracer.info(op.args[0])
    pixels = [data(size) if size > 1 else None for size in op.out.shape[-2:]]
    tracer.put(op.out, [*axes[:-3], outer, *pixels], silent=info.silent if info else None)


@rule("pixel_unshuffle")
def unshuffled(tracer: Tracer, op: Op) -> None:
    """Pixels that become channels, as many of each."""
    axes = tracer.axes(op.args[0])
    channels, times = axes[-3], op.args[1] ** 2
    each = data(times)
    made = each if channels is None else fused(channels, each)
    info = tracer.info(op.args[0])
    pixels = [data(size) if size > 1 else None for size in op.out.shape[-2:]]
    tracer.put(op.out, [*axes[:-3], made, *pixels], silent=info.silent if info else None)
