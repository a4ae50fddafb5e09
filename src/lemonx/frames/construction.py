"""Frames: dense blocks that carry a LayerNorm's output into a stream that LayerNorms read, at any width.

A LayerNorm can read a mean in the remainder (avg), but it cannot write one: its gain scales each coordinate by itself.
So let a group of p source coordinates become P = rho p target coordinates through a dense block A,

    A^T A = rho I,   A 1 = 1:    mean and variance of A x are those of x, so every LayerNorm reads it (eta = 1).

A LayerNorm with gain mu writes mu n (n: its normalised input), and must now write A (mu n). It does so with gains 1/w
if its normalised input is U n, U = diag(w) A diag(mu), which must then have mean 0 and variance 1 too:

    U^T U = rho I,   1^T U = s rho 1^T:   then its input is to be G x, G = U (I - J) + J, J the mean.

A and w are found together, group by group (frames/solver.py). A group can have a solution if
(p-1)(P-1) - p(p-1)/2 + P >= p(p+1)/2 + p.

A LayerNorm that only reads a frame may have any gains m; its bias is m too, so it writes m A v with v = n + 1. The mean
of n is 0, so that of v is 1, and the source's output is linear in v for any gains mu and bias b, zeros included:

    mu n + b = mu v + (b - mu) mean(v),   v = A^T diag(1/m) y* / rho.

Not in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lemonx.errors import Refused
from lemonx.frames.solver import SMALL, SOLVED, solve

if TYPE_CHECKING:
    from collections.abc import Iterator

from lemonx.algebra.dense import Array, Blocks, DenseStack, Frame, _targets

# Unknowns of a group beyond which solving takes minutes.
UNKNOWNS = 420
# The part of the stream outside a frame is scaled, in a Post-LN block, by this fraction of the source's own scaling.
DAMPING = 0.5
# The largest ratio to the source allowed for the gains of a frame, and for a framed model's float32 noise and gradient.
LIMIT = 10.0
TINY = 1e-300
# 1^T U / rho: with 1 the equations are singular.
SHARES = (0.6, 0.5, 0.75, 0.4)


@dataclass(frozen=True, eq=False)
class Feeder:
    """What a LayerNorm that feeds a stream needs: the frame A, its own gains 1/w, and the expansion G of its input."""

    stream: Frame
    gains: Array
    inputs: Frame
    residual: float

    @property
    def spread(self) -> float:
        """The ratio of the largest gain to the smallest that is not near 0."""
        size = np.abs(self.gains[~_small(self.gains)])
        return float(size.max() / size.min()) if len(size) else 1.0


@dataclass(frozen=True, eq=False)
class Normed:
    """The output m A v of a LayerNorm that reads a frame; `read` gets the source's output out of it.

    The source's output is mu v + `offset` mean(v), with `gain` mu. `gains` and `bias` are the target's own.
    """

    carried: Frame
    read: Frame
    gain: Array
    offset: Array
    gains: Array
    bias: Array

    def turned(self, into: Blocks, start: int, stop: int) -> Array:
        """Rows start..stop of the matrix that, applied to v, converts this output into another frame when added."""
        rows = into.columns(start, stop)
        wanted = rows * self.gain + (rows @ self.offset)[:, None] / len(self.gain)
        return wanted - self.carried.forth.columns(start, stop)


# ----------------------------------------------------------------- sizes


def freedom(p: int, wide: int) -> int:
    """Unknowns less equations of a group of p coordinates that become `wide`."""
    return (p - 1) * (wide - 1) - p * (p - 1) // 2 + wide - p * (p + 1) // 2 - p


def group_sizes(size: int, target: int, *, fed: bool = True) -> list[tuple[int, int]]:
    """Groups (p, P) that make up a width; Refused if no size has both enough freedom and few enough unknowns.

    Where no norm feeds the stream there is nothing to solve, and any size will do.

    >>> group_sizes(48, 72)[:2], len(group_sizes(48, 72))
    ([(6, 9), (6, 9)], 8)
    """
    found = _group_sizes(size, target, fed)
    if found is None:
        near = [n for n in _near(size, target) if _group_sizes(size, n, fed)]
        advice = " or ".join(str(n) for n in near[:2]) or "a multiple of the width"
        raise Refused(
            f"no change of basis takes {size} features to {target}, as groups of them leave too little freedom, "
            "or too many unknowns to solve for",
            f"try {advice}",
        )
    return found


def _group_sizes(size: int, target: int, fed: bool) -> list[tuple[int, int]] | None:
    """The smallest groups with freedom to spare; with just enough of it, most starting points find no solution."""
    common = math.gcd(size, target)
    wide, step = target // common, size // common
    for p in range(step, size + 1, step):
        last = p + size % p
        solvable = (last + 1) * last * wide // step <= UNKNOWNS and freedom(p, p * wide // step) >= p
        if p > 1 and (solvable or not fed):
            return [(n, n * wide // step) for n in [p] * (size // p - 1) + [last]]
    return None


def _near(size: int, target: int) -> Iterator[int]:
    """Widths above the source's, nearest first."""
    for far in range(1, size + 1):
        yield from (n for n in (target - far, target + far) if n > size)


# ----------------------------------------------------------------- solving


