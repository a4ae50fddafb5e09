"""Random numbers for every parameter and running statistic of any module: fresh norms and zero biases prove nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter, and every buffer that is saved, anew, at sizes that keep activations of order one.

    Tied parameters are drawn once and stay tied. What is positive stays so: gains, variances, steps of a scan. What is
    not trained is no parameter but a constant, such as sinusoids, and stays as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for _, parameter in sorted(model.named_parameters()):
        if parameter.is_floating_point() and parameter.numel() and parameter.requires_grad:
            parameter.copy_(_drawn(parameter, generator, table=id(parameter) in tables))
    saved = model.state_dict(keep_vars=True)
    for name, buffer in sorted(model.named_buffers()):
        if name in saved and buffer.is_floating_point() and buffer.ndim and buffer.numel():
            drawn = _drawn(buffer, generator, table=True)
            # What is no statistic sways a choice between experts: a large number would leave some without a token.
            buffer.copy_(drawn if "running" in name else buffer.double() + 0.1 * (drawn - buffer.double()))


def _drawn(values: Tensor, generator: torch.Generator, *, table: bool) -> Tensor:
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    if values.ndim > 1 and not table:
        # The last axis of a stack of matrices, all but the first axis of one matrix or kernel.
        fan_in = values[0].numel() if values.ndim != 3 or min(values.shape) == 1 else values.shape[-1]
        return noise / math.sqrt(max(1, fan_in))
    if bool((values > 0).all()):
        return values.double() * (0.5 + torch.rand(values.shape, generator=generator, dtype=torch.float64))
    return 0.3 * noise
