"""The learning rate as a closed formula: a linear warm-up to the maximum, and what comes after it.

cosine    half a cosine to the minimum: the paper's (section 5: an expanded model keeps the maximum of training from
          scratch, and decays faster)
linear    a line to the minimum
wsd       warm-up, stable, decay: the maximum up to the last `cooldown` steps, and a line to the minimum over these
constant  the maximum to the end: a run that is to be grown, and decayed only then
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["cosine", "linear", "wsd", "constant"]
# The part of a run over which wsd decays, unless a recipe says otherwise.
COOLDOWN = 0.2


def fitting_warmup(warmup: int, total: int, cooldown: int = 0) -> int:
    """A warm-up for which a run is too short is shortened to a tenth of the run.

    >>> fitting_warmup(5, 100, 40), fitting_warmup(70, 100, 40), fitting_warmup(5, 5), fitting_warmup(9, 100, 95)
    (5, 10, 0, 5)
    """
    return min(total // 10, total - cooldown) if warmup >= total or warmup + cooldown > total else warmup


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule. Step `total` would have the minimum; the last update, step total - 1, is just above.

    >>> bert = Schedule(maximum=2e-4, minimum=2e-5, warmup=5_000, total=220_000)
    >>> [round(bert.learning_rate(step), 9) for step in (0, 2_500, 5_000, 112_500, 220_000)]
    [0.0, 0.0001, 0.0002, 0.00011, 2e-05]
    >>> wsd = Schedule(maximum=1.0, minimum=0.0, warmup=10, total=100, decay="wsd", cooldown=20)
    >>> [wsd.learning_rate(step) for step in (0, 5, 10, 80, 90, 100)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """

    maximum: float
    minimum: float
    warmup: int
    total: int
    decay: Decay = "cosine"
    cooldown: int = 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of the update after `step` updates."""
        if step < self.warmup:
            return self.maximum * step / self.warmup
        return self.minimum + (self.maximum - self.minimum) * self._share(step)

    def _share(self, step: int) -> float:
        """What is left of the way from the minimum to the maximum."""
        if self.decay == "constant":
            return 1.0
        start = self.total - self.cooldown if self.decay == "wsd" else self.warmup
        done = min(1.0, max(0.0, (step - start) / max(1, self.total - start)))
        return (1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1 - done
