"""Sums over products: linear maps, convolutions, attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lemonx.tracing.axes import Axis, Misfit, data, find, fused, is_data, say, split
from lemonx.tracing.operations import Op, rule
from lemonx.tracing.rules import branches
from lemonx.tracing.tracer import VARIES, Tracer
from lemonx.tracing.values import Dot, Info, Pair


def contracted(tracer: Tracer, first: tuple[Any, int], second: tuple[Any, int]) -> Pair | None:
    """An axis of one tensor multiplied with one of another and summed over: a map reads, or queries meet keys."""
    (x, place), (y, other) = first, second
    one, two = tracer.info(x), tracer.info(y)
    a, b = tracer.axes(x)[place], tracer.axes(y)[other]
    both = one is not None and two is not None and one.weight and two.weight
    if one is not None and ((both and one.rows and two is not None and not two.rows) or _apart_too(one, place)):
        one = replace(one, weight=False)
    if two is not None and _apart_too(two, other):
        two = replace(two, weight=False)
    for info, at in ((one, place), (two, other)):
        if info is not None and info.weight:
            tracer.read(info, at)
    if a is None or b is None or (is_data(a) and is_data(b)):
        return None
    maps = [info for info in (one, two) if info is not None and info.weight]
    if len(maps) == 1:
        given, axis = ((x, place), b) if one is None else ((y, other), a)
        if (one is not None and two is not None) or not _constant(tracer, *given, axis):
            tracer.unified(a, b)
        return None
    if maps:
        tracer.fix(tracer.unified(a, b), "two weights are multiplied")
        return None
    if one is None or two is None or is_data(a) or is_data(b) or find(a) is find(b):
        tracer.fix(a, "it is summed over with a constant, or with itself")
        tracer.fix(b, "it is summed over with a constant, or with itself")
        return None
    pair = Pair(
        a, b, tracer.why("its entries are multiplied with those of another, as queries and keys are"), tracer.path
    )
    tracer.pairs.append(pair)
    return pair


# Numbers of a constant that are kept, to find them again in a larger model.
_MOST_KEPT = 1_000_000


def _constant(tracer: Tracer, tensor: torch.Tensor, place: int, axis: Axis) -> bool:
    """A map reads numbers that derive from no parameter: which of them are the larger model's is found later."""
    known = tensor.is_floating_point() and not tensor.is_meta and tensor.numel() <= _MOST_KEPT
    if not known or tracer.along(tensor, place) != VARIES:
        return False
    with _disable_current_modes():
        rows = tensor.detach().movedim(place, -1).reshape(-1, tensor.shape[place]).double().clone()
    say(axis, "constant", tracer.why("it meets an axis of the inputs"))
    tracer.constants.append((tracer.path, axis, rows))
    return True


def _apart_too(info: Info, place: int) -> bool:
    """Whether a weight has one axis for what is summed over and for what has a sum of its own: queries, by heads."""
    others = [origin for at, origin in enumerate(info.origins) if at != place]
    return info.weight and bool(info.origins) and any(info.origins[place] & origin for origin in others)


def made(
    tracer: Tracer,
    out: torch.Tensor,
    axes: list[Axis | None],
    operands: list[Any],
    bias: Any = None,
    *,
    plain: bool = True,
) -> None:
    """The result of a map, with a bias perhaps: zero without its weight and its bias.

    `plain`: neither is multiplied by a number.
    """
    infos = [tracer.info(operand) for operand in operands]
    known = tracer.info(bias)
    if known is not None:
        for place, axis in enumerate(reversed(known.axes), 1):
            axes[-place] = tracer.unified(axes[-place], axis)
    elif isinstance(bias, torch.Tensor) and not bias.is_meta and bool(bias.count_nonzero()):
        for axis in axes:
            tracer.fix(axis, "a constant is added")
    weight = all(info is not None and info.weight for info in infos) and (bias is None or (known and known.weight))
    weight = weight and len({info.rows for info in infos if info}) == 1
    origins: list[Any] = []
    if weight and len(infos) == 2 and len(axes) == 2:
        origins = [infos[0].origins[0] if infos[0] else frozenset(), infos[1].origins[1] if infos[1] else frozenset()]
    known_zero = sorted(
        (info for info in infos if info is not None and info.silent is not None), key=lambda i: not i.weight
    )
    silent = known_zero[0].silent if known_zero else None
    if silent is not None and bias is not None:
        silent = silent | known.silent if known is not None and known.silent is not None else None
    tracer.put(out, axes, weight=bool(weight), linear=not weight, origins=tuple(origins), silent=silent)
    branches.mapped(tracer, out, infos, plain=plain and (known is None or known.weight))


