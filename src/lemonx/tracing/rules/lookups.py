"""Tables, indices, and whatever picks entries by number."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lemonx.tracing.axes import PRODUCT, Axis, Misfit, data, is_data, leaves, part, say
from lemonx.tracing.operations import Op, rule
from lemonx.tracing.rules.views import given, known_origins, moved
from lemonx.tracing.tracer import UNIFORM, VARIES, ZERO, Tracer
from lemonx.tracing.values import Chosen, Info


def _looked_up(tracer: Tracer, axis: Axis | None, weight: bool) -> None:
    """Rows of a table may be added behind the others; units of an activation stay in place.

    Rows of a grid have a number made of several: with more columns a place would have another one.
    """
    if axis is not None and not is_data(axis):
        if weight:
            say(axis, "index", tracer.why("its rows are looked up"))
            for inner in leaves(axis, PRODUCT)[1:]:
                tracer.fix(inner, "the numbers that rows are looked up by are made of it")
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
    if len(places) == 1 and _sliced(tracer, op, info, places[0], index[places[0]]):
        return
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


def _sliced(tracer: Tracer, op: Op, info: Info, place: int, index: torch.Tensor) -> bool:
    """A list of consecutive numbers, which is a slice."""
    axis = info.axes[place]
    if axis is None or is_data(axis) or index.dim() != 1 or index.is_meta or not len(index):
        return False
    with _disable_current_modes():
        first = int(index[0]) % axis.size
        consecutive = bool((index % axis.size == torch.arange(first, first + len(index))).all())
    if not consecutive or (info.weight and len(index) > 1):  # rows of a table are looked up
        return False
    axes = [*info.axes[:place], part(axis, first, first + len(index)), *info.axes[place + 1 :]]
    moved(tracer, op.out, info, axes, known_origins(info))
    return True


def _by_mask(tracer: Tracer, op: Op) -> None:
    """Rows that a mask chooses: their number depends on the inputs, or on what the model computes."""
    info, index = given(tracer, op), list(op.args[1])
    first = next(place for place, tensor in enumerate(index) if tensor is not None)
    mask = index[first]
    alone = sum(tensor is not None for tensor in index) == 1
    if not alone or tracer.info(mask) is not None or mask.dtype != torch.bool:
        raise Misfit("an index that the model computes")
    size = op.out.shape[first]
    axes = [*info.axes[:first], None if size == 1 else data(size), *info.axes[first + mask.dim() :]]
    tracer.put(op.out, axes, value=Chosen(info.axes[first : first + mask.dim()]))


@rule("index_select", "gather", "take_along_dim")
def gathered(tracer: Tracer, op: Op) -> None:
    info, place = given(tracer, op), op.args[1] % op.out.dim()
    if tracer.info(op.args[2]) is not None:
        raise Misfit("an index that the model computes")
    _looked_up(tracer, info.axes[place], info.weight and op.name == "index_select")
    axes = list(info.axes)
    if op.name != "index_select":
        for other, axis in enumerate(axes):
            if other != place and not _alike(tracer, op, other):
                tracer.fix(axis, "entries are picked by number")
                axes[other] = None if op.out.shape[other] == 1 else data(op.out.shape[other])
    axes[place] = None if op.out.shape[place] == 1 else data(op.out.shape[place])
    moved(tracer, op.out, info, axes, known_origins(info))


def _alike(tracer: Tracer, op: Op, place: int) -> bool:
    """Whether an index picks whole rows: the same number for all entries along an axis."""
    index = op.args[2]
    return index.shape[place] == op.args[0].shape[place] and tracer.along(index, place) != VARIES


@rule("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")
def decided(tracer: Tracer, op: Op) -> None:
    """Entries chosen by their size. All that is compared stays as it is, so the larger model chooses the same ones.

    The numbers of those chosen, of experts say, are no more than an index.
    """
    info = given(tracer, op)
    for axis in info.axes:
        tracer.fix(axis, "its entries are compared along an axis")
    if isinstance(op.out, tuple):
        tracer.put(op.out[0], [None if size == 1 else data(size) for size in op.out[0].shape])


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "tril", "triu")
def along(tracer: Tracer, op: Op) -> None:
    """Entries summed up along an axis, or cut off along two: of tokens, any; of units, none."""
    info = given(tracer, op)
    outs = op.out if isinstance(op.out, tuple) else (op.out,)
    linear = op.name in ("cumsum", "tril", "triu")
    places = [len(info.axes) - 2, len(info.axes) - 1] if op.name[:3] == "tri" else [op.args[1] % len(info.axes)]
    for place in places:
        tracer.fix(info.axes[place], "its entries are compared or summed along an axis")
    if not linear:
        tracer.act(info.axes)
    tracer.put(outs[0], info.axes, silent=info.silent if linear else None)
    for index in outs[1:]:
        for axis in info.axes:
            tracer.fix(axis, "its entries are compared along an axis")
        tracer.infos.pop(index, None)


@rule("glu")
def gated(tracer: Tracer, op: Op) -> None:
    """Entries times a function of as many others, which stand behind them."""
    info = given(tracer, op)
    place = op.arg(1, "dim", -1) % len(info.axes)
    axes, size = list(info.axes), op.args[0].shape[place] // 2
    first, second = part(axes[place], 0, size), part(axes[place], size, 2 * size)
    axes[place] = tracer.unified(first, second)
    tracer.act(axes)
    tracer.put(op.out, axes, silent=info.silent)


@rule("masked_scatter")
def filled_in(tracer: Tracer, op: Op) -> None:
    """Rows in place of those that a mask chooses: the vectors of a picture among those of words."""
    x, mask, source = op.args
    rows = source.dim() > 1 and source.shape[-1] == op.out.shape[-1]
    along = UNIFORM if mask.dim() == 0 or mask.shape[-1] == 1 else tracer.along(mask, mask.dim() - 1)
    if tracer.info(mask) is not None or not rows or along == VARIES:
        raise Misfit("a mask that the model computes, or one that chooses single entries")
    axes, others = list(tracer.axes(x)), tracer.axes(source)
    for axis in (*axes[:-1], *others[:-1]):
        tracer.fix(axis, "a mask chooses from it")
    axes[-1] = tracer.unified(axes[-1], others[-1])
    _constant_rows(tracer, axes[-1], x, source)
    tracer.put(op.out, axes)


def _constant_rows(tracer: Tracer, axis: Axis | None, *tensors: torch.Tensor) -> None:
    """A constant among what is put together tells units apart, unless it is zero."""
    if any(tracer.info(tensor) is None and tracer.along(tensor, None) != ZERO for tensor in tensors):
        tracer.fix(axis, "a constant has a number of its own for every entry")


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def put_in(tracer: Tracer, op: Op) -> None:
    """Rows written over those that an index, or a mask, names; or added to them."""
    x, index, values = op.args[0], list(op.args[1]), op.args[2]
    places = [place for place, tensor in enumerate(index) if tensor is not None]
    if any(tracer.info(index[place]) is not None for place in places) or places != list(range(len(places))):
        raise Misfit("an index that the model computes")
    masked = len(places) == 1 and index[0].dtype in (torch.bool, torch.uint8)
    if masked and values.numel() == 1 and tracer.info(values) is None:
        _one_number(tracer, op, index[0], values)
        return
    named = index[0].dim() if masked else len(places)
    axes, rest = list(tracer.axes(x)), tracer.axes(values)
    for axis in axes[:named]:
        tracer.fix(axis, "its entries are picked by number")
    own = len(axes) - named
    for place, axis in enumerate(reversed(rest), 1):
        if place <= own:
            axes[-place] = tracer.unified(axes[-place], axis)
            if axis is None and axes[-place] is not None:
                tracer.act([axes[-place]], "one number is written to all entries")
            _constant_rows(tracer, axes[-place], x, values)
        else:
            tracer.fix(axis, "it is written by number")
    for place in range(len(rest) + 1, own + 1):
        tracer.act([axes[-place]], "one number is written to all entries")
    tracer.put(op.out, axes)


def _one_number(tracer: Tracer, op: Op, mask: torch.Tensor, value: torch.Tensor) -> None:
    """One number in the places that a mask chooses: of units all or none, where it is the same along them."""
    axes = tracer.axes(op.args[0])
    for place, axis in enumerate(axes):
        if place < mask.dim() and tracer.along(mask, place) == VARIES:
            tracer.fix(axis, "a mask chooses from it")
        elif tracer.along(value, None) != ZERO:
            tracer.act([axis], "one number is written to all entries")
    tracer.put(op.out, axes)


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
    tracer.put(op.out, axes, silent=_silent_sum(tracer, op.args[0], source) if reduce in ("sum", "mean") else None)


@rule("scatter")
def overwritten(tracer: Tracer, op: Op) -> None:
    """Rows of tokens written over others by number: alike for all units."""
    x, place, index, source = op.args[0], op.args[1] % op.out.dim(), op.args[2], op.arg(3, "src", op.arg(3, "value"))
    if tracer.info(index) is not None or not isinstance(source, torch.Tensor):
        raise Misfit("an index that the model computes, or a number that is written")
    axes, others = list(tracer.axes(x)), tracer.axes(source)
    for at, (axis, other) in enumerate(zip(axes, others, strict=True)):
        if at != place and index.shape[at] == x.shape[at] and tracer.along(index, at) != VARIES:
            axes[at] = tracer.unified(axis, other)
        else:
            for one in (axis, other):
                tracer.fix(one, "its entries are written by number")
    for axis in axes:
        _constant_rows(tracer, axis, x, source)
    tracer.put(op.out, axes)


def _silent_sum(tracer: Tracer, base: torch.Tensor, source: torch.Tensor) -> frozenset[str] | None:
    """The parameters without which rows added to others are zero."""
    before, added = tracer.info(base), tracer.info(source)
    if before is None and tracer.along(base, None) == ZERO:
        return added.silent if added else None
    if before is None or added is None or before.silent is None or added.silent is None:
        return None
    return before.silent | added.silent
