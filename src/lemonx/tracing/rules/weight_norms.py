"""Weights kept as a direction and a length: w = g v / |v|, in one operation or written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lemonx.tracing.axes import Axis
from lemonx.tracing.operations import Op, rule
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Info, Lengths, WeightNorm, shape_of


def _as_it_is(info: Info | None) -> bool:
    """Whether this is a parameter, with its axes in their order and nothing done to it."""
    if info is None or info.parameter is None or info.offset:
        return False
    return all(origin == {(info.parameter, place)} for place, origin in enumerate(info.origins))


def measured(tracer: Tracer, info: Info, places: Sequence[int], out: Any) -> bool:
    """The lengths of a parameter's vectors over some of its axes, each of them whole."""
    name = info.parameter
    if name is None or info.offset or name not in tracer.parameters:
        return False
    over = frozenset(axis for place in places for _, axis in info.origins[place])
    kept = [origin for place, origin in enumerate(info.origins) if place not in places]
    shape = shape_of(tracer.parameters[name])
    known = over.union(*({axis for _, axis in origin} for origin in kept))
    if over & {axis for origin in kept for _, axis in origin} or any(
        n > 1 and p not in known for p, n in enumerate(shape)
    ):
        return False
    axes = [axis for place, axis in enumerate(info.axes) if place not in places]
    if out.dim() == len(info.axes):
        axes = [None if place in places else axis for place, axis in enumerate(info.axes)]
        kept = [frozenset() if place in places else origin for place, origin in enumerate(info.origins)]
    value = Lengths(name, over, list(tracer.parameters[name].axes))
    tracer.put(out, axes, weight=True, linear=False, origins=tuple(kept), value=value)
    return True


def over_lengths(tracer: Tracer, op: Op, one: Info, two: Info) -> bool:
    """g / |v|, and then v times that."""
    lengths = next((info.value for info in (two, one) if isinstance(info.value, Lengths)), None)
    if lengths is None:
        return False
    other = one if two.value is lengths else two
    if op.name == "div" and other is one and lengths.gain is None and _as_it_is(one) and shape_of(one) == shape_of(two):
        axes: list[Axis | None] = [tracer.unified(a, b) for a, b in zip(one.axes, two.axes, strict=True)]
        value = Lengths(lengths.parameter, lengths.over, lengths.axes, one.parameter)
        tracer.keep(lengths)
        tracer.put(op.out, axes, weight=True, linear=False, origins=two.origins, value=value)
        return True
    if op.name != "mul" or lengths.gain is None or not _as_it_is(other) or other.parameter != lengths.parameter:
        return False
    tracer.keep(lengths)
    _noted(tracer, op.out, other, WeightNorm(lengths.parameter, lengths.gain, lengths.over))
    return True


@rule("_weight_norm_interface")
def weight_norm(tracer: Tracer, op: Op) -> None:
    direction, gain, dim = tracer.info(op.args[0]), tracer.info(op.args[1]), op.arg(2, "dim", 0)
    if direction is None or gain is None or not (_as_it_is(direction) and _as_it_is(gain)):
        tracer.opaque(op, "a weight's direction or length is no parameter as it is")
        return
    dims = len(direction.axes)
    kept = dim % dims
    if direction.axes[kept] is not None:
        tracer.unified(direction.axes[kept], gain.axes[kept])
    over = frozenset(place for place in range(dims) if place != kept)
    _noted(tracer, op.out[0], direction, WeightNorm(direction.parameter or "", gain.parameter or "", over))
    tracer.infos[op.out[1]] = tracer._opaque_info(op.out[1], tracer.why("the lengths of a weight"))


def _noted(tracer: Tracer, out: Any, direction: Info, norm: WeightNorm) -> None:
    if tracer.weight_norms.setdefault(norm.direction, norm) != norm:
        for axis in direction.axes:
            tracer.fix(axis, "one direction has two lengths")
    origins = tuple(frozenset({(norm.weight, place)}) for place in range(len(direction.axes)))
    tracer.put(out, direction.axes, weight=True, origins=origins, silent=frozenset({norm.gain}))
