"""Runs a model in float64 even where its code asks for float32 by name.

transformers' RMSNorms, eager softmax and rotary embeddings compute in float32 whatever the dtype of the weights. Two
equal float64 models would then differ by about 1e-6, and a mistake of that size would look like rounding.

torch divides every operation among its threads, which then wait for one another in a loop. Beside other busy processes
they wait longer than they compute. So torch uses one thread during a verification. Only large products are divided,
among threads of lemonx's own, which sleep when they have nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lemonx.guards.workers import Setting, cores

# How code names float32: the dtype, and the legacy tensor types that `Tensor.type` takes.
_WIDER: dict[Any, Any] = {
    torch.float32: torch.float64,
    torch.FloatTensor: torch.DoubleTensor,
    "torch.FloatTensor": "torch.DoubleTensor",
}


# These interpret bytes by the dtype: given float64, they would misread a float32 checkpoint.
_READ_BYTES = frozenset({torch.Tensor.view, torch.frombuffer})


# torch's grouped matrix product, under all its names: none of them takes float64.
_GROUPED = frozenset(
    func
    for func in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if func is not None
)


def _grouped_product(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor, **unset: None) -> torch.Tensor:
    """The product of each group of rows with its matrix; groups end at `offs`, and what comes after is undefined."""
    result = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for matrix, stop in zip(matrices, offs.tolist(), strict=True):
        result[start:stop] = rows[start:stop] @ matrix
        start = stop
    return result


# Functions that are not simply called with other arguments; all others must not be slow.
_SPECIAL = _READ_BYTES | _GROUPED | {torch.empty, torch.Tensor.float, torch.nn.functional.linear}
# Only these types can name a dtype: hashing anything else would fail, or compare tensors.
_NAMING = frozenset({torch.dtype, str, type(torch.FloatTensor)})


def _receives_storage(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Recognise the empty tensor to which torch.load then hands the bytes of the file."""
    return func is torch.empty and args == ((0,),)


def _widen(argument: Any) -> Any:
    """Returns float64 for any of float32's names, and everything else as it is."""
    return _WIDER.get(argument, argument) if type(argument) in _NAMING else argument


_DEFAULT = Setting(torch.float64)


class Float64(TorchFunctionMode):
    """A context in which no torch function makes a float32 tensor from anything but float32 tensors.

    `x.to(torch.float32)`, `x.float()`, `x.type(torch.float32)`, any `dtype=torch.float32`, and factories
    without a dtype give float64. Tensors that exist already, or are read from a file, keep their dtype. Load
    the models inside it too, with dtype=torch.float64: that keeps the buffers that a model computes for
    itself, such as rotary frequencies, in float64.

    >>> with Float64():
    ...     torch.ones(2, dtype=torch.bfloat16).float().dtype, torch.arange(0.0, 1.0).dtype
    (torch.float64, torch.float64)
    >>> torch.ones(2).dtype
    torch.float32
    """

    def __enter__(self) -> Float64:
        # The default dtype covers what no argument shows: torch.ones(2), an integer divided by an integer.
        _DEFAULT.enter(torch.get_default_dtype, torch.set_default_dtype)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _DEFAULT.leave(torch.set_default_dtype)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `func` with float64 wherever an argument says float32."""
        if func in _SPECIAL:
            if func in _READ_BYTES or _receives_storage(func, args):
                return func(*args, **(kwargs or {}))
            if func in _GROUPED and args[0].dtype == torch.float64:
                return _grouped_product(*args, **(kwargs or {}))
            if func is torch.nn.functional.linear and not kwargs:
                return linear(*args)
            if func is torch.Tensor.float:
                func = torch.Tensor.double
        for argument in args:
            if type(argument) in _NAMING:
                args = tuple(map(_widen, args))
                break
        if kwargs:
            return func(*args, **{key: _widen(value) for key, value in kwargs.items()})
        return func(*args)


# ----------------------------------------------------------------- large products

# Multiplications that take about a millisecond.
WORTH = 1 << 24


def in_parts(count: int, step: int, make: Callable[[int, int], None]) -> None:
    """Call `make` with the start and the end of every part of `count`, several at once."""
    ends = [(start, min(start + step, count)) for start in range(0, count, step)]
    if len(ends) == 1 or cores() == 1:
        for start, stop in ends:
            make(start, stop)
    else:
        for _ in _pool().map(lambda part: make(*part), ends):
            pass


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `torch.nn.functional.linear`, by several threads where it is large and nobody looks on.

    Gradients and dispatch modes, such as the tracer, belong to one thread: they would miss what the others do.
    """
    outputs, watched = weight.shape[0], torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0
    if watched or weight.is_meta or weight.dim() != 2 or cores() == 1 or inputs.numel() * outputs < cores() * WORTH:
        return torch.nn.functional.linear(inputs, weight, bias)
    result = inputs.new_empty(*inputs.shape[:-1], outputs)

    def part(start: int, stop: int) -> None:
        with torch.no_grad():
            result[..., start:stop] = inputs @ weight[start:stop].T

    in_parts(outputs, -(-outputs // cores()), part)
    return result if bias is None else result.add_(bias)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="lemonx-product")


# A forked process has no threads of the pool's.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
