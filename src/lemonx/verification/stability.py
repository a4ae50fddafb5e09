"""Is the target as stable as the source? This matters for frames, which are dense, so that exactness is not enough.

In exact arithmetic the stream stays inside the frame. Rounding moves it slightly outside, and this error must not grow
from block to block; nor may the gradient. So both models run again in float32, and two figures are compared. Noise: how
far a model's outputs are from its own outputs in float64. Gradient: the norm over all parameters, for a random linear
function of the outputs, which is the same in both models.

Outputs of a wider model are compared by their first entries, or through a left inverse of a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.frames.construction import LIMIT
from lemonx.verification.check_result import CheckResult
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
class Stability(CheckResult):
    """The figures of both models, or why they were not measured."""

    also = ()

    source: Figures | None = None
    target: Figures | None = None
    skipped: str | None = None

    @property
    def limit(self) -> float:
        """The largest ratio of the target's figures to the source's that passes."""
        return LIMIT

    @property
    def noise(self) -> float:
        """The ratio of the target's noise to the source's."""
        assert self.source and self.target
        return self.target.noise / max(self.source.noise, LEAST)

    @property
    def gradient(self) -> float:
        """The ratio of the norms of the target's gradient and the source's."""
        assert self.source and self.target
        return self.target.gradient / self.source.gradient if self.source.gradient else 1.0

    @property
    def passed(self) -> bool:
        return self.skipped is not None or (self.noise <= LIMIT and self.gradient <= LIMIT)

    def as_dict(self) -> dict[str, JsonValue]:
        """The figures and, where they were measured, their ratios."""
        ratios = {} if self.skipped else {"noise_ratio": self.noise, "gradient_ratio": self.gradient, "limit": LIMIT}
        return super().as_dict() | ratios

    @property
    def found(self) -> str:
        """Say why it did not pass."""
        assert self.source and self.target
        what, now, before = (
            ("float32 noise", self.target.noise, self.source.noise)
            if not self.noise <= LIMIT
            else ("gradient norm", self.target.gradient, self.source.gradient)
        )
        return f"the target's {what} is {now:.1e} where the source's is {before:.1e}, more than {LIMIT:g} times as much"

    def reason(self) -> str:
        """Say in one line why it did not pass, and what to do."""
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


# ----------------------------------------------------------------- the way back from wider outputs

# How the names begin of what a model without a head gives out.
GIVEN_OUT = ("last_hidden_state", "pooler_output", "text_embeds", "image_embeds", "feature_maps")
# All ways from hidden states of a width to the source's, as matrices with a row for every entry of the source's.
Back = Callable[[int], Sequence["np.ndarray"]]


def aligned(name: str, reference: torch.Tensor, wide: torch.Tensor, back: Back | None) -> torch.Tensor:
    """An output of the target in the form of the source's; it keeps another shape if there is no such map."""
    # A base model's output is wider: the inverse of an expansion that copies reads the first entries.
    first = _first_entries(reference, wide)
    if back is None or not name.startswith(GIVEN_OUT) or first.shape != reference.shape:
        return first
    return _nearest(reference, [first, *_through(back, reference, wide)])


def _first_entries(reference: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The first entries, as many as the source has; for vectors of length one, the direction of these entries."""
    # Features of images have their channels on another axis than the last.
    first = wide[tuple(slice(size) for size in reference.shape)] if wide.ndim == reference.ndim else wide
    if wide.shape[-1] == reference.shape[-1] or first.shape != reference.shape:
        return first
    return _of_length_one(first) if _are_of_length_one(reference, wide) else first


def _are_of_length_one(reference: torch.Tensor, wide: torch.Tensor) -> bool:
    """Check that vectors have length one in the source, and in the target up to rounding."""
    return all(bool(((x.norm(dim=-1) - 1).abs() < near).all()) for x, near in ((reference, 1e-9), (wide, 1e-4)))


def _of_length_one(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _nearest(reference: torch.Tensor, ways: list[torch.Tensor]) -> torch.Tensor:
    """The best of these left inverses: a spec does not say which expansion the output has."""
    return min(ways, key=lambda other: float((reference - other).detach().abs().max()))


def _through(back: Back, reference: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """The states as the source would have them; vectors of length one keep that length."""
    # The maps of a backbone have their channels in front of height and width.
    sizes = zip(reference.shape, states.shape, strict=True)
    axis = next((i for i, (narrow, wide) in enumerate(sizes) if narrow != wide), -1)
    moved = states.movedim(axis, -1)
    ways = [(moved @ torch.from_numpy(way).T).movedim(-1, axis) for way in back(moved.shape[-1])]
    fitting = [way for way in ways if way.shape == reference.shape]
    return [_of_length_one(way) if _are_of_length_one(reference, states) else way for way in fitting]
