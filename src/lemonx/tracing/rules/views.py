"""Operations that move numbers: views, slices, concatenations, repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lemonx.tracing.axes import ATOM, Axis, Misfit, data, factors, find, fused, is_data, joined, part, split
from lemonx.tracing.operations import Op, rule
from lemonx.tracing.settling import pick
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Branch, Carry, Chosen, Dot, Info, Length, Lengths, Mean, Origin

Origins = Sequence[frozenset[Origin]]
# Numbers that are looked at one by one to see where they were read.
_MOST_READ = 10_000_000


def moved(tracer: Tracer, tensor: Any, info: Info, axes: Sequence[Axis | None], origins: Origins) -> None:
    """A result that holds the numbers of `info`, or some of them, elsewhere."""
    tracer.put(
        tensor, axes, weight=info.weight, linear=info.linear, origins=tuple(origins) if info.weight else (),
        offset=info.offset, silent=info.silent, rows=info.rows,
    )  # fmt: skip


def given(tracer: Tracer, op: Op) -> Info:
    """What is known of the tensor that is moved."""
    info = tracer.info(op.args[0])
    if info is None:
        raise Misfit("an index that derives from parameters")
    return info


def known_origins(info: Info) -> list[frozenset[Origin]]:
    return list(info.origins) or [frozenset()] * len(info.axes)


@rule("t", "transpose", "permute", "movedim", "swapaxes")
def permuted(tracer: Tracer, op: Op) -> None:
    info = given(tracer, op)
    order = list(range(len(info.axes)))
    if op.name == "permute":
        order = [place % len(order) for place in op.args[1]]
    elif op.name == "t":
        order = order[::-1]
    else:
        first, second = (place % len(order) for place in op.args[1:3])
        order[first], order[second] = order[second], order[first]
    origins, axes = known_origins(info), _dual(tracer, info)
    value = info.value
    moved(tracer, op.out, info, [axes[place] for place in order], [origins[place] for place in order])
    if isinstance(value, Dot | Lengths) and (own := tracer.info(op.out)) is not None:
        tracer.keep(value)
        own.value = value


def _dual(tracer: Tracer, info: Info) -> list[Axis | None]:
    """The axes of a weight; of a table that is turned over to be a decoder, what it reads is another space.

    That one is paired with the space that the table writes.
    """
    name = info.parameter
    if name not in tracer.indexed or len(info.axes) != 2 or info.axes[1] is None or info.offset:
        return list(info.axes)
    if name not in tracer.ties:
        tracer.ties[name] = Axis(info.axes[1].size)
    return [info.axes[0], tracer.ties[name]]


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten", "squeeze", "unsqueeze", "expand_as")
def viewed(tracer: Tracer, op: Op) -> None:
    info = given(tracer, op)
    value = info.value
    present = [axis for axis in info.axes if axis is not None]
    if op.name in ("squeeze", "unsqueeze"):
        _padded(tracer, op, info)
        return
    if op.out.dtype != op.args[0].dtype:
        raise Misfit("bytes read as another dtype")
    axes = factors(fused(*present), op.out.shape) if present else [None] * op.out.dim()
    moved(tracer, op.out, info, axes, _origins(info, op.args[0].shape, op.out.shape))
    if own := tracer.info(op.out):
        own.carries, own.shaped = info.carries, info.flat  # the same numbers in the same order
        if isinstance(value, Dot | Lengths | Branch):  # each is one number, wherever it stands
            tracer.keep(value)
            own.value = value
    if len(axes) == len(info.axes) and list(op.out.shape) == list(op.args[0].shape):
        _same(tracer, op, info)


@rule("as_strided")
def strided(tracer: Tracer, op: Op) -> None:
    """Known where it leaves all numbers in their order, or reads those of the inputs' axes in another."""
    before, out = op.args[0], op.out
    if not before.is_meta and _windows(tracer, op):
        return
    same = [size for size in out.shape if size > 1] == [size for size in before.shape if size > 1]
    if not same or out.numel() != before.numel() or out.storage_offset() != before.storage_offset():
        raise Misfit("memory read in another order")
    strides = [[s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (before, out)]
    if strides[0] != strides[1]:
        raise Misfit("memory read in another order")
    viewed(tracer, op)


def _windows(tracer: Tracer, op: Op) -> bool:
    """Windows over tokens that overlap, say: each axis that is the model's is one of the result, entry by entry."""
    info, before, out = given(tracer, op), op.args[0], op.out
    own = [place for place, axis in enumerate(info.axes) if axis is not None and not is_data(axis)]
    memory = before.untyped_storage().nbytes() // before.element_size()
    if info.weight or max(memory, before.numel(), out.numel()) > _MOST_READ:
        return False
    with _disable_current_modes():
        held = torch.full((memory,), -1)  # which number of the tensor each place in memory holds
        held.as_strided(before.shape, before.stride(), before.storage_offset()).copy_(
            torch.arange(before.numel()).view(before.shape)
        )
        read = held.as_strided(out.shape, out.stride(), out.storage_offset())
        if bool((read < 0).any()) or int((held >= 0).sum()) < before.numel():
            return False
        where = torch.unravel_index(read, before.shape)
        axes: list[Axis | None] = [None if size == 1 else data(size) for size in out.shape]
        for place in own:
            shape = [before.shape[place] if at == 0 else 1 for at in range(out.dim())]
            fits = [at for at, size in enumerate(out.shape) if size == before.shape[place]
                    and bool((where[place] == torch.arange(size).view(shape).transpose(0, at)).all())]  # fmt: skip
            if len(fits) != 1:
                return False
            axes[fits[0]] = info.axes[place]
    moved(tracer, out, info, axes, [])
    return True


def _origins(info: Info, old: Sequence[int], new: Sequence[int]) -> list[frozenset[Origin]]:
    """Which axes of parameters the axes of a view are: all that they are made of."""
    rest = [(size, origin) for size, origin in zip(old, info.origins, strict=False) if size > 1]
    result = []
    for size in new:
        got, product = frozenset[Origin](), 1
        while product < size and rest:
            first, origin = rest.pop(0)
            got |= origin
            if product * first > size:
                rest.insert(0, (product * first // size, origin))
                product = size
            else:
                product *= first
        result.append(got)
    return result


def _padded(tracer: Tracer, op: Op, info: Info) -> None:
    """An axis of one entry more or less: the same numbers."""
    axes, origins, dims = list(info.axes), known_origins(info), len(info.axes)
    if op.name == "unsqueeze":
        place = op.args[1] % (dims + 1)
        axes.insert(place, None)
        origins.insert(place, frozenset())
    else:
        asked = op.arg(1, "dim")
        gone = range(dims) if asked is None else [p % dims for p in ([asked] if isinstance(asked, int) else asked)]
        places = [p for p in range(dims) if not (p in gone and op.args[0].shape[p] == 1)]
        axes, origins = [axes[p] for p in places], [origins[p] for p in places]
    moved(tracer, op.out, info, axes, origins)
    _same(tracer, op, info)


def _same(tracer: Tracer, op: Op, info: Info) -> None:
    """All that is known of a tensor holds for this result of it."""
    tracer.keep(info.value)
    own = tracer.info(op.out)
    assert own is not None
    own.value, own.token, own.shaped, own.carries = info.value, info.token, info.shaped, info.carries


@rule("expand")
def expanded(tracer: Tracer, op: Op) -> None:
    """Entries repeated along new axes, or along those of one entry."""
    info, dims = given(tracer, op), op.out.dim()
    axes = [None] * (dims - len(info.axes)) + list(info.axes)
    origins = [frozenset[Origin]()] * (dims - len(info.axes)) + known_origins(info)
    wide = [Axis(size) if axis is None and size > 1 else axis for axis, size in zip(axes, op.out.shape, strict=True)]
    same = tuple(op.out.shape) == tuple(op.args[0].shape)
    moved(tracer, op.out, info, wide, origins)
    own = tracer.info(op.out)
    assert own is not None
    own.rows = own.rows or not same
    if isinstance(info.value, Length | Mean):  # the same number beside every entry
        tracer.keep(info.value)
        own.value = info.value
    if same:
        _same(tracer, op, info)


@rule("repeat")
def repeated(tracer: Tracer, op: Op) -> None:
    info, times = given(tracer, op), list(op.args[1])
    axes = [None] * (len(times) - len(info.axes)) + list(info.axes)
    moved(tracer, op.out, info, [_times(axis, n) for axis, n in zip(axes, times, strict=True)], [])
    own = tracer.info(op.out)
    if own is not None and info.weight:
        own.rows = own.rows or max(times) > 1
        own.origins = tuple([frozenset()] * (len(times) - len(info.axes)) + known_origins(info))


def _times(axis: Axis | None, times: int) -> Axis | None:
    if times == 1:
        return axis
    return Axis(times) if axis is None else fused(Axis(times), axis)


@rule("slice", "narrow")
def sliced(tracer: Tracer, op: Op) -> None:
    info = given(tracer, op)
    place = op.arg(1, "dim", 0) % len(info.axes)
    size, axes = op.args[0].shape[place], list(info.axes)
    start, stop, step = op.arg(2, "start"), op.arg(3, "end"), op.arg(4, "step", 1)
    if op.name == "narrow":
        stop, step = start + stop, 1
    start = min(size, max(0, start + size if start and start < 0 else start or 0))
    stop = size if stop is None else min(size, max(0, stop + size if stop < 0 else stop))
    whole = (start, stop, step) == (0, size, 1)
    axis = axes[place]
    if step != 1 and axis is not None:
        axes[place] = _stepped(tracer, axis, op.out.shape[place], step)
    else:
        axes[place] = part(axis, start, stop)
    moved(tracer, op.out, info, axes, known_origins(info))
    if whole:
        _same(tracer, op, info)
    elif step == 1 and (own := tracer.info(op.out)) is not None:
        wholes = [carry for carry in info.carries if carry.token.along == place]
        own.carries = tuple(
            piece.within(carry) for carry in wholes for piece in carry.token.pieces.get((start, stop), ())
        )


def _stepped(tracer: Tracer, axis: Axis, size: int, step: int) -> Axis | None:
    """Every second entry, say: the outer factor of an axis, the inner of which stays."""
    if is_data(axis):
        return data(size) if size > 1 else None
    if axis.size != size * step:
        raise Misfit(f"every {step}th of {axis.size}")
    outer, inner = split(axis, size)
    tracer.fix(inner, "single entries of it are selected")
    return outer if size > 1 else None


@rule("select", "unbind")
def selected(tracer: Tracer, op: Op) -> None:
    info = given(tracer, op)
    place = op.arg(1, "dim", 0) % len(info.axes)
    origins = known_origins(info)
    origins.pop(place)
    axis = info.axes[place]
    if op.name == "select" and axis is not None and find(axis).kind == ATOM and find(axis).whole is None:
        axes = [other for at, other in enumerate(info.axes) if at != place]
        moved(tracer, op.out, info, axes, origins)
        if (own := tracer.info(op.out)) is not None:
            own.value = Chosen([axis], "single entries of it are selected")
        return
    numbers = [op.args[2] % op.args[0].shape[place]] if op.name == "select" else range(len(op.out))
    for number, tensor in zip(numbers, [op.out] if op.name == "select" else op.out, strict=True):
        moved(tracer, tensor, info, pick(info.axes, place, number), origins)


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "tensor_split")
def parted(tracer: Tracer, op: Op) -> None:
    info = given(tracer, op)
    place = op.arg(2, "dim", 0) % len(info.axes)
    start = 0
    for tensor in op.out:
        stop = start + tensor.shape[place]
        axes = [*info.axes[:place], part(info.axes[place], start, stop), *info.axes[place + 1 :]]
        moved(tracer, tensor, info, axes, known_origins(info))
        start = stop


@rule("cat", "concat")
def concatenated(tracer: Tracer, op: Op) -> None:
    tensors = [tensor for tensor in op.args[0] if tensor.numel()]
    place = op.arg(1, "dim", 0) % op.out.dim()
    infos = [tracer.info(tensor) for tensor in tensors]
    known = [tracer.axes(tensor) for tensor in tensors]
    axes = _together(tracer, known, [p for p in range(op.out.dim()) if p != place])
    pieces = [axes_of[place] or data(1) for axes_of in known]
    axes[place] = joined(*pieces)
    silent = None
    if all(info is not None and info.silent is not None for info in infos):
        silent = frozenset().union(*(info.silent or () for info in infos if info))
    weight = all(info is not None and info.weight for info in infos)
    origins = [frozenset().union(*(known_origins(info)[p] for info in infos if info)) for p in range(op.out.dim())]
    linear = all(info.linear and not info.offset for info in infos if info)
    own = tracer.put(
        op.out, axes, weight=weight, linear=linear, origins=tuple(origins) if weight else (), silent=silent
    )
    if own is not None and all(info is not None and info.carries for info in infos):
        stop, token = 0, own.token
        token.along = place
        for tensor, info in zip(tensors, infos, strict=True):
            start, stop = stop, stop + tensor.shape[place]
            token.pieces[start, stop] = info.carries if info else ()
        own.carries = (Carry(token),)


def _together(tracer: Tracer, known: list[list[Axis | None]], places: list[int]) -> list[Axis | None]:
    """The axes that all of several tensors share."""
    axes: list[Axis | None] = [None] * len(known[0])
    for place in places:
        for one in known:
            axes[place] = tracer.unified(axes[place], one[place])
    return axes


@rule("stack")
def stacked(tracer: Tracer, op: Op) -> None:
    place = op.arg(1, "dim", 0) % op.out.dim()
    known = [tracer.axes(tensor) for tensor in op.args[0]]
    axes = _together(tracer, known, list(range(len(known[0]))))
    axes.insert(place, data(len(known)) if len(known) > 1 else None)
    tracer.put(op.out, axes)


@rule("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def padded(tracer: Tracer, op: Op) -> None:
    """More pixels or tokens around; entries cannot be padded."""
    info, widths = given(tracer, op), op.args[1]
    axes = list(info.axes)
    for number in range(len(widths) // 2):
        place = len(axes) - 1 - number
        if widths[2 * number] or widths[2 * number + 1]:
            tracer.fix(axes[place], "it is padded")
            axes[place] = data(op.out.shape[place])
    fill = op.arg(2, "value", 0)
    if op.name == "constant_pad_nd" and fill:
        tracer.act(axes, "it is padded with a number")
    tracer.put(op.out, axes)


@rule("roll", "flip")
def rolled(tracer: Tracer, op: Op) -> None:
    """Tokens or pixels in another order; entries cannot be."""
    info = given(tracer, op)
    places = op.arg(2, "dims", ()) if op.name == "roll" else op.args[1]
    for place in places or range(len(info.axes)):
        tracer.fix(info.axes[place], "its entries are moved along it")
    moved(tracer, op.out, info, info.axes, known_origins(info))


@rule(
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "rand_like"
)
def shaped(tracer: Tracer, op: Op) -> None:
    """A constant of the shape of something: it holds none of its numbers."""


@rule("fill", "zero")
def filled(tracer: Tracer, op: Op) -> None:
    """Overwritten with one number."""
    info = tracer.info(op.args[0])
    if info is not None:
        tracer.act(info.axes)
        tracer.put(op.out, info.axes)


@rule("size", "dim", "sym_size", "sym_stride", "numel", "_has_same_storage_numel", "stride", "is_same_size")
def asked(tracer: Tracer, op: Op) -> None:
    """A question about the shape."""


@rule("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique2", "_unique2")
def looked_at(tracer: Tracer, op: Op) -> None:
    """Python, or a shape, depends on numbers that the model computes."""
    tracer.problems.append(tracer.why("the code looks at a number that the model computes, and may go another way"))
    tracer.opaque(op, "its numbers are looked at")


@rule("view_as_complex", "view_as_real")
def as_complex(tracer: Tracer, op: Op) -> None:
    """Pairs as complex numbers, and back."""
    info = given(tracer, op)
    if op.name == "view_as_real":
        tracer.put(op.out, [*info.axes, data(2)], silent=info.silent)
        return
    tracer.fix(info.axes[-1], "its two entries are one complex number")
    tracer.put(op.out, info.axes[:-1], silent=info.silent)
