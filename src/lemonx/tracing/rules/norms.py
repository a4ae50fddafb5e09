"""Norms that are one operation, and softmax."""

from __future__ import annotations

from typing import Any

from lemonx.tracing.axes import Axis, is_data, split
from lemonx.tracing.operations import Op, rule
from lemonx.tracing.rules import normalising
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Info, Norm, Normed


def _affine(tracer: Tracer, norm: Norm, gain: Any, bias: Any) -> None:
    """The gain and the bias of a norm, where they are parameters as they are."""
    for name, tensor in (("gain", gain), ("bias", bias)):
        info = tracer.info(tensor)
        if info is None:
            if tensor is not None:
                tracer.fix(norm.raw, "the norm's affine part is no parameter")
            continue
        norm.writes = tracer.unified(norm.writes, info.axes[-1])
        if info.parameter is None or info.offset or len(info.axes) != 1:
            tracer.fix(norm.writes, "the norm's affine part is no parameter as it is")
            tracer.fix(norm.reads, "the norm's affine part is no parameter as it is")
        setattr(norm, name, info.parameter)


@rule("native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm")
def fused_norm(tracer: Tracer, op: Op) -> None:
    x, shape, gain = op.args[:3]
    layer = "layer" in op.name
    bias, eps = (op.arg(3), op.arg(4)) if layer else (None, op.arg(3))
    out, info = op.out[0] if isinstance(op.out, tuple) else op.out, tracer.info(x)
    if info is None:
        _of_inputs(tracer, op, out, gain, bias)
        return
    last = info.axes[-1]
    if len(shape) != 1 or last is None or is_data(last):
        for axis in info.axes[-len(shape) :]:
            tracer.fix(axis, "a norm over several axes, or one of the inputs")
        _of_inputs(tracer, op, out, gain, bias, info)
        return
    norm, axes = normalising.start(tracer, "layer" if layer else "rms", info, -1, float(eps or 0.0))
    tracer.numbers = (norm.eps,)
    _affine(tracer, norm, gain, bias)
    tracer.normed(norm, x, out, -1, bias)
    axes[-1] = norm.out
    silent = _silent(tracer, gain, bias)
    tracer.put(out, axes, value=Normed(norm, raw=False), silent=silent, carries=normalising.through(info, norm))
    for extra in op.out[1:] if isinstance(op.out, tuple) else ():
        if extra is not None and extra.numel():
            tracer.infos[extra] = tracer._opaque_info(extra, tracer.why("the statistics of a norm"))


def _silent(tracer: Tracer, gain: Any, bias: Any) -> frozenset[str] | None:
    parts = [tracer.info(tensor) for tensor in (gain, bias) if tensor is not None]
    if tracer.info(gain) is None or any(part is None or part.silent is None for part in parts):
        return None
    return frozenset().union(*(part.silent or () for part in parts if part))


def _of_inputs(tracer: Tracer, op: Op, out: Any, gain: Any, bias: Any, info: Info | None = None) -> None:
    """A norm whose axes stay as they are, with a gain that is only multiplied with what it writes."""
    axes = list(info.axes) if info is not None else tracer.axes(out)
    for tensor in (gain, bias):
        known = tracer.info(tensor)
        for place, axis in enumerate(reversed(known.axes), 1) if known else ():
            axes[-place] = tracer.unified(axes[-place], axis)
            tracer.fix(axis, "the affine part of a norm over the inputs")
    tracer.put(out, axes)


@rule("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm",
      "_batch_norm_no_update", "_batch_norm_with_update")  # fmt: skip
def batch_norm(tracer: Tracer, op: Op) -> None:
    """Statistics per channel, which must be copies."""
    x, *parts = op.args[:5]
    out, axes, names = op.out[0], tracer.axes(x), dict[str, str]()
    channels = axes[1]
    plain = True
    for suffix, tensor in zip(("weight", "bias", "running_mean", "running_var"), parts, strict=True):
        info = tracer.info(tensor)
        if info is not None:
            channels = tracer.unified(channels, info.axes[0])
            plain = plain and info.parameter is not None and not info.offset
            names[suffix] = info.parameter or ""
        elif tensor is not None:
            tracer.fix(channels, "statistics that are not saved")
    if not plain:
        tracer.fix(channels, "a batch norm whose parameters are made of others")
    tracer.act([channels], "each channel has statistics of its own")
    axes[1] = channels
    for name in names.values():
        tracer.batch_norms[name] = names
    tracer.put(out, axes, silent=_silent(tracer, parts[0], parts[1]))


@rule("native_group_norm")
def group_norm(tracer: Tracer, op: Op) -> None:
    x, gain, bias, _, channels, _, groups, eps = op.args[:8]
    info = tracer.info(x)
    out = op.out[0]
    if info is None or info.axes[1] is None or is_data(info.axes[1]):
        tracer.opaque(op, "a group norm of the inputs")
        return
    reads = info.axes[1]
    if groups == channels:
        _own_statistics(tracer, op, info)
        return
    tracer.numbers = (float(groups), float(eps))
    if groups > 1:
        outer, _ = split(reads, groups)
        tracer.fix(outer, "the groups of a group norm")
    norm = Norm("group", reads, Axis(channels), float(eps), tracer.path, tracer.why("a group norm"), groups=groups)
    tracer.norms.append(norm)
    norm.raw = tracer.unified(norm.raw, reads) or norm.raw  # its units stay in place, plain copies on both sides
    norm.writes = norm.raw
    tracer.act([reads], "a group norm reads it")
    _affine(tracer, norm, gain, bias)
    axes = [info.axes[0], norm.out, *info.axes[2:]]
    tracer.put(out, axes, silent=_silent(tracer, gain, bias))


def _own_statistics(tracer: Tracer, op: Op, info: Info) -> None:
    """A group for every channel: each is normed over its own pixels, or tokens, alone."""
    _, gain, bias = op.args[:3]
    tracer.numbers = (float(op.args[7]),)  # as many groups as channels, whatever these are
    channels = info.axes[1]
    for tensor in (gain, bias):
        known = tracer.info(tensor)
        if known is not None:
            channels = tracer.unified(channels, known.axes[0])
        elif tensor is not None:
            tracer.fix(channels, "the norm's affine part is no parameter")
    for axis in info.axes[2:]:
        tracer.fix(axis, "each channel is normed over it")
    tracer.act([channels], "each channel has statistics of its own")
    tracer.put(op.out[0], [info.axes[0], channels, *info.axes[2:]], silent=_silent(tracer, gain, bias))


@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax")
def softmax(tracer: Tracer, op: Op) -> None:
    info = tracer.info(op.args[0])
    assert info is not None
    place = op.args[1] % max(1, len(info.axes))
    tracer.act(info.axes)
    tracer.fix(info.axes[place] if info.axes else None, "a softmax is taken over it")
    tracer.put(op.out, info.axes, linear=False, token=type(info.token)(positive=op.name != "_log_softmax"))
