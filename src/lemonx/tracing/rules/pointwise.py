"""Operations on entries: sums, products with what is constant, and functions of single entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lemonx.tracing.axes import Axis, data, is_data, say
from lemonx.tracing.operations import Op, Scalar, rule
from lemonx.tracing.rules import branches, normalising
from lemonx.tracing.rules.weight_norms import over_lengths
from lemonx.tracing.tracer import UNIFORM, VARIES, ZERO, Tracer
from lemonx.tracing.values import Carry, Dot, Info, Norm, Normed, Spread, Square, Token

# What moves numbers and changes none.
SAME = ("clone", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "positive")


def broadcast(tracer: Tracer, shape: Sequence[int], operands: Sequence[Any]) -> list[Axis | None]:
    """The axes of a result, those of all tracked operands made one."""
    axes: list[Axis | None] = [None] * len(shape)
    for operand in operands:
        if (info := tracer.info(operand)) is not None:
            for place, axis in enumerate(reversed(info.axes), 1):
                axes[-place] = tracer.unified(axes[-place], axis)
    return [axis if axis is not None or size == 1 else data(size) for axis, size in zip(axes, shape, strict=True)]


def constants(tracer: Tracer, axes: Sequence[Axis | None], operands: Sequence[Any]) -> list[set[str]]:
    """How the constants among the operands are along each axis of the result."""
    found: list[set[str]] = [set() for _ in axes]
    for operand in operands:
        if isinstance(operand, torch.Tensor) and tracer.info(operand) is None:
            for place in range(1, len(axes) + 1):
                axis = axes[-place]
                if axis is None or is_data(axis):
                    continue
                wide = place <= operand.dim() and operand.shape[-place] > 1
                how = tracer.along(operand, operand.dim() - place) if wide else UNIFORM
                if not wide and not operand.is_meta and tracer.along(operand, None) == ZERO:
                    how = ZERO
                found[-place].add(how)
        elif isinstance(operand, bool | int | float):
            for place in range(1, len(axes) + 1):
                found[-place].add(ZERO if operand == 0 else UNIFORM)
    return found


def pin(tracer: Tracer, axes: Sequence[Axis | None], found: Sequence[set[str]]) -> None:
    """What a constant tells apart stays as it is."""
    for axis, how in zip(axes, found, strict=True):
        if VARIES in how:
            tracer.fix(axis, "a constant has a number of its own for every entry")


def weights(tracer: Tracer, operands: Sequence[Any]) -> bool:
    """Whether all operands are made of parameters and numbers alone."""
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    return all(
        ((info := tracer.info(t)) is not None and info.weight) or (info is None and t.numel() == 1) for t in tensors
    )


def origins(tracer: Tracer, dims: int, operands: Sequence[Any]) -> tuple[frozenset[tuple[str, int]], ...]:
    """The axes of parameters that the axes of a result are."""
    found: list[frozenset[tuple[str, int]]] = [frozenset()] * dims
    for operand in operands:
        info = tracer.info(operand)
        for place, origin in enumerate(reversed(info.origins) if info else (), 1):
            found[-place] |= origin
    return tuple(found)


def silenced(*infos: Info | None) -> frozenset[str] | None:
    """The parameters without which all of these are zero."""
    if any(info is None or info.silent is None for info in infos):
        return None
    return frozenset().union(*(info.silent or () for info in infos if info))


@rule(*SAME)
def same(tracer: Tracer, op: Op) -> None:
    out = op.out[0] if isinstance(op.out, tuple) else op.out
    info = tracer.info(op.args[0])
    assert info is not None
    tracer.keep(info.value)
    floating = out.is_floating_point() == op.args[0].is_floating_point()
    if not floating:  # numbers were cut to whole ones
        tracer.act(info.axes)
    tracer.put(
        out, info.axes, weight=info.weight, linear=info.linear and floating, origins=info.origins, offset=info.offset,
        value=info.value if floating else None, token=info.token if floating else Token(), silent=info.silent,
        carries=info.carries if floating else (), rows=info.rows, shaped=info.shaped if floating else None,
    )  # fmt: skip


@rule("where", "masked_fill")
def chosen(tracer: Tracer, op: Op) -> None:
    """One of two numbers, as a condition says: linear in both where the condition is the same for all entries."""
    condition, first, second = op.args if op.name == "where" else (op.args[1], op.args[0], op.args[2])
    axes = broadcast(tracer, op.out.shape, [first, second, condition])
    conditions, found = constants(tracer, axes, [condition]), constants(tracer, axes, [first, second])
    pin(tracer, axes, conditions)
    pin(tracer, axes, found)
    for place, axis in enumerate(axes):
        known = [info for info in (tracer.info(first), tracer.info(second)) if info is not None]
        is_short = any(short(info, len(axes), place) for info in known)
        if tracer.info(condition) is not None or is_short or found[place] - {ZERO, VARIES}:
            tracer.act([axis])
    tracer.put(op.out, axes)


@rule("pointwise", "copysign", "clamp", "hardswish", "hardsigmoid", "hardtanh", "softplus")
def pointwise(tracer: Tracer, op: Op) -> None:
    """A function of single entries; anything may be done to them, in any number of operands."""
    operands = op.tensors
    axes = broadcast(tracer, op.out.shape, operands)
    pin(tracer, axes, constants(tracer, axes, operands))
    weight = weights(tracer, operands)
    info = tracer.info(operands[0])
    if len(operands) == 1 and info is not None and normalising.changed(tracer, op, info):
        return
    tracer.act(axes)
    tracer.put(
        op.out, axes, weight=weight, linear=False, origins=origins(tracer, op.out.dim(), operands) if weight else ()
    )
    if len(operands) == 1 and info is not None:
        branches.acted(tracer, op, info)


@rule("relu", "relu6")
def relu(tracer: Tracer, op: Op) -> None:
    """It leaves what is not below zero, as the sum of a block that ends in it is."""
    info = tracer.info(op.args[0])
    assert info is not None
    stay = tuple(c for c in info.carries if op.name == "relu" and c.token.positive and not c.norms)
    tracer.act(info.axes)
    tracer.put(op.out, info.axes, linear=False, token=Token(positive=True), silent=info.silent, carries=stay)
    branches.acted(tracer, op, info)


@rule("_prelu_kernel")
def leaky(tracer: Tracer, op: Op) -> None:
    """A slope for every channel, or one for all, below zero."""
    axes = broadcast(tracer, op.out.shape, op.tensors)
    pin(tracer, axes, constants(tracer, axes, op.tensors))
    tracer.act(axes)
    tracer.put(op.out, axes)


@rule("neg")
def negated(tracer: Tracer, op: Op) -> None:
    info = tracer.info(op.args[0])
    assert info is not None
    known = {"weight": info.weight, "linear": info.linear, "origins": info.origins, "offset": -info.offset}
    tracer.put(op.out, info.axes, silent=info.silent, **known)
    branches.rescaled(tracer, info)


@rule("add", "sub", "rsub")
def added(tracer: Tracer, op: Op) -> None:
    first, second = op.args[:2]
    alpha = op.arg(2, "alpha", 1)
    one, two = tracer.info(first), tracer.info(second)
    number = next((float(x) for x in (first, second) if isinstance(x, bool | int | float)), None)
    single = number is not None and (one or two) is not None
    if number == 0 and op.name == "add" and alpha == 1:  # what Python's sum begins with
        same(tracer, replace(op, args=(first if one is not None else second,)))
        return
    if single and number is not None and _with_number(tracer, op, one or two, number):
        return
    if normalising.centred(tracer, op, one, two) or _biased(tracer, op, one, two):
        return
    axes = broadcast(tracer, op.out.shape, [first, second])
    found = constants(tracer, axes, [first, second])
    pin(tracer, axes, found)
    for place, (axis, how) in enumerate(zip(axes, found, strict=True)):
        is_short = any(info is not None and short(info, len(axes), place) for info in (one, two))
        if how - {ZERO, VARIES} or (is_short and (one is not None and two is not None)):
            tracer.act([axis], "one number is added to all entries")
    _sum_of(tracer, op, axes, one, two, zero=all(how <= {ZERO} for how in found), alpha=alpha)
    branches.added(tracer, op, one, two)


def short(info: Info, dims: int, place: int) -> bool:
    """Whether an operand is repeated along an axis of the result."""
    at = place - (dims - len(info.axes))
    return at < 0 or info.axes[at] is None


def _sum_of(
    tracer: Tracer, op: Op, axes: list[Axis | None], one: Info | None, two: Info | None, *, zero: bool, alpha: Any
) -> None:
    weight = weights(tracer, op.args[:2])
    silent = silenced(one, two) if one and two else None
    own = tracer.put(
        op.out, axes, weight=weight, linear=all(info.linear for info in (one, two) if info), silent=silent,
        origins=origins(tracer, op.out.dim(), op.args[:2]) if weight else (),
    )  # fmt: skip
    if own is None or weight or op.name == "rsub":
        return
    first, second = (one, two) if op.name == "add" and alpha == 1 else (one, None)
    pairs = [(first, two), (second, one)]
    for stays, vanishes in pairs:
        if stays is None or vanishes is None or vanishes.silent is None:
            continue
        if stays.carries and normalising.shape_of(stays) == list(op.out.shape):
            own.carries = tuple(carry.plus(vanishes.silent) for carry in stays.carries)
            _mark_early(tracer, axes, stays, vanishes.silent)
            return


def _mark_early(tracer: Tracer, axes: list[Axis | None], stream: Info, written: frozenset[str]) -> None:
    """What was computed in front of a norm in the stream and is added behind it: no frame is the same on both sides."""
    passed = {norm.gain for carry in stream.carries for norm in carry.norms}
    latest = max((tracer.used.get(gain or "", -1) for gain in passed), default=-1)
    if any(tracer.used.get(name, latest) < latest for name in written):
        for axis in axes:
            if axis is not None and not is_data(axis):
                say(axis, "mixed", tracer.why("what is computed in front of a norm is added behind it"))


def _with_number(tracer: Tracer, op: Op, info: Info | None, number: float) -> bool:
    """A number added to a weight is its offset, to a mean square its eps."""
    assert info is not None
    if isinstance(info.value, Spread) and op.name == "add":
        return normalising.with_eps(tracer, op, info, number)
    if info.weight and op.name == "add" and info.linear:
        tracer.put(
            op.out, info.axes, weight=True, linear=info.linear, origins=info.origins, offset=info.offset + number
        )
        return True
    return False


def _biased(tracer: Tracer, op: Op, one: Info | None, two: Info | None) -> bool:
    """The bias of a norm: added behind its gain."""
    if op.name != "add" or op.arg(2, "alpha", 1) != 1 or one is None or two is None:
        return False
    normed, bias = (one, two) if isinstance(one.value, Normed) else (two, one)
    value = normed.value
    if not isinstance(value, Normed) or value.raw or value.norm.bias or not _fits(value.norm, bias):
        return False
    norm = value.norm
    tracer.keep(value)
    axes = [*normed.axes[:-1], tracer.unified(normed.axes[-1], bias.axes[-1])]
    norm.bias, norm.writes = bias.parameter, axes[-1]
    own = tracer.put(op.out, axes, value=Normed(norm, raw=False), silent=silenced(normed, bias), carries=normed.carries)
    return own is not None


def _fits(norm: Norm, weight: Info) -> bool:
    """Whether a weight has one number for every entry that a norm writes, and is a parameter as it is."""
    one = sum(axis is not None for axis in weight.axes) == 1 and weight.axes[-1] is not None
    return one and weight.parameter is not None and not weight.offset


@rule("mul", "div")
def multiplied(tracer: Tracer, op: Op) -> None:
    first, second = op.args[:2]
    one, two = tracer.info(first), tracer.info(second)
    if one is not None and two is not None:
        _product(tracer, op, one, two)
        return
    info, factor = (one, second) if one is not None else (two, first)
    assert info is not None
    single = not isinstance(factor, torch.Tensor) or factor.numel() == 1
    if (op.name == "div" and one is None) or op.kwargs.get("rounding_mode"):
        pointwise(tracer, op)
        return
    if single and isinstance(factor, torch.Tensor) and factor.is_meta:
        single = False
    if single:
        number = float(factor)
        _scaled(tracer, op, info, 1.0 / number if op.name == "div" and number else number)
        return
    axes = broadcast(tracer, op.out.shape, [first, second])
    pin(tracer, axes, constants(tracer, axes, [first, second]))
    tracer.put(op.out, axes, silent=info.silent)


def _scaled(tracer: Tracer, op: Op, info: Info, number: float) -> None:
    """A product with one number: linear. Where the sizes decide the number, the result is another space."""
    value, axes = None, broadcast(tracer, op.out.shape, op.args[:2])
    tracer.numbers = (number,)
    if isinstance(info.value, Dot):
        tracer.keep(info.value)
        tracer.numbers, value = (), Dot(info.value.pair, info.value.factor * number)
    elif isinstance(info.value, Spread):
        value = None
    elif (tracer.path, len(tracer.calls[tracer.path])) in tracer.scaled and not info.weight:
        place = max((p for p, axis in enumerate(axes) if axis is not None and not is_data(axis)), default=None)
        if place is not None:
            reads = axes[place]
            assert reads is not None
            axes[place] = Axis(reads.size)
            made = Scalar(reads, axes[place] or reads, number, tracer.why("a number of the width's"), tracer.path)
            tracer.scalars.append(made)
            tracer.numbers = ()
    same = number == 1.0
    tracer.put(
        op.out, axes, weight=info.weight, linear=info.linear, origins=info.origins, offset=info.offset * number,
        silent=info.silent, value=info.value if same else value, token=info.token if same else Token(),
        carries=info.carries if same else (),
    )  # fmt: skip
    if same:
        tracer.keep(info.value)
    else:
        branches.rescaled(tracer, info)


def _product(tracer: Tracer, op: Op, one: Info, two: Info) -> None:
    if op.name == "mul" and one.token is two.token and normalising.shape_of(one) == normalising.shape_of(two):
        squared(tracer, op, one)
        return
    if normalising.divided(tracer, op, one, two) or _with_gain(tracer, op, one, two):
        return
    if normalising.at_unit_length(tracer, op, one, two) or over_lengths(tracer, op, one, two):
        return
    axes = broadcast(tracer, op.out.shape, op.args[:2])
    weight = one.weight and two.weight
    for place, axis in enumerate(axes):
        if not any(short(info, len(axes), place) for info in (one, two)) or op.name == "div":
            tracer.act([axis], "two activations are multiplied")
    silent = one.silent
    if op.name == "mul" and two.silent is not None and (silent is None or op.args[0].numel() == 1):
        silent = two.silent  # of a map times a number that is learned, the map
    tracer.put(op.out, axes, weight=weight, linear=False, silent=silent, carries=_times_one(tracer, op, one, two),
               origins=origins(tracer, op.out.dim(), op.args[:2]) if weight else ())  # fmt: skip


def _times_one(tracer: Tracer, op: Op, one: Info, two: Info) -> tuple[Carry, ...]:
    """Streams that are multiplied by a parameter of one number: with that at one they stay what they are."""
    stream, factor = (one, two) if two.weight else (two, one)
    name = next(iter(factor.silent or ()), "") if op.name == "mul" and factor.weight and not any(factor.axes) else ""
    as_it_is = name in tracer.parameters and factor.flat is tracer.parameters[name].flat
    if not as_it_is or normalising.shape_of(stream) != list(op.out.shape):
        return ()
    return tuple(carry.times(name) for carry in stream.carries if not carry.norms)


def squared(tracer: Tracer, op: Op, info: Info) -> None:
    """A square waits for what is done with it."""
    centred = info.value if isinstance(info.value, normalising.Centred) else None
    tracer.keep(info.value if centred else None)
    if info.weight:
        tracer.act(info.axes)
        tracer.put(op.out, info.axes, weight=True, linear=False, origins=info.origins)
        return
    tracer.put(op.out, info.axes, value=Square(info.token, list(info.axes), centred))


@rule("pow")
def power(tracer: Tracer, op: Op) -> None:
    info = tracer.info(op.args[0])
    if info is not None and op.args[1] == 2 and not isinstance(op.args[1], torch.Tensor):
        squared(tracer, op, info)
    else:
        pointwise(tracer, op)


def _with_gain(tracer: Tracer, op: Op, one: Info, two: Info) -> bool:
    """The gain of a norm, one number for every entry."""
    normed, gain = (one, two) if isinstance(one.value, Normed) else (two, one)
    value = normed.value
    if op.name != "mul" or not isinstance(value, Normed) or not value.raw or gain.axes[-1:] == [None]:
        return False
    norm, plain = value.norm, gain.parameter is not None
    if not plain or sum(axis is not None for axis in gain.axes) != 1 or (norm.gain or gain.parameter) != gain.parameter:
        return False
    if gain.offset and norm.kind != "rms":
        return False
    tracer.keep(value)
    if norm.writes is None:
        norm.writes, norm.gain, norm.offset = gain.axes[-1], gain.parameter, gain.offset
    axes = [*normed.axes[:-1], norm.writes]
    known = tracer.parameters[gain.parameter or ""]
    tracer.put(op.out, axes, value=Normed(norm, raw=False), silent=known.silent, carries=normed.carries)
    return True
