"""Sums, means and maxima over axes, and what looks at neighbouring pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lemonx.tracing.axes import Axis, Misfit, data, fused, is_data, split
from lemonx.tracing.operations import Op, rule
from lemonx.tracing.rules.weight_norms import measured
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Chosen, Info, Length, Mean, MeansUsed, Spread, Square, Value


def _noting(tracer: Tracer) -> MeansUsed:
    """Where it is noted that a mean of this module is used."""
    return MeansUsed(tracer.path, tracer.means)


def _places(op: Op, info: Info, asked: Any) -> list[int]:
    dims = len(info.axes)
    if asked is None or (isinstance(asked, Sequence) and not asked):
        return list(range(dims))
    return [place % dims for place in ([asked] if isinstance(asked, int) else asked)]


def _left(info: Info, places: Sequence[int], out: Any) -> list[Axis | None]:
    """The axes that are left; a reduced one stays, with one entry, where it is kept."""
    if out.dim() == len(info.axes):
        return [None if place in places else axis for place, axis in enumerate(info.axes)]
    return [axis for place, axis in enumerate(info.axes) if place not in places]


@rule("mean", "sum")
def summed(tracer: Tracer, op: Op) -> None:
    info = tracer.info(op.args[0])
    assert info is not None
    places = _places(op, info, op.arg(1, "dim"))
    axes = _left(info, places, op.out)
    tracer.numbers = ()
    gone = [axis for place in places if (axis := info.axes[place]) is not None and not is_data(axis)]
    left = tuple(o for p, o in enumerate(info.origins) if p not in places) if info.weight else ()
    known = not info.weight or len(left) == len(axes)
    weight, origins = (info.weight, left) if known else (False, ())
    if not gone:
        tracer.put(op.out, axes, weight=weight, linear=not known, origins=origins, silent=info.silent)
        return
    value = _known(tracer, op.name, info, gone) if len(places) == 1 else None
    if value is None:
        for axis in gone:
            tracer.fix(axis, "it is summed over")
    tracer.put(op.out, axes, weight=weight, linear=not known, origins=origins, value=value, silent=info.silent)


def _known(tracer: Tracer, name: str, info: Info, gone: list[Axis]) -> Value | None:
    """A mean that may be a norm's."""
    square = info.value
    if name == "sum" and isinstance(square, Square) and square.centred is None:
        tracer.keep(square)
        return Length(square.token, gone[0], square=True)
    if name != "mean" or info.weight:
        return None
    if isinstance(square, Square):
        tracer.keep(square)
        if square.centred is not None:
            tracer.keep(square.centred)
            return Spread("layer", square.centred.token, gone[0], _noting(tracer))
        return Spread("rms", square.token, gone[0], _noting(tracer))
    return Mean(info.token, gone[0], _noting(tracer))


@rule("var", "var_mean", "std", "std_mean")
def variance(tracer: Tracer, op: Op) -> None:
    """The mean square of what is left when the mean is taken away; with n - 1 in place of n it is no norm's."""
    info = tracer.info(op.args[0])
    assert info is not None
    first, *others = op.out if isinstance(op.out, tuple) else (op.out,)
    places = _places(op, info, op.arg(1, "dim"))
    correction = op.kwargs.get("correction", op.arg(2))
    gone = [axis for place in places if (axis := info.axes[place]) is not None and not is_data(axis)]
    axes = _left(info, places, first)
    value = None
    if len(places) == 1 and gone and correction in (0, False) and not info.weight:
        value = Spread(
            "layer", info.token, gone[0], _noting(tracer), state="root" if op.name[:3] == "std" else "square"
        )
    else:
        for axis in gone:
            tracer.fix(axis, "a variance is taken over it")
        if not gone:
            tracer.act(axes)
    tracer.put(first, axes, value=value)
    for mean in others:
        tracer.put(mean, axes, value=_mean(tracer, info, gone, places))
        if gone and (len(gone) > 1 or len(places) > 1):
            for axis in gone:
                tracer.fix(axis, "a mean is taken over it")


def _mean(tracer: Tracer, info: Info, gone: list[Axis], places: list[int]) -> Mean | None:
    return Mean(info.token, gone[0], _noting(tracer)) if len(gone) == 1 == len(places) else None


@rule("amax", "amin", "max", "min", "any", "all", "logsumexp", "prod", "linalg_vector_norm", "norm", "aminmax")
def extreme(tracer: Tracer, op: Op) -> None:
    """A function of all entries along an axis: of tokens; units would have to be told apart."""
    info = tracer.info(op.args[0])
    assert info is not None
    if op.name in ("max", "min") and len(op.args) > 1 and not isinstance(op.args[1], int):
        raise_pointwise(tracer, op)
        return
    outs = op.out if isinstance(op.out, tuple) else (op.out,)
    asked = op.arg(2, "dim") if op.name in ("linalg_vector_norm", "norm") else op.arg(1, "dim")
    places = _places(op, info, asked)
    tracer.numbers = ()
    if op.name == "linalg_vector_norm" and op.arg(1, "ord", 2) == 2 and len(places) == 1 and not info.weight:
        axis = info.axes[places[0]]
        if axis is not None and not is_data(axis):
            tracer.put(outs[0], _left(info, places, outs[0]), value=Length(info.token, axis))
            return
    if (
        op.name in ("linalg_vector_norm", "norm")
        and op.arg(1, "ord", 2) == 2
        and measured(tracer, info, places, outs[0])
    ):
        return
    for place in places:
        if op.name in _OF_COPIES:
            tracer.act([info.axes[place]], "the largest or smallest of its entries is taken")
        else:
            tracer.fix(info.axes[place], "all its entries are compared, or their size is taken")
    axes = _left(info, places, outs[0])
    tracer.act(axes)
    tracer.put(outs[0], axes)
    if len(outs) > 1:  # where they are, or the smallest beside the largest
        index = not outs[1].is_floating_point()
        tracer.put(outs[1], axes, value=Chosen(list(info.axes)) if index else None)