@rule("mm", "bmm", "mv", "dot")
def matrix(tracer: Tracer, op: Op) -> None:
    x, y = op.args[:2]
    shared = max(0, y.dim() - 2)
    pair = contracted(tracer, (x, x.dim() - 1), (y, shared))
    one, two = tracer.axes(x), tracer.axes(y)
    batch = [tracer.unified(a, b) for a, b in zip(one[:-2], two[:-2], strict=True)] if y.dim() == 3 else []
    _apart(tracer, op, batch)
    rows = one[-2:-1] if x.dim() > 1 else []
    made(tracer, op.out, [*batch, *rows, *two[shared + 1 :]], [x, y])
    _scores(tracer, op.out, pair)


@rule("linalg_solve_triangular")
def solved(tracer: Tracer, op: Op) -> None:
    """Equations between the steps of a scan, with a system of its own for each unit and any number of right sides."""
    system, right = tracer.axes(op.args[0]), tracer.axes(op.args[1])
    if len(system) != len(right) or not op.kwargs.get("left", True):
        raise Misfit("equations of another layout")
    for axis in system[-2:]:
        tracer.fix(axis, "equations are solved along it")
    tracer.fix(right[-2], "equations are solved along it")
    batch = [tracer.unified(a, b) for a, b in zip(system[:-2], right[:-2], strict=True)]
    _apart(tracer, op, batch)
    known = tracer.info(op.args[1])
    tracer.put(op.out, [*batch, *right[-2:]], silent=known.silent if known else None)


def _apart(tracer: Tracer, op: Op, batch: list[Axis | None]) -> None:
    """Units that each have a map of their own (heads, experts) must be copies."""
    for axis in batch:
        tracer.act([axis], "each entry has a product of its own")


def _scores(tracer: Tracer, out: torch.Tensor, pair: Pair | None) -> None:
    info = tracer.info(out)
    if pair is not None and info is not None:
        info.value = Dot(pair)


@rule("addmm", "addmv", "baddbmm", "addbmm")
def with_bias(tracer: Tracer, op: Op) -> None:
    bias, x, y = op.args[:3]
    beta, alpha = op.kwargs.get("beta", 1), op.kwargs.get("alpha", 1)
    shared = max(0, y.dim() - 2)
    pair = contracted(tracer, (x, x.dim() - 1), (y, shared))
    one, two = tracer.axes(x), tracer.axes(y)
    batch = [tracer.unified(a, b) for a, b in zip(one[:-2], two[:-2], strict=True)] if y.dim() == 3 else []
    _apart(tracer, op, batch)
    axes = [*batch, *(one[-2:-1] if x.dim() > 1 else []), *two[shared + 1 :]]
    made(tracer, op.out, axes, [x, y], bias if beta else None, plain=alpha == 1 and beta in (0, 1))
    if pair is not None:
        pair.factors.add(float(alpha))
        tracer.numbers = ()


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
      "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_cudnn_attention")  # fmt: skip
def attention(tracer: Tracer, op: Op) -> None:
    query, key, value = op.args[:3]
    pair = contracted(tracer, (query, query.dim() - 1), (key, key.dim() - 1))
    if pair is not None:
        scale = op.kwargs.get("scale")
        pair.factors.add(query.shape[-1] ** -0.5 if scale is None else float(scale))
    q, k, v = (tracer.axes(tensor) for tensor in (query, key, value))
    heads = q[1]
    shared = tracer.unified(k[1], v[1])
    if heads is not None and shared is not None and heads.size != shared.size:
        outer, _ = split(heads, shared.size)
        tracer.unified(outer, shared)
    elif shared is not None or heads is not None:
        heads = tracer.unified(heads, shared) if (heads is None) == (shared is None) else heads
    tracer.act([heads, shared], "each head has attention of its own")
    mask = next((m for m in (op.kwargs.get("attn_mask"), op.arg(3)) if isinstance(m, torch.Tensor)), None)
    _masked(tracer, mask, heads)
    out = op.out[0] if isinstance(op.out, tuple) else op.out
    tracer.unified(k[2], v[2])
    tracer.numbers = ()
    info = tracer.info(value)
    tracer.put(out, [q[0], heads, q[2], v[3]], silent=info.silent if info else None)
    for extra in op.out[1:] if isinstance(op.out, tuple) else ():
        if isinstance(extra, torch.Tensor) and extra.numel() and extra.is_floating_point():
            tracer.infos[extra] = tracer._opaque_info(extra, tracer.why("the sums of attention"))


