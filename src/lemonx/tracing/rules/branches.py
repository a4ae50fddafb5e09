"""Branches `x + down(act(up(x)))` of two maps: through spare neurons of those, a number can be passed on unchanged."""

from __future__ import annotations

import torch

from lemonx.tracing.operations import Op
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Branch, Info

# Operations with act(a) - act(-a) = a, gelu in both of its approximations.
PASSING = frozenset(("relu", "gelu", "silu"))


def mapped(tracer: Tracer, out: torch.Tensor, operands: list[Info | None], *, plain: bool) -> None:
    """A weight reads a tensor; `plain`: the sums are not multiplied by anything."""
    weights = [info for info in operands if info is not None and info.weight]
    others = [info for info in operands if info is not None and not info.weight]
    name = weights[0].parameter if len(weights) == 1 else None
    own = tracer.info(out)
    if name is None or own is None:
        return
    tracer.maps[name] += 1
    if not others or not plain:
        return
    value = others[0].value
    if isinstance(value, Branch) and value.acted:
        tracer.keep(value)
        own.value = Branch(value.token, (*value.maps, name))
    else:
        own.value = Branch(others[0].flat, (name,))


def rescaled(tracer: Tracer, info: Info) -> None:
    """A weight times a number is another map than the weight is."""
    if info.weight and info.parameter is not None:
        tracer.maps[info.parameter] += 1


def acted(tracer: Tracer, op: Op, info: Info) -> None:
    """An activation, right behind the first map."""
    value, own = info.value, tracer.info(op.out)
    if op.name in PASSING and isinstance(value, Branch) and len(value.maps) == 1 and not value.acted and own:
        own.value = Branch(value.token, value.maps, acted=True)


def added(tracer: Tracer, op: Op, one: Info | None, two: Info | None) -> None:
    """A bias behind a map; or what a branch wrote, added to what it read."""
    own = tracer.info(op.out)
    if op.name != "add" or op.arg(2, "alpha", 1) != 1 or one is None or two is None or own is None:
        return
    for branch, other in ((one.value, two), (two.value, one)):
        if not isinstance(branch, Branch) or branch.acted:
            continue
        if other.weight and not other.rows:
            own.value = branch
        elif len(branch.maps) == 2 and other.flat is branch.token:
            tracer.returned.update(branch.maps)