# What copies of entries do not change.
_OF_COPIES = frozenset(("amax", "amin", "max", "min", "any", "all", "aminmax"))


def raise_pointwise(tracer: Tracer, op: Op) -> None:
    """max(a, b): a function of single entries."""
    from lemonx.tracing.rules.pointwise import pointwise

    pointwise(tracer, op)


_LINEAR = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
           "adaptive_avg_pool1d", "upsample_bilinear2d", "upsample_nearest2d", "upsample_nearest1d",
           "upsample_linear1d", "upsample_bicubic2d", "upsample_nearest3d", "upsample_trilinear3d",
           "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")  # fmt: skip
_CHOOSING = ("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
             "adaptive_max_pool2d", "max_pool1d_with_indices")  # fmt: skip


@rule(*_LINEAR, *_CHOOSING)
def pooled(tracer: Tracer, op: Op) -> None:
    """Pixels, of every channel by itself."""
    info = tracer.info(op.args[0])
    assert info is not None
    out = op.out[0] if isinstance(op.out, tuple) else op.out
    dims = {"1": 1, "2": 2, "3": 3}[next(c for c in op.name if c in "123")]
    keep = out.dim() - dims
    if _all_of_it(op, info, dims):
        tracer.numbers = ()
    axes = list(info.axes)
    for place in range(keep, out.dim()):
        if not _untouched(op, place - keep, dims):
            tracer.fix(axes[place], "its entries are pooled")
            axes[place] = None if out.shape[place] == 1 else data(out.shape[place])
    linear = op.name in _LINEAR
    if not linear:
        tracer.act(axes)
        tracer.put(out, axes, token=type(info.token)(positive=info.token.positive))
        return
    tracer.put(out, axes, silent=info.silent)


def _untouched(op: Op, number: int, dims: int) -> bool:
    """Whether windows of one entry, one after the other, leave an axis as it is."""
    if "_pool" not in op.name or "adaptive" in op.name:
        return False

    def of(given: Any, default: int) -> int:
        values = list(given) if isinstance(given, Sequence) else [given]
        return default if not values or values[0] is None else values[number] if len(values) == dims else values[0]

    window = of(op.args[1], 0)
    return (window, of(op.arg(2, "stride"), window), of(op.arg(3, "padding"), 0)) == (1, 1, 0)


def _all_of_it(op: Op, info: Info, dims: int) -> bool:
    """Whether one window, not padded, covers all pixels: how much larger it is makes no difference to their mean."""
    if not op.name.startswith("avg_pool") or any(op.out.shape[-dims:][i] != 1 for i in range(dims)):
        return False
    window, padding = op.args[1], op.arg(3, "padding", 0)
    sizes = list(window) * (dims // len(window)) if isinstance(window, Sequence) else [window] * dims
    padded = any(padding) if isinstance(padding, Sequence) else bool(padding)
    covers = all(size >= pixels for size, pixels in zip(sizes, op.args[0].shape[-dims:], strict=True))
    return covers and not padded and op.arg(6, "divisor_override") is None


@rule("im2col")
def windows(tracer: Tracer, op: Op) -> None:
    """Windows of pixels side by side, of every channel by itself: (channel, place in the window), then windows."""
    info = tracer.info(op.args[0])
    assert info is not None
    if len(info.axes) != 4:
        raise Misfit("windows of one picture without a batch")
    for axis in info.axes[2:]:
        tracer.fix(axis, "windows are cut from it")
    channels, inside = info.axes[1], op.out.shape[1] // op.args[0].shape[1]
    parts = [part for part in (channels, data(inside) if inside > 1 else None) if part is not None]
    windows = op.out.shape[2]
    axes = [info.axes[0], fused(*parts) if parts else None, data(windows) if windows > 1 else None]
    tracer.put(op.out, axes, silent=info.silent)


@rule("col2im")
def unwound(tracer: Tracer, op: Op) -> None:
    """Windows of pixels put back, those that overlap added up."""
    info = tracer.info(op.args[0])
    assert info is not None
    if len(info.axes) != 3 or info.axes[1] is None:
        raise Misfit("windows of one picture without a batch, or of one pixel")
    channels, inside = split(info.axes[1], op.out.shape[1])
    for axis in (inside, info.axes[2]):
        tracer.fix(axis, "windows are put back along it")
    pixels = [data(size) if size > 1 else None for size in op.out.shape[2:]]
    tracer.put(op.out, [info.axes[0], channels if channels.size > 1 else None, *pixels], silent=info.silent)


@rule("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
def sampled(tracer: Tracer, op: Op) -> None:
    """Pixels looked up between others, of every channel by itself, in places that the model does not compute."""
    info = tracer.info(op.args[0])
    if info is None or tracer.info(op.args[1]) is not None:
        raise Misfit("places that the model computes")
    for axis in info.axes[2:]:
        tracer.fix(axis, "its entries are looked up between others")
    tracer.put(op.out, [*info.axes[:2], *(None if size == 1 else data(size) for size in op.out.shape[2:])])
