"""Runs a module under the eyes of a tracer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lemonx.guards.workers import one_thread_each
from lemonx.tracing import rules
from lemonx.tracing.completion import complete
from lemonx.tracing.tracer import Tracer

# Calls a module with all example inputs, and gives its outputs.
Run = Callable[[torch.nn.Module], Sequence[Any]]


@contextlib.contextmanager
def watching(tracer: Tracer, module: torch.nn.Module) -> Iterator[None]:
    """The tracer knows which module is running; fused kernels that hide operations are off."""
    hooks = []
    for child in module.modules():
        hooks += [
            child.register_forward_pre_hook(
                lambda child, given, named: tracer.entered(child, (given, named)), with_kwargs=True, prepend=True
            ),
            child.register_forward_hook(lambda child, given, made: tracer.left(child, made), always_call=True),
        ]
    fast, mkldnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    # `mkldnn.flags` would also set TF32, of which torch warns on every machine.
    torch.backends.mkldnn.enabled = False
    try:
        with torch.no_grad(), one_thread_each():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.mkldnn.enabled = mkldnn
        for hook in hooks:
            hook.remove()


def run_traced(tracer: Tracer, module: torch.nn.Module, run: Run) -> Tracer:
    """The record of a run of the module."""
    rules.register()
    try:
        with watching(tracer, module), tracer:
            outputs = run(module)
    finally:
        tracer.held.put_back()
    tracer.finish(outputs)
    return complete(tracer)