@lru_cache(maxsize=64)
def _feed(gain: bytes, target: int, fed: bool = True) -> Feeder:
    mu = np.frombuffer(gain)
    shapes = group_sizes(len(mu), target, fed=fed)
    if not np.ptp(mu):  # equal gains can write any frame
        found = _built(np.ones(len(mu)), shapes, target, 1.0)
        return replace(found, gains=np.full(target, mu[0]))
    # All groups need the same share. The one that small gains require is also the gentlest for the others.
    own = math.sqrt(len(mu) / target)
    found = list[Feeder]()
    for share in (own,) if _small(mu).any() else (own, *SHARES):
        found.append(_built(mu, shapes, target, share))
        if found[-1].residual <= SOLVED:
            break
    return min(found, key=lambda feeder: feeder.residual)


def _built(mu: Array, shapes: list[tuple[int, int]], target: int, share: float) -> Feeder:
    """The frame of groups of these shapes, with one share 1^T U / rho."""
    forth, written, gains, worst, at = list[DenseStack](), list[DenseStack](), np.empty(target), 0.0, 0
    for (_, wide), index in _dealt(mu, shapes).items():
        start = at + wide * np.arange(len(index))
        solution = solve(mu[index], wide, share, _usual(mu), _small(mu)[index])
        forth.append(DenseStack(index, start, solution.a.transpose(0, 2, 1)))
        written.append(DenseStack(index, start, solution.u.transpose(0, 2, 1)))
        gains[start[:, None] + np.arange(wide)] = solution.gains
        worst, at = max(worst, solution.residual), at + wide * len(index)
    sums = np.zeros(target)
    for stack in written:
        sums += np.bincount(_targets(stack).ravel(), stack.values.sum(1).ravel(), target)
    a, rho = Blocks(len(mu), target, tuple(forth)), target / len(mu)
    inputs = Blocks(len(mu), target, tuple(written), 1.0 - sums)
    return Feeder(Frame(a, a.scaled(np.full(len(mu), 1 / rho), np.ones(target))), gains, Frame(inputs), worst)


def _small(gain: Array) -> NDArray[np.bool_]:
    """The gains that are 0, or near it beside the others."""
    return np.abs(gain) <= SMALL * np.abs(gain).max()


def _usual(gain: Array) -> float:
    """The root of the mean square of gains; 1 if all are 0."""
    return float(np.sqrt(np.mean(np.square(gain)))) or 1.0


def _dealt(mu: Array, shapes: list[tuple[int, int]]) -> dict[tuple[int, int], NDArray[np.int64]]:
    """The coordinates of each group. Each has small and large gains: similar ones make the equations singular."""
    order = np.argsort(np.abs(mu), kind="stable")
    result, (last, _) = dict[tuple[int, int], NDArray[np.int64]](), shapes[-1]
    if shapes[0] != shapes[-1]:
        taken = np.linspace(0, len(mu) - 1, last).round().astype(np.int64)
        result[shapes[-1]] = order[taken][None]
        order, shapes = np.delete(order, taken), shapes[:-1]
    result[shapes[0]] = order.reshape(shapes[0][0], len(shapes)).T
    return result


def feeder(gain: Array, target: int, name: str = "a LayerNorm") -> Feeder:
    """The frame that a LayerNorm with these gains can write, at `target` coordinates."""
    found, small = _feed(np.asarray(gain, np.float64).tobytes(), target), int(_small(gain).sum())
    which = f"its weights, {small} of which are near 0," if small else "its weights"
    remedy = f"try another width, or a multiple of {len(gain)}"
    if found.residual > SOLVED:
        raise Refused(
            f"{name}: no change of basis was found for {which} at width {target} (it misses its equations by "
            f"{found.residual:.0e})",
            remedy,
        )
    if (growth := _usual(found.gains) / _usual(gain)) > LIMIT:
        raise Refused(
            f"{name}: the change of basis for {which} at width {target} has gains {growth:.0f} times as large, "
            "and would amplify rounding and gradients as much",
            remedy,
        )
    return found


def any_frame(size: int, target: int) -> Feeder:
    """A frame for linear maps to write, which can write any."""
    return _feed(np.ones(size).tobytes(), target, fed=False)


def normed(stream: Frame, gain: Array, bias: Array | None, gains: Array) -> Normed:
    """The output, when it reads a frame, of a LayerNorm whose source has this gain and bias; `gains` are its own."""
    assert stream.back is not None
    size, wide = stream.forth.size, stream.forth.target_size
    ones, reads = np.ones(size), 1.0 / gains
    carried = Frame(stream.forth.scaled(ones, gains), stream.back.scaled(ones, reads))
    back = stream.back.scaled(gain, reads)
    if bias is None:
        return Normed(carried, Frame(carried.forth, back), gain, np.zeros(size), gains, np.zeros(wide))
    back = replace(back, mean=reads / wide, weights=bias - gain)
    return Normed(carried, Frame(carried.forth, back), gain, bias - gain, gains, gains)


def damped(gain: Array, behind: Array) -> Array:
    """The gains of a norm that reads a frame and leaves it in the stream, to be normed again with the gains `behind`.

    Readers do not see the part of the stream outside the frame (rounding errors): it stays in the stream and is
    multiplied by these gains and by those behind, as the source's stream is by its own two. These gains limit that
    product to DAMPING times the product of the usual gains, even where a gain behind is large.
    """
    return DAMPING * _usual(gain) * np.minimum(1.0, _usual(behind) / np.maximum(np.abs(behind), TINY))


def even(gain: Array, target: int) -> Array:
    """The gains of a norm that only linear maps read: all equal, to the usual one, so that weights keep their size."""
    return np.full(target, _usual(gain))
