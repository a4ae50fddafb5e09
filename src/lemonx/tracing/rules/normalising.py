"""Norms that are written out: squares, means, roots and products that together are one."""

from __future__ import annotations

from dataclasses import replace

from lemonx.tracing.axes import Axis, find, say
from lemonx.tracing.operations import Op
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Carry, Centred, Info, Length, Mean, Norm, Normed, Spread, shape_of

__all__ = ["Centred", "at_unit_length", "centred", "changed", "divided", "shape_of", "start", "through", "with_eps"]


def start(tracer: Tracer, kind: str, info: Info, place: int, eps: float) -> tuple[Norm, list[Axis | None]]:
    """A norm over one axis of a tensor, and the axes of what it writes before its gain."""
    axes = list(info.axes)
    reads = axes[place]
    assert reads is not None
    norm = Norm(kind, reads, Axis(reads.size), eps, tracer.path, tracer.why(f"a norm ({kind})"))
    tracer.norms.append(norm)
    axes[place] = norm.raw
    return norm, axes


def through(info: Info, norm: Norm) -> tuple[Carry, ...]:
    """Streams behind a norm that stands in them."""
    return tuple(carry.through(norm) for carry in info.carries)


def centred(tracer: Tracer, op: Op, one: Info | None, two: Info | None) -> bool:
    """x - mean(x)."""
    if op.name != "sub" or one is None or two is None or not isinstance(two.value, Mean):
        return False
    if two.value.token is not one.token or op.arg(2, "alpha", 1) != 1 or not _reduced(two, one, two.value.axis):
        return False
    tracer.keep(two.value)
    tracer.put(op.out, one.axes, value=Centred(one.token, two.value.axis, two.value.noted), carries=one.carries)
    return True


def with_eps(tracer: Tracer, op: Op, info: Info, number: float) -> bool:
    """mean square + eps, before the root is taken."""
    value = info.value
    if not isinstance(value, Spread) or value.state != "square":
        return False
    tracer.keep(value)
    tracer.put(op.out, info.axes, value=replace(value, eps=value.eps + number))
    return True


# The state of a mean square behind an operation, by the state before it.
_STATES = {
    ("sqrt", "square"): "root",
    ("rsqrt", "square"): "inverse",
    ("reciprocal", "root"): "inverse",
}


def changed(tracer: Tracer, op: Op, info: Info) -> bool:
    """A root, or one over it."""
    value = info.value
    if isinstance(value, Length):
        return _length(tracer, op, info, value)
    if not isinstance(value, Spread):
        return False
    power = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(op.arg(1, default=0)) if op.name == "pow" else op.name
    state = _STATES.get((str(power), value.state))
    if state is None:
        return False
    tracer.keep(value)
    tracer.put(op.out, info.axes, value=replace(value, state=state))
    return True


# A length is not taken to be below this, so that nothing is divided by zero.
_TINY = 1e-6


def _length(tracer: Tracer, op: Op, info: Info, value: Length) -> bool:
    """A length from its square; and one that is kept from being zero."""
    root = op.name == "sqrt" or (op.name == "pow" and op.arg(1) == 0.5)
    kept = op.name in ("clamp_min", "clamp") and op.arg(2, "max") is None and 0 <= float(op.arg(1, "min", 1)) <= _TINY
    if not (root and value.square) and not (kept and not value.square):
        return False
    tracer.keep(value)
    tracer.put(op.out, info.axes, value=Length(value.token, value.axis))
    return True


def at_unit_length(tracer: Tracer, op: Op, one: Info, two: Info) -> bool:
    """x divided by its length: new entries must be zero, and then it is as long as it was."""
    length = two.value
    if op.name != "div" or not isinstance(length, Length) or length.square or one.token is not length.token:
        return False
    places = [p for p, axis in enumerate(one.axes) if axis is not None and find(axis) is find(length.axis)]
    if len(places) != 1 or list(op.out.shape) != shape_of(one) or one.weight:
        return False
    tracer.keep(length)
    say(length.axis, "length", tracer.why("it is divided by its length"))
    tracer.lengths.append((length.axis, tracer.path))
    tracer.put(op.out, one.axes)
    return True


def divided(tracer: Tracer, op: Op, one: Info, two: Info) -> bool:
    """x times one over its root mean square, or the same of x less its mean: a norm."""
    read = op.args[0]
    if op.name == "mul" and isinstance(one.value, Spread):
        one, two, read = two, one, op.args[1]
    spread = two.value
    wanted = "inverse" if op.name == "mul" else "root"
    if not isinstance(spread, Spread) or spread.state != wanted or list(op.out.shape) != shape_of(one):
        return False
    value = one.value
    if spread.kind == "layer":
        of = isinstance(value, Centred) and value.token is spread.token and find(value.axis) is find(spread.axis)
    else:
        of = one.token is spread.token
    places = [p for p, axis in enumerate(one.axes) if axis is not None and find(axis) is find(spread.axis)]
    if not of or len(places) != 1 or not _reduced(two, one, spread.axis):
        return False
    tracer.keep(spread)
    tracer.keep(value if spread.kind == "layer" else None)
    norm, axes = start(tracer, spread.kind, one, places[0], spread.eps)
    tracer.normed(norm, read, op.out, places[0])
    tracer.put(op.out, axes, value=Normed(norm, raw=True), carries=through(one, norm))
    return True


def _reduced(info: Info, whole: Info, axis: Axis) -> bool:
    """Whether one tensor has the axes of another, but for one entry in the place of this axis."""
    if len(info.axes) != len(whole.axes):
        return False
    places = [own is not None and find(own) is find(axis) for own in whole.axes]
    sizes = zip(shape_of(info), shape_of(whole), places, strict=True)
    return sum(places) == 1 and all(one == (1 if here else other) for one, other, here in sizes)
