"""Large products in float64, divided among threads of lemonx's own.

torch divides every operation among its threads, which then wait for one another in a loop. Beside other busy processes
they wait longer than they compute. So during a verification torch uses one thread, and only products that are worth it
are divided, among threads that sleep when they have nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from lemonx.guards.workers import cores

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
