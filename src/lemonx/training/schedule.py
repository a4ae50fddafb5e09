"""The learning rate as a closed formula: a linear warm-up to the maximum, then a cosine (or a line) to the minimum.

The paper (section 5): an expanded model keeps the maximum of training from scratch, and decays faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule. Step `total` would have the minimum; the last update, step total - 1, is just above.

    >>> bert = Schedule(maximum=2e-4, minimum=2e-5, warmup=5_000, total=220_000)
    >>> [round(bert.learning_rate(step), 9) for step in (0, 2_500, 5_000, 112_500, 220_000)]
    [0.0, 0.0001, 0.0002, 0.00011, 2e-05]
    """

    maximum: float
    minimum: float
    warmup: int
    total: int
    decay: str = "cosine"

    def learning_rate(self, step: int) -> float:
        """The learning rate of the update after `step` updates."""
        if step < self.warmup:
            return self.maximum * step / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        share = (1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1 - done
        return self.minimum + (self.maximum - self.minimum) * share
