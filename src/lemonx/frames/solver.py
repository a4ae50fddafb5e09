"""The equations of a frame, group by group, by Levenberg and Marquardt's method.

For p gains mu there are to be A (P x p) and w (P) with, for U = diag(w) A diag(mu) and rho = P / p,

    A^T A = rho I,   A 1 = 1,   U^T U = rho I,   1^T U = s rho 1^T.

A gain near 0 leaves its column of U nothing but a row of its own: there A is 1 in this column and 0 elsewhere, w is
sqrt(rho) / mu, and the column's sum is sqrt(rho) = s rho. So s is 1 / sqrt(rho) then, and the other rows have rho - 1
of that column's energy left, for which there must be room: P less the rows of their own is at least p. With a gain of
0 that row's output is constant, whatever comes in, and all equations stay: the solver finds them for a tiny gain in
its place, too small for float64 to tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lemonx.algebra.dense import Array

# A group's equations are solved if no residual is larger: all numbers are of order one.
SOLVED = 1e-12
STARTS = 8
# A group is solved again while a gain of its norm is more than this many times the usual one and its own largest.
EVEN = 2.0
# The first PULLED steps are pulled towards small gains, with weight PULL.
PULL, PULLED = 0.3, 15
# A gain smaller than this fraction of the largest gets a row of its own.
SMALL = 1e-2
# Gains below this fraction of the usual one are replaced by it.
FLOOR = 2.0**-60


@dataclass(frozen=True, eq=False)
class Solution:
    """For g groups A and U (g, P, p), the gains of the norm that writes them (g, P), and the largest residual."""

    a: Array
    u: Array
    gains: Array
    residual: float


def solve(mu: Array, wide: int, share: float, usual: float, small: NDArray[np.bool_]) -> Solution:
    """The frames of groups with gains mu (g, p), of which these are small, in a norm with this usual gain."""
    near = np.where(mu < 0, -FLOOR, FLOOR) * usual
    whole = np.where(np.abs(mu) < FLOOR * usual, near, mu)
    count, p = mu.shape
    a, w, left = np.ones((count, wide, p)), np.ones((count, wide)), np.full(count, np.inf)
    counts = small.sum(1)
    for own in np.unique(counts) if counts.max() <= wide - p else ():  # groups with as many rows of their own
        at = np.flatnonzero(counts == own)
        a[at], w[at], left[at] = _solve(whole[at], wide, share, usual, small[at])
    gains = 1.0 / w
    group, place = np.nonzero(small)
    gains[group, np.cumsum(small, 1)[group, place] - 1] *= mu[group, place] / whole[group, place]
    u = w[:, :, None] * a * whole[:, None]
    written = np.abs(gains[:, :, None] * u - a * mu[:, None]).max() / usual
    return Solution(a, u, gains, max(float(left.max()), float(written)))


def _solve(mu: Array, wide: int, share: float, usual: float, small: NDArray[np.bool_]) -> tuple[Array, Array, Array]:
    """A, w and the largest residual for groups that have as many small gains: of several starts the gentlest."""
    count, p = mu.shape
    own = int(small[0].sum())
    if share == 1.0:
        a, w = _start(mu, wide, small, np.random.default_rng([p, wide]))
        return a, w, _Equations.whole(mu, wide, share).most(a, w)
    blocks, weights = np.zeros((count, wide, p)), np.ones((count, wide))
    left, uneven = np.full(count, np.inf), np.full(count, np.inf)
    size = np.maximum(usual, np.abs(mu).max(1))
    for start in range(STARTS):
        # Groups without a solution, or with one that scales coordinates very unevenly, try again.
        todo = np.flatnonzero((left > SOLVED) | (uneven > EVEN))
        if not len(todo):
            break
        rng = np.random.default_rng([p, wide, start])
        a, w, residual = _solve_from(mu[todo], wide, share, small[todo], rng)
        ratio = 1.0 / (np.abs(w[:, own:]).min(1) * size[todo])
        solved, before = residual <= SOLVED, left[todo] <= SOLVED
        better = np.where(before, solved & (ratio < uneven[todo]), residual < left[todo])
        at = todo[better]
        blocks[at], weights[at], left[at], uneven[at] = a[better], w[better], residual[better], ratio[better]
    return blocks, weights, left


def _solve_from(
    mu: Array, wide: int, share: float, small: NDArray[np.bool_], rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """From one start: first as if small gains were 0, beside their own rows, then as they are."""
    own, whole = int(small[0].sum()), _Equations.whole(mu, wide, share)
    a, w = _start(mu, wide, small, rng)
    beside = _Equations.beside(mu, wide, share, small) if own else whole
    a[:, own:], w[:, own:] = _levenberg_marquardt(replace(beside, pull=PULL), a[:, own:], w[:, own:], PULLED)
    a[:, own:], w[:, own:] = _levenberg_marquardt(beside, a[:, own:], w[:, own:])
    if own:
        a, w = _levenberg_marquardt(whole, *_newton(whole, a, w))
    return a, w, whole.most(a, w)


def _start(mu: Array, wide: int, small: NDArray[np.bool_], rng: np.random.Generator) -> tuple[Array, Array]:
    """A random A with A^T A = rho I and A 1 = 1 for every group, and the w that would do if its rows were units.

    The first rows are those of small gains.
    """
    count, p = mu.shape
    own, rho = int(small[0].sum()), wide / p
    rest, root = wide - own, np.sqrt(np.where(small, rho - 1.0, rho))[:, :, None]
    u, e = np.full((rest, 1), rest**-0.5), root * rest**-0.5
    tall, square = rng.standard_normal((count, rest, p - 1)), rng.standard_normal((count, p, p - 1))
    q = np.linalg.qr(tall - u @ (u.T @ tall))[0]
    r = np.linalg.qr(square - e @ (e.transpose(0, 2, 1) @ square))[0]
    a = (q @ r.transpose(0, 2, 1) + u @ e.transpose(0, 2, 1)) * root.transpose(0, 2, 1)
    sign = np.where(np.where(small, 0.0, mu).sum(1) < 0, -1.0, 1.0)[:, None]
    w = sign / np.sqrt((a**2 * mu[:, None] ** 2).sum(2) / (a**2).sum(2))
    place = np.nonzero(small)[1].reshape(count, own)
    first = np.zeros((count, own, p))
    np.put_along_axis(first, place[:, :, None], 1.0, 2)
    return np.concatenate([first, a], 1), np.concatenate([math.sqrt(rho) / np.take_along_axis(mu, place, 1), w], 1)


@dataclass(frozen=True, eq=False)
class _Equations:
    """The equations of groups with gains mu (g, p): what A^T A, A 1, U^T U and 1^T U are to be, those that are on."""

    mu: Array
    aims: Array
    on: Array
    pull: float = 0.0

    @classmethod
    def whole(cls, mu: Array, wide: int, share: float) -> _Equations:
        count, p = mu.shape
        rho, pairs = wide / p, np.eye(p)[np.triu_indices(p)]
        aims = np.concatenate([rho * pairs, np.ones(wide), rho * pairs, np.full(p, share * rho)])
        return cls(mu, np.tile(aims, (count, 1)), np.ones((count, len(aims))))

    @classmethod
    def beside(cls, mu: Array, wide: int, share: float, small: NDArray[np.bool_]) -> _Equations:
        """Those of the other rows, where small gains are as good as 0.

        Their columns of U are of that size there, so all that must be is that these add nothing to the column's sum.
        """
        p, own = mu.shape[1], int(small[0].sum())
        rho, (first, second) = wide / p, np.triu_indices(p)
        either = small[:, first] | small[:, second]
        tight = np.where(first == second, np.where(small, rho - 1.0, rho)[:, first], 0.0)
        normed = np.where(either, 0.0, rho * (first == second))
        ones = np.ones((len(mu), wide - own))
        aims = np.concatenate([tight, ones, normed, np.where(small, 0.0, share * rho)], 1)
        on = np.concatenate([np.ones_like(tight), ones, np.where(either, 0.0, 1.0), np.ones_like(mu)], 1)
        return cls(np.where(small, 1.0, mu), aims, on)

    def at(self, groups: NDArray[np.int64]) -> _Equations:
        return _Equations(self.mu[groups], self.aims[groups], self.on[groups], self.pull)

    def left(self, a: Array, w: Array) -> Array:
        """The residual of each equation."""
        upper = np.triu_indices(a.shape[2])
        u = w[:, :, None] * a * self.mu[:, None]
        tight = (a.transpose(0, 2, 1) @ a)[:, upper[0], upper[1]]
        normed = (u.transpose(0, 2, 1) @ u)[:, upper[0], upper[1]]
        left = (np.concatenate([tight, a.sum(2), normed, u.sum(1)], 1) - self.aims) * self.on
        return np.concatenate([left, self.pull * self._level / w], 1) if self.pull else left

    @property
    def _level(self) -> Array:
        return 1.0 / np.sqrt((self.mu**2).mean(1, keepdims=True))

    def most(self, a: Array, w: Array) -> Array:
        """The largest residual of every group."""
        return np.abs(self.left(a, w)).max(1)

    def jacobian(self, a: Array, w: Array) -> Array:
        count, wide, p = a.shape
        first, second = np.triu_indices(p)
        mu, pairs, t = self.mu, len(first), np.arange(wide)
        u, wm = w[:, :, None] * a * mu[:, None], w[:, :, None] * mu[:, None]
        by_a = np.zeros((count, 2 * pairs + wide + p, wide, p))
        by_w = np.zeros((count, 2 * pairs + wide + p, wide))
        for r, (i, j) in enumerate(zip(first, second, strict=True)):
            by_a[:, r, :, i] += a[:, :, j]
            by_a[:, r, :, j] += a[:, :, i]
            at = pairs + wide + r
            by_a[:, at, :, i] += wm[:, :, i] * u[:, :, j]
            by_a[:, at, :, j] += wm[:, :, j] * u[:, :, i]
            by_w[:, at] = 2 * w * a[:, :, i] * a[:, :, j] * (mu[:, i] * mu[:, j])[:, None]
        by_a[:, pairs + t, t] = 1.0
        for i in range(p):
            by_a[:, 2 * pairs + wide + i, :, i] = wm[:, :, i]
            by_w[:, 2 * pairs + wide + i] = a[:, :, i] * mu[:, i, None]
        found = np.concatenate([by_a.reshape(count, -1, wide * p), by_w], 2) * self.on[:, :, None]
        if not self.pull:
            return found
        pulled = np.zeros((count, wide, found.shape[2]))
        pulled[:, t, wide * p + t] = -self.pull * self._level / w**2
        return np.concatenate([found, pulled], 1)


def _newton(equations: _Equations, a: Array, w: Array, steps: int = 6) -> tuple[Array, Array]:
    """A and w after a few steps from near a solution, undamped: a small gain's equations are as small as it is."""
    wide = w.shape[1]
    for _ in range(steps):
        jacobian, left = equations.jacobian(a, w), equations.left(a, w)
        unit = 1.0 / np.sqrt((jacobian**2).sum(1) + 1e-200)
        move = -(np.linalg.pinv(jacobian * unit[:, None], rcond=1e-12) @ left[:, :, None])[:, :, 0] * unit
        new_a, new_w = a + move[:, :-wide].reshape(a.shape), w + move[:, -wide:]
        better = equations.most(new_a, new_w) < equations.most(a, w)
        a, w = np.where(better[:, None, None], new_a, a), np.where(better[:, None], new_w, w)
        if not better.any():
            break
    return a, w


