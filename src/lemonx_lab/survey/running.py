"""Runs a tiny model of any kind: which outputs depend on parameters, and which parameters these read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lemonx.verification.finding import outputs
from lemonx.verification.float64 import Float64
from lemonx.verification.media import Batch

# Parameters without a gradient that are drawn anew one by one: each takes a run.
_MOST_DRAWN = 24


def learned(model: Any, batch: Batch) -> frozenset[str]:
    """The outputs that depend on parameters; all, of a model that has no gradients in this mode."""
    try:
        return frozenset(name for name, x in outputs(model, batch, grad=True).items() if x.requires_grad)
    except Exception:
        return frozenset(outputs(model, batch))


@dataclass(frozen=True)
class Read:
    """The share of all numbers in trained parameters that outputs depend on, and the names of those that none reads."""

    share: float
    silent: tuple[str, ...]


def read_by(model: Any, batch: Batch, of: frozenset[str]) -> Read:
    """What these outputs read, told from the gradient of a random sum of them.

    In a stack of matrices, of which some may be experts that no token is sent to, each matrix counts by itself. What
    only decides a choice, such as whom to attend to, has no gradient: it is drawn anew, to see if an output changes.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        gradients = _gradients(model, batch, of, list(trained))
    except Exception:  # it has none, or not in this mode
        gradients = dict.fromkeys(trained)
    read, silent = 0, []
    for name, grad in gradients.items():
        if grad is not None and bool(grad.any()):
            parts = grad.flatten(1).any(1) if grad.ndim == 3 else torch.ones(1)
            read += int(parts.sum()) * (grad.numel() // len(parts))
        elif len(silent) < _MOST_DRAWN and _decides(model, batch, of, trained[name]):
            read += trained[name].numel()
        else:
            silent.append(name)
    return Read(read / max(1, sum(p.numel() for p in trained.values())), tuple(silent))


def _gradients(model: Any, batch: Batch, of: frozenset[str], names: list[str]) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    named = dict(model.named_parameters())
    with Float64():
        found = outputs(model, batch, grad=True)
        chosen = [x for name, x in found.items() if x.requires_grad and name in of]
        sums = [(torch.randn(x.shape, generator=generator) * x.nan_to_num(0, 0, 0)).sum() for x in chosen]
        total = torch.stack(sums).sum()
        wanted = [named[name] for name in names]
        return dict(zip(names, torch.autograd.grad(total, wanted, allow_unused=True), strict=True))


@torch.no_grad()
def _decides(model: Any, batch: Batch, of: frozenset[str], parameter: torch.Tensor) -> bool:
    """Whether an output changes if a parameter does."""
    before, kept = outputs(model, batch), parameter.clone()
    noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameter.copy_(kept + noise * (kept.square().mean().sqrt() + 0.1))
    after = outputs(model, batch)
    parameter.copy_(kept)
    return any(not torch.equal(before[name], after[name]) for name in of)