def _masked(tracer: Tracer, mask: torch.Tensor | None, heads: Axis | None) -> None:
    """What is added to the scores of every head."""
    if mask is None or mask.dim() < 4 or mask.shape[-3] == 1:
        return
    info = tracer.info(mask)
    if info is not None:
        tracer.unified(info.axes[-3], heads)
    elif heads is not None and tracer.along(mask, mask.dim() - 3) == "varies":
        tracer.fix(heads, "a constant has a number of its own for every entry")


@rule("convolution", "conv1d", "conv2d", "conv3d", "_convolution")
def convolution(tracer: Tracer, op: Op) -> None:
    x, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    info = tracer.info(weight)
    pixels = [data(size) if size > 1 else None for size in op.out.shape[2:]]
    if info is None:
        raise Misfit("a kernel that is no parameter")
    for axis in info.axes[2:]:
        tracer.fix(axis, "it is an axis of a kernel")
    axes, kernel = tracer.axes(x), list(info.axes)
    if groups == 1:
        reads, writes = (0, 1) if transposed else (1, 0)
        contracted(tracer, (x, 1), (weight, reads))
        channels = kernel[writes]
    else:
        tracer.numbers = tracer.numbers[:-1]  # the groups are an axis, of any size
        if groups == x.shape[1] == weight.shape[0] and weight.shape[1] == 1:
            channels = tracer.unified(axes[1], kernel[0])
            tracer.act([channels], "each channel has a kernel of its own")
            if (name := info.parameter) is not None:
                tracer.depthwise[name] = weight.dim() - 2
        else:
            channels = _in_groups(tracer, op, axes[1], info)
    if (known := tracer.info(bias)) is not None:
        channels = tracer.unified(channels, known.axes[0])
    silent = info.silent
    if silent is not None and bias is not None:
        silent = silent | known.silent if known is not None and known.silent is not None else None
    tracer.put(op.out, [axes[0], channels, *pixels], silent=silent)


def _in_groups(tracer: Tracer, op: Op, channels: Axis | None, kernel: Info) -> Axis | None:
    """What a convolution in groups writes: channels are (group, entry), and each group has a map of its own.

    A group may be copied as a whole, and its entries grow as those of any map do, alike in all groups.
    """
    transposed, groups = op.args[6], op.args[8]
    if tracer.info(op.args[0]) is None or channels is None or is_data(channels) or kernel.axes[0] is None:
        for axis in (channels, *kernel.axes[:2]):
            tracer.fix(axis, "a convolution in groups of the inputs")
        tracer.read(kernel, 0 if transposed else 1)
        written = data(op.out.shape[1]) if transposed else kernel.axes[0]
        return written
    outer, inner = split(channels, groups)
    own, entries = split(kernel.axes[0], groups)
    outer = tracer.unified(outer, own)
    tracer.act([outer], "each group has a map of its own")
    read, write = (entries, kernel.axes[1]) if transposed else (kernel.axes[1], entries)
    if transposed:  # the axis that is read is the one that says which group it is: it cannot be copied
        tracer.fix(outer, "a transposed convolution in groups reads it")
    tracer.read(kernel, 0 if transposed else 1)
    if read is not None and inner.size > 1:
        tracer.unified(read, inner)
    elif inner.size > 1 or (read is not None and read.size > 1):
        raise Misfit("groups of one channel, read by several")
    both = [part for part in (outer, write) if part is not None and part.size > 1]
    return fused(*both) if both else None