def _levenberg_marquardt(equations: _Equations, a: Array, w: Array, steps: int = 150) -> tuple[Array, Array]:
    """A and w from where they are to where the equations hold, or as near as this goes; all groups at once."""
    a, w, wide = a.copy(), w.copy(), w.shape[1]
    damping = np.full(len(a), 1e-2)
    left = equations.left(a, w)
    for _ in range(steps):
        active = np.flatnonzero((np.abs(left).max(1) > 1e-15) & (damping < 1e12))
        if not len(active):
            break
        here = equations.at(active)
        jacobian = here.jacobian(a[active], w[active])
        # Scale every unknown: in rows of small gains they differ by orders of magnitude.
        unit = 1.0 / np.sqrt((jacobian**2).sum(1) + 1e-200)
        jacobian *= unit[:, None]
        transposed = jacobian.transpose(0, 2, 1)
        damped = transposed @ jacobian
        np.einsum("gii->gi", damped)[:] += damping[active, None]
        move = -np.linalg.solve(damped, transposed @ left[active, :, None])[:, :, 0] * unit
        new_a = a[active] + move[:, :-wide].reshape(len(active), wide, -1)
        new_w = w[active] + move[:, -wide:]
        new_left = here.left(new_a, new_w)
        better = (new_left**2).sum(1) < (left[active] ** 2).sum(1)
        at = active[better]
        a[at], w[at], left[at] = new_a[better], new_w[better], new_left[better]
        # Stop where the equations hold and a further step only adds rounding.
        ended = ~better & (np.abs(left[active]).max(1) < SOLVED / 10)
        grown = np.where(ended, np.inf, damping[active] * 4)
        damping[active] = np.where(better, np.maximum(damping[active] / 5, 1e-15), grown)
    return a, w
