"""Norms in a row: what Post-LN depth loses to eps, and the gains with which it loses less.

Added blocks write nothing, so in a group (a Post-LN block and its copies) the last norm of the source's block is
followed by norms alone, j of them: Norm(Norm(x)) for Norm(x). How far that is from Norm(x) follows from one number, the
variance v of x (for an RMSNorm its mean square).

A norm without gain and bias takes x to a u, where u is x brought to variance 1, and a^2 = v / (v + eps). The next one
reads the variance a^2. With y = 1 / a^2 the first norm gives y_1 = 1 + eps / v, and each further one turns y into
1 + eps y. So with w = 1 / v, after all k = j + 1 of them,

    y_k = (1 - eps^k) / (1 - eps) + eps^k w,    and the stream is r = sqrt(y_1 / y_k) times what it was.

r^2 = (1 + eps w) / y_k grows with w. It is 1 at v = 1 - eps, and

    v > 1 - eps:  r^2 >= (1 - eps) / (1 - eps^k) >= 1 - eps                      the stream shrinks,
    v < 1 - eps:  r^2 - 1 = (y_1 - y_k) / y_k <= eps (w - 1), because y_k >= 1   it grows.

So wherever v >= 1/2, r is off by at most 1 - sqrt(1 - eps), which is eps/2, *once for a group*: more norms in it take y
no further than 1 / (1 - eps). With less variance it is (eps/2) (1/v - 1), and no number of norms says what v will be:
verification measures it.

Small gains. Let the first norm have the gain g, those between h = sqrt(g^2 + eps), and the last h / g besides its own.
Then y becomes (g^2 + eps y) / h^2, that is y - 1 shrinks by t = eps / h^2 at each norm instead of being forgotten:

    y_k - 1 = t^j eps w,    r^2 - 1 <= (1 - t^j) eps w,    t near 1 if g^2 is far below eps.

With g^2 = s eps that is about j s (eps/2) / v: exact as the share s goes to 0. The price: inside the group the stream
has the size g, and whatever the added blocks learn to write is divided by it. So s is no smaller than what is stored
can tell: in float32 a loss of 1e-9 is below one rounding.

Not in the paper, which has no eps there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lemonx.errors import Refused

# What all groups together may lose, relative to the stream: less than float16 loses by rounding it once.
LIMIT = 2.0**-11
# g^2 / eps of small gains, and where all gains are stored in 64 bits.
SHARE, SHARE_OF_64_BITS = 1e-4, 1e-8
# The variance in front of the first norm from which on the stated loss holds.
VARIANCE = 0.5


@dataclass(frozen=True)
class Gains:
    """What the gains of a group's norms are multiplied by: the first, those between, the last."""

    first: float = 1.0
    between: float = 1.0
    last: float = 1.0


def small_gains(eps: float, share: float = SHARE) -> Gains:
    """The gains g, h and h / g.

    h is a float32 unless 64 bits are stored: its rounding would come back at every norm, while that of g alone is
    hidden by eps.
    """
    between = math.sqrt(eps * (1 + share))
    if share >= SHARE:
        between = float(np.nextafter(np.float32(between), np.float32(np.inf)))
    first = math.sqrt(between**2 - eps)
    return Gains(first, between, between / first)


@dataclass(frozen=True)
class Chain:
    """So many `norms` behind the last norm of a block, before its affine part is applied; `small`: with small gains."""

    eps: float
    norms: int
    small: bool = False
    share: float = SHARE

    @property
    def gains(self) -> Gains:
        return small_gains(self.eps, self.share) if self.small else Gains()

    @property
    def loss(self) -> float:
        """The most that r is off by, where the variance in front of the first norm is at least VARIANCE."""
        if not self.norms:
            return 0.0
        if not self.eps < 1:
            return 1.0
        if self.small:
            kept = (self.eps / self.gains.between**2) ** self.norms
            return (1 - kept) * self.eps / VARIANCE / 2
        return self.eps / (1 + math.sqrt(1 - self.eps))  # 1 - sqrt(1 - eps), without its cancellation

    def ratio(self, variance: Any) -> Any:
        """r for every variance of an array or tensor: what the norms do, one after the other."""
        gains, eps = self.gains, self.eps
        left, ratio = gains.first**2 * variance / (variance + eps), 1.0
        for _ in range(self.norms):
            ratio = ratio * (gains.between / (left + eps) ** 0.5)
            left = gains.between**2 * left / (left + eps)
        return ratio


def expected_loss(chains: Iterable[Chain]) -> float:
    """What all groups together may lose, relative to the stream, if no block between them makes more or less of it."""
    return sum(chain.loss for chain in chains)


def require_small(chains: Iterable[Chain]) -> None:
    """Raise Refused if more than LIMIT is lost."""
    groups = [chain for chain in chains if chain.norms]
    lost = expected_loss(groups)
    if lost <= LIMIT:
        return
    eps, small = max(chain.eps for chain in groups), any(chain.small for chain in groups)
    remedy = "keep the depth" if small else "keep the depth, or use --free '{small_gains: true}'"
    raise Refused(
        f"an added Post-LN layer normalises its input a second time, which with eps = {eps:g} changes it by "
        f"up to {groups[0].loss:.1e} of itself, {lost:.1e} in all {len(groups)} places, more than {LIMIT:.1e}",
        remedy,
    )
