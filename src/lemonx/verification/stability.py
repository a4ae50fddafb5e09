"""Is the target as stable as the source? This matters for frames, which are dense, so that exactness is not enough.

In exact arithmetic the stream stays inside the frame. Rounding moves it slightly outside, and this error must not grow
from block to block; nor may the gradient. So both models run again in float32, and two figures are compared. Noise: how
far a model's outputs are from its own outputs in float64. Gradient: the norm over all parameters, for a random linear
function of the outputs, which is the same in both models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.frames.construction import LIMIT
from lemonx.verification.comparison import Back, aligned
from lemonx.verification.inputs import View
from lemonx.verification.running import Name, all_outputs, load, running

REMEDY = "choose a multiple of the width"

# One rounding in float32: a source that is more exact than that is so by chance.
LEAST = 2.0**-24


@dataclass(frozen=True)
class Figures:
    """The figures of one model: its noise relative to its outputs, and the norm of its gradient."""

    noise: float
    gradient: float


@dataclass(frozen=True)
class Stability:
    """The figures of both models, or why they were not measured."""

    source: Figures | None = None
    target: Figures | None = None
    skipped: str | None = None

    @property
    def limit(self) -> float:
        """How many times the source's figures the target's may be."""
        return LIMIT

    @property
    def noise(self) -> float:
        """How many times the source's the target's noise is."""
        assert self.source and self.target
        return self.target.noise / max(self.source.noise, LEAST)

    @property
    def gradient(self) -> float:
        """How many times the source's the norm of the target's gradient is."""
        assert self.source and self.target
        return self.target.gradient / self.source.gradient if self.source.gradient else 1.0

    @property
    def passed(self) -> bool:
        return self.skipped is not None or (self.noise <= LIMIT and self.gradient <= LIMIT)

    def as_dict(self) -> dict[str, JsonValue]:
        ratios = {} if self.skipped else {"noise_ratio": self.noise, "gradient_ratio": self.gradient, "limit": LIMIT}
        return {**asdict(self), **ratios}

    @property
    def found(self) -> str:
        """Why it did not pass."""
        assert self.source and self.target
        what, now, before = (
            ("float32 noise", self.target.noise, self.source.noise)
            if not self.noise <= LIMIT
            else ("gradient norm", self.target.gradient, self.source.gradient)
        )
        return f"the target's {what} is {now:.1e} where the source's is {before:.1e}, more than {LIMIT:g} times as much"

    def reason(self) -> str:
        """The same with what to do, in one line."""
        return f"{self.found}: {REMEDY}"


def measure_stability(
    source: Checkpoint,
    target: Checkpoint,
    view: View,
    before: Mapping[Name, torch.Tensor],
    after: Mapping[Name, torch.Tensor],
    back: Back | None,
) -> Stability:
    """Run both models in float32, forward and backward, and compare with their outputs in float64."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(value.shape, generator=generator, dtype=value.dtype) for name, value in before.items()}

    def weighed(found: Mapping[Name, torch.Tensor]) -> torch.Tensor:
        ways = {n: aligned(n[0], before[n], value, back) for n, value in found.items() if n in before}
        return torch.stack([(way * weights[n]).sum() for n, way in ways.items()]).sum()

    def figures(checkpoint: Checkpoint, exact: Mapping[Name, torch.Tensor]) -> Figures:
        loaded = load(checkpoint, torch.float32)
        squares = list[float]()
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: squares.append(_taken(p)))
        with running(loaded.origin, view):
            found = all_outputs(loaded, view, grad=True)
            weighed(found).backward()
        noise = max((distance(exact[name], value) for name, value in found.items() if name in exact), default=0.0)
        return Figures(noise, sum(squares) ** 0.5)

    return Stability(figures(source, before), figures(target, after))


def _taken(parameter: torch.Tensor) -> float:
    """The square of a gradient's norm; the gradient itself is let go, so that no two are in memory."""
    assert parameter.grad is not None
    square = float(parameter.grad.double().square().sum())
    parameter.grad = None
    return square


def distance(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the size of the output; 0 where there is nothing."""
    size = float(exact.norm())
    return float((exact - other.detach()).norm()) / size if size else 0.0
