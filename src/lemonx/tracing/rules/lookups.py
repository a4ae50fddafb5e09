"""Tables, indices, and whatever picks entries by number."""

from __future__ import annotations

import torch

from lemonx.tracing.axes import Axis, Misfit, data, is_data, say
from lemonx.tracing.rules.views import given, known_origins, moved
from lemonx.tracing.tracer import Op, Tracer, rule


def _looked_up(tracer: Tracer, axis: Axis | None, weight: bool) -> None:
    """Rows of a table may be added behind the others; units of an activation stay in place."""
    if axis is not None and not is_data(axis):
        if weight:
            say(axis, "index", tracer.why("its rows are looked up"))
        else:
            tracer.fix(axis, "entries of it are picked by number")


@rule("embedding")
def embedding(tracer: Tracer, op: Op) -> None:
    table, index = tracer.info(op.args[0]), tracer.axes(op.args[1])
    if table is None:
        raise Misfit("a table that is no parameter, and an index that the model computes")
    _looked_up(tracer, table.axes[0], table.weight)
    tracer.exempt |= table.origins[0] if table.origins else frozenset()  # neither written nor read
    if table.parameter:
        tracer.indexed.add(table.parameter)
    tracer.put(op.out, [*index, table.axes[1]], silent=table.silent)


@rule("_embedding_bag", "_embedding_bag_forward_only")
def bag(tracer: Tracer, op: Op) -> None:
    """Sums or means of rows of a table; largest entries are of single ones."""
    table = tracer.info(op.args[0])
    if table is None or any(tracer.info(tensor) for tensor in op.tensors[1:]):
        raise Misfit("a table that is no parameter, or an index that the model computes")
    _looked_up(tracer, table.axes[0], table.weight)
    tracer.exempt |= table.origins[0] if table.origins else frozenset()
    if table.parameter:
        tracer.indexed.add(table.parameter)
    if op.arg(4, "mode", 0) == 2:
        tracer.act([table.axes[1]])
    out, *others = op.out
    tracer.put(out, [None if len(out) == 1 else data(len(out)), table.axes[1]], silent=table.silent)
    for extra in others:
        if extra.is_floating_point() and extra.numel():
            tracer.infos[extra] = tracer._opaque_info(extra, tracer.why("what a bag keeps for its gradient"))


@rule("index")
def indexed(tracer: Tracer, op: Op) -> None:
    info, index = given(tracer, op), list(op.args[1])
    index += [None] * (len(info.axes) - len(index))
    if any(
        tensor is not None and (tensor.dtype in (torch.bool, torch.uint8) or tracer.info(tensor)) for tensor in index
    ):
        _by_mask(tracer, op)
        return
    places = [place for place, tensor in enumerate(index) if tensor is not None]
    for place in places:
        _looked_up(tracer, info.axes[place], info.weight)
    shape = torch.broadcast_shapes(*(index[place].shape for place in places))
    middle = [None if size == 1 else data(size) for size in shape]
    rest = [axis for place, axis in enumerate(info.axes) if place not in places]
    origins = [origin for place, origin in enumerate(known_origins(info)) if place not in places]
    at = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    moved(
        tracer, op.out, info, [*rest[:at], *middle, *rest[at:]],
        [*origins[:at], *[frozenset()] * len(middle), *origins[at:]],
    )  # fmt: skip


def _by_mask(tracer: Tracer, op: Op) -> None:
    """Rows that a mask chooses: their number depends on the inputs, or on what the model computes."""
    info, index = given(tracer, op), list(op.args[1])
    first = next(place for place, tensor in enumerate(index) if tensor is not None)
    mask = index[first]
    alone = sum(tensor is not None for tensor in index) == 1
    if not alone or tracer.info(mask) is not None or mask.dtype != torch.bool:
        raise Misfit("an index that the model computes")
    for axis in info.axes[first : first + mask.dim()]:
        tracer.fix(axis, "a mask chooses from it")
    size = op.out.shape[first]
    axes = [*info.axes[:first], None if size == 1 else data(size), *info.axes[first + mask.dim() :]]
    tracer.put(op.out, axes)


@rule("index_select", "gather", "take_along_dim")
def gathered(tracer: Tracer, op: Op) -> None:
    info, place = given(tracer, op), op.args[1] % op.out.dim()
    if tracer.info(op.args[2]) is not None:
        raise Misfit("an index that the model computes")
    _looked_up(tracer, info.axes[place], info.weight and op.name == "index_select")
    axes = list(info.axes)
    if op.name != "index_select":
        for other, axis in enumerate(axes):
            tracer.fix(axis, "entries are picked by number")
            axes[other] = None if op.out.shape[other] == 1 else data(op.out.shape[other])
    axes[place] = None if op.out.shape[place] == 1 else data(op.out.shape[place])
    moved(tracer, op.out, info, axes, known_origins(info))


@rule("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "cumsum", "cumprod", "logcumsumexp", "tril", "triu")
def along(tracer: Tracer, op: Op) -> None:
    """Entries compared, or summed up, along an axis: of tokens, any; of units, none."""
    info = given(tracer, op)
    for axis in info.axes:
        tracer.fix(axis, "its entries are compared or summed along an axis")
    tracer.act(info.axes)
    tracer.opaque(op, "its entries are compared or summed along an axis")


@rule("index_add", "scatter_add", "scatter_reduce")
def scattered(tracer: Tracer, op: Op) -> None:
    """Rows of tokens or nodes summed by number: linear in the other axes, where rows go whole."""
    place = op.args[1] % op.out.dim()
    index, source = op.args[2], op.args[3]
    reduce = op.arg(4, "reduce", "sum") if op.name == "scatter_reduce" else "sum"
    if tracer.info(index) is not None or tracer.info(source) is None:
        raise Misfit("an index that the model computes, or a constant that is added")
    whole = op.name == "index_add" or all(
        tracer.along(index, other) != "varies" for other in range(index.dim()) if other != place
    )
    if not whole:
        raise Misfit("an index for every entry")
    axes = list(tracer.axes(source))
    base = tracer.axes(op.args[0])
    tracer.fix(axes[place], "rows of it are summed by number")
    for other in range(len(axes)):
        if other != place:
            axes[other] = tracer.unified(base[other], axes[other])
    if reduce not in ("sum", "mean"):
        tracer.act(axes)
    axes[place] = (
        base[place] if tracer.info(op.args[0]) else None if op.out.shape[place] == 1 else data(op.out.shape[place])
    )
    tracer.put(op.out, axes)
