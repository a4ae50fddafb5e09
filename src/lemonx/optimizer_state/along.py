"""A linear map along one axis of a moment: every target index reads one source index, their mean, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from lemonx.algebra.dense import Frame
from lemonx.algebra.expansions import Expansion
from lemonx.algebra.runs import Fill

# Coefficients are fractions and roots of fractions: sums of their squares that differ by less differ by rounding.
EVEN = 1e-12
# Frames are solved for to about 1e-13.
_SAME = 1e-9


@dataclass(frozen=True, eq=False)
class Along:
    """y[t] = scale[t] x[source[t]]; at Fill.AVG scale[t] times the mean of x; at Fill.ZERO nothing.

    >>> import torch
    >>> half = Along(2, np.array([0, 1, 0, Fill.AVG]), np.array([0.5, 1.0, 0.5, 1.0]))
    >>> half.apply(torch.tensor([2.0, 4.0]), 0)
    tensor([1., 4., 1., 3.])
    """

    size: int
    source: NDArray[np.int64]
    scale: NDArray[np.float64]

    @property
    def is_identity(self) -> bool:
        same = len(self.source) == self.size and bool((self.source == np.arange(self.size)).all())
        return same and bool((self.scale == 1.0).all())

    @property
    def has_sums(self) -> bool:
        """Whether some target index reads more than one source index."""
        return bool((self.source == Fill.AVG).any())

    @property
    def is_even(self) -> bool:
        """Whether the squared coefficients of every source index have the same sum."""
        copied = self.source >= 0
        total = np.bincount(self.source[copied], self.scale[copied] ** 2, self.size)
        return bool(np.ptp(total) <= EVEN * np.abs(total).max())

    def apply(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """The map of a tensor's axis."""
        if self.is_identity:
            return x
        shape = [1] * x.ndim
        shape[axis] = -1
        index = torch.from_numpy(np.maximum(self.source, 0))
        scale = torch.from_numpy(np.where(self.source == Fill.ZERO, 0.0, self.scale)).to(x.dtype)
        y = x.index_select(axis, index) * scale.view(shape)
        if len(at := np.flatnonzero(self.source == Fill.AVG)):
            where = torch.from_numpy(at)
            mean = x.mean(axis, keepdim=True, dtype=torch.float64).to(x.dtype)
            y.index_copy_(axis, where, (mean * scale[where].view(shape)).contiguous())
        return y

    def signs(self) -> Along:
        """The map without the sizes of its coefficients: a step is a gradient divided by the root of its square."""
        return Along(self.size, self.source, np.sign(self.scale))

    def squared(self) -> Along:
        """The map with squared coefficients: a mean of n has n coefficients 1/n, so its squares are a mean over n."""
        return Along(
            self.size, self.source, np.where(self.source == Fill.AVG, self.scale**2 / self.size, self.scale**2)
        )


@dataclass(frozen=True, eq=False)
class Mixed(Along):
    """y = M x, where a target index may read all source indices: M is the frame of an expansion, or `made` of it."""

    frame: Frame
    made: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, space: Expansion) -> Mixed | None:
        """The expansion E of an activation that a frame carries; None where that is not known.

        Not before the frames are solved, and not behind a norm, whose output E x + c only its reader makes linear:
        there L E = I does not hold. Two vectors tell, as no others of the same kind would agree by chance.
        """
        if space.frame is None or space.frame.back is None:
            return None
        left, right = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 1, space.size)))
        through = (space.frame.back.along_columns(left) * space.frame.forth.along_columns(right)).sum()
        if abs(float(through - (left * right).sum())) > _SAME * float(left.norm() * right.norm()):
            return None
        size = space.target_size
        return cls(space.size, np.full(size, Fill.AVG), np.ones(size), space.frame, lambda matrix: matrix)

    @property
    def matrix(self) -> torch.Tensor:
        return self.made(self.frame.forth.along_columns(torch.eye(self.size, dtype=torch.float64)).T)

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def is_even(self) -> bool:
        """Not even: a frame gives its coordinates any weights."""
        return False

    def apply(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        mixed = (x.double().movedim(axis, -1) @ self.matrix.T).movedim(-1, axis)
        return mixed.to(x.dtype).contiguous()

    def signs(self) -> Mixed:
        """Steps have about one size, so the step of a mixture is a mixture whose coefficients have the norm 1."""
        return replace(self, made=lambda m: m / m.norm(dim=1, keepdim=True).clamp(min=EVEN))

    def squared(self) -> Mixed:
        return replace(self, made=torch.square)


def reads(space: Expansion) -> Along:
    """E, the expansion of an activation, and so of the axis of a gradient that comes from the input."""
    held = space.is_copy | space.is_mean
    source = np.where(space.is_copy, space.unit, np.where(space.is_mean, Fill.AVG, Fill.ZERO))
    amp = np.where(space.is_mean, 1.0, space.amp) * space.gain
    return Along(space.size, source, np.where(held, amp, 0.0))


def of_copies(space: Expansion, scale: NDArray[np.float64], counts: NDArray[np.bool_] | bool = True) -> Along:
    """The copies that count, each times its factor; nothing elsewhere."""
    copied = space.is_copy & counts
    return Along(space.size, np.where(copied, space.unit, Fill.ZERO), np.where(copied, scale, 0.0))
