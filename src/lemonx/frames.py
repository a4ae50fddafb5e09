"""Frames: dense blocks that carry a LayerNorm's output into a stream that LayerNorms read, at any width.

A mean in the remainder (avg) is what a LayerNorm can read; but no LayerNorm can write it, because its gain is one
number a coordinate. So let few source coordinates, p of them, become P = rho p target coordinates by a dense block A,

    A^T A = rho I,   A 1 = 1:    mean and variance of A x are those of x, so every LayerNorm reads it (eta = 1).

A LayerNorm with gain mu writes mu n (n: its normed input), and must now write A (mu n). With gains 1/w that is U n,
U = diag(w) A diag(mu), if U n is normed too:

    U^T U = rho I,   1^T U = s rho 1^T:   then its input is to be G x, G = U (I - J) + J, J the mean.

A and w are found together, group by group, by Levenberg and Marquardt's method, from seeded starts; the residual is
what is left in float64. A group can have a solution if (p-1)(P-1) - p(p-1)/2 + P >= p(p+1)/2 + p. Not in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lemonx.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

Array = NDArray[np.float64]

# A group's equations are solved if no residual is larger: all numbers are of order one.
SOLVED = 1e-12
# Unknowns of a group beyond which solving takes minutes.
UNKNOWNS = 420
STARTS = 8
# A group whose largest gain is so many times its smallest tries again, in all GENTLE times.
EVEN, GENTLE = 4.0, 3
# 1^T U / rho: with 1 the equations are singular.
SHARES = (0.6, 0.5, 0.75, 0.4)


@dataclass(frozen=True, eq=False)
class Stack:
    """Blocks of one shape: entries `index` (g, p) of the source and P from `start` (g) on of the target, (g, p, P)."""

    index: NDArray[np.int64]
    start: NDArray[np.int64]
    values: Array

    @property
    def height(self) -> int:
        return self.values.shape[2]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A sparse matrix M (size x target): rows of X become X M, and with `mean` m also mean(x) m.

    It is the transpose of an expansion E, or a left inverse of one: W E^T along columns, W L along columns.
    """

    size: int
    target_size: int
    stacks: tuple[Stack, ...]
    mean: Array | None = None

    def along_columns(self, x: torch.Tensor) -> torch.Tensor:
        """X M + mean(X) m, in float64."""
        import torch

        x = x.double()
        y = torch.empty(len(x), self.target_size, dtype=torch.float64)
        for stack in self.stacks:
            groups, width = stack.index.shape
            taken = x[:, torch.from_numpy(stack.index.reshape(-1))].view(len(x), groups, width).transpose(0, 1)
            made = torch.bmm(taken, torch.from_numpy(stack.values)).transpose(0, 1).reshape(len(x), -1)
            y[:, torch.from_numpy(_targets(stack).reshape(-1))] = made
        if self.mean is not None:
            y += x.mean(1, keepdim=True) * torch.from_numpy(self.mean)
        return y

    def along_rows(
        self, read: Callable[[int, int], torch.Tensor], mean: Callable[[], torch.Tensor], start: int, stop: int
    ) -> torch.Tensor:
        """Rows start..stop of M^T X + m mean(X), in float64, from the few rows of X that they are made of."""
        import torch

        parts = {}
        for stack in self.stacks:
            for g in np.flatnonzero((stack.start < stop) & (stack.start + stack.height > start)):
                # What is read is valid until the next is: a copy, also where it is float64 already.
                taken = torch.cat([read(int(i), int(i) + 1).to(torch.float64, copy=True) for i in stack.index[g]])
                parts[int(stack.start[g])] = torch.from_numpy(stack.values[g]).T @ taken
        first = min(parts)
        result = torch.cat([parts[at] for at in sorted(parts)])[start - first : stop - first]
        if self.mean is not None:
            result = result + torch.from_numpy(self.mean[start:stop, None]) * mean().double()
        return result

    def rows(self, start: int, stop: int) -> Array:
        """Rows start..stop of M, dense."""
        result = np.zeros((stop - start, self.target_size))
        for stack in self.stacks:
            group, place = np.nonzero((stack.index >= start) & (stack.index < stop))
            where = stack.index[group, place] - start
            result[where[:, None], _targets(stack)[group]] = stack.values[group, place]
        return result

    def columns(self, start: int, stop: int) -> Array:
        """Rows start..stop of M^T + m 1^T / size, dense: of the expansion itself."""
        result = np.zeros((stop - start, self.size))
        for stack in self.stacks:
            targets = _targets(stack)
            group, place = np.nonzero((targets >= start) & (targets < stop))
            result[(targets[group, place] - start)[:, None], stack.index[group]] = stack.values[group, :, place]
        if self.mean is not None:
            result += self.mean[start:stop, None] / self.size
        return result

    def scaled(self, by_source: Array, by_target: Array) -> Blocks:
        """diag(by_source) M diag(by_target)."""
        stacks = tuple(
            Stack(s.index, s.start, s.values * by_source[s.index][:, :, None] * by_target[_targets(s)][:, None, :])
            for s in self.stacks
        )
        return Blocks(self.size, self.target_size, stacks, None if self.mean is None else self.mean * by_target)

    def repeated(self, times: int) -> Blocks:
        """M for each of so many vectors that lie one after the other; a mean over all of them would be another."""
        assert self.mean is None
        steps = np.arange(times)
        stacks = tuple(
            Stack(
                np.concatenate([s.index + self.size * i for i in steps]),
                np.concatenate([s.start + self.target_size * i for i in steps]),
                np.tile(s.values, (times, 1, 1)),
            )
            for s in self.stacks
        )
        return Blocks(times * self.size, times * self.target_size, stacks)


def _targets(stack: Stack) -> NDArray[np.int64]:
    return stack.start[:, None] + np.arange(stack.height)


@dataclass(frozen=True, eq=False)
class Frame:
    """A dense expansion: E^T, and a left inverse L of E (L E = I), where something reads it."""

    forth: Blocks
    back: Blocks | None = None

    def repeated(self, times: int) -> Frame:
        """The expansion of so many vectors in a row, each by this one."""
        if times == 1:
            return self
        return Frame(self.forth.repeated(times), self.back.repeated(times) if self.back else None)


@dataclass(frozen=True, eq=False)
class Feeder:
    """What a LayerNorm that feeds a framed stream needs: A, its own gains 1/w, and G, what its input becomes."""

    stream: Frame
    gains: Array
    inputs: Frame
    residual: float

    @property
    def spread(self) -> float:
        """The largest gain over the smallest: how unevenly coordinates are scaled."""
        size = np.abs(self.gains)
        return float(size.max() / size.min())


# ----------------------------------------------------------------- sizes


def freedom(p: int, wide: int) -> int:
    """Unknowns less equations of a group of p coordinates that become `wide`."""
    return (p - 1) * (wide - 1) - p * (p - 1) // 2 + wide - p * (p + 1) // 2 - p


def group_sizes(size: int, target: int, *, fed: bool = True) -> list[tuple[int, int]]:
    """Groups (p, P) that make up a width; Refused if none of a size that can be solved has enough freedom.

    Where no norm feeds them there is nothing to solve, and any size does.

    >>> group_sizes(48, 72)[:2], len(group_sizes(48, 72))
    ([(6, 9), (6, 9)], 8)
    """
    found = _group_sizes(size, target, fed)
    if found is None:
        near = [n for n in _near(size, target) if _group_sizes(size, n, fed)]
        advice = " or ".join(str(n) for n in near[:2]) or "a multiple of the width"
        raise Refused(
            f"no frame carries {size} coordinates into {target}: groups of them have too little freedom, or too many "
            f"unknowns to solve for: try {advice}"
        )
    return found


def _group_sizes(size: int, target: int, fed: bool) -> list[tuple[int, int]] | None:
    """The smallest groups with freedom to spare: with just enough, most starts end in no solution."""
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
    shapes, rho = group_sizes(len(mu), target, fed=fed), target / len(mu)
    found = list[tuple[float, tuple[Stack, ...], Array]]()
    for share in SHARES if np.ptp(mu) else (1.0,):  # one for all groups; with equal gains, that of any frame
        stacks, gains, worst, at, dealt = list[Stack](), np.empty(target), 0.0, 0, _dealt(mu, shapes)
        for shape in sorted(set(shapes), key=shapes.index):
            wide, count = shape[1], shapes.count(shape)
            index = dealt[shape]
            start = at + wide * np.arange(count)
            blocks, weights, residual = _solve(mu[index], wide, share)
            stacks.append(Stack(index, start, blocks.transpose(0, 2, 1)))
            gains[start[:, None] + np.arange(wide)] = 1.0 / weights
            worst, at = max(worst, residual), at + wide * count
        found.append((worst, tuple(stacks), gains))
        if worst <= SOLVED:
            break
    worst, stacks, gains = min(found, key=lambda solution: solution[0])
    forth = Blocks(len(mu), target, stacks)
    written = forth.scaled(mu, 1.0 / gains)
    sums = np.zeros(target)
    for stack in written.stacks:
        sums += np.bincount(_targets(stack).ravel(), stack.values.sum(1).ravel(), target)
    inputs = Blocks(len(mu), target, written.stacks, 1.0 - sums)
    return Feeder(Frame(forth, forth.scaled(np.full(len(mu), 1 / rho), np.ones(target))), gains, Frame(inputs), worst)


def _dealt(mu: Array, shapes: list[tuple[int, int]]) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Which coordinates each group has: small and large gains in all, since like gains make the equations singular."""
    order = np.argsort(mu, kind="stable")
    result, (last, _) = {}, shapes[-1]
    if shapes[0] != shapes[-1]:
        taken = np.linspace(0, len(mu) - 1, last).round().astype(np.int64)
        result[shapes[-1]] = order[taken][None]
        order, shapes = np.delete(order, taken), shapes[:-1]
    result[shapes[0]] = order.reshape(shapes[0][0], len(shapes)).T
    return result


def feeder(gain: Array, target: int, name: str = "a LayerNorm") -> Feeder:
    """The frame that a LayerNorm with these gains can write, at `target` coordinates."""
    gain = np.asarray(gain, np.float64)
    _require_gains(gain, name)
    found = _feed(gain.tobytes(), target)
    if found.residual > SOLVED:
        raise Refused(
            f"{name}: no frame was found that carries its gains into {target} coordinates (what is left of the "
            f"equations is {found.residual:.0e}): try another width, or a multiple of it"
        )
    return found


def any_frame(size: int, target: int) -> Feeder:
    """A frame that linear maps write: with equal gains, any is one."""
    return _feed(np.ones(size).tobytes(), target, fed=False)


def _require_gains(gain: Array, name: str) -> None:
    if not (np.abs(gain) > 1e-6 * np.abs(gain).max()).all():
        raise Refused(f"{name} has a gain of 0 somewhere, which no frame can carry: choose a multiple of the width")


def reader(stream: Frame, gain: Array, name: str = "a LayerNorm") -> Frame:
    """What a LayerNorm with these gains writes when it reads a frame, and has gains of one instead."""
    _require_gains(gain, name)
    assert stream.back is not None
    ones = np.ones(stream.forth.target_size)
    return Frame(stream.forth.scaled(1.0 / gain, ones), stream.back.scaled(gain, ones))


def _solve(mu: Array, wide: int, share: float) -> tuple[Array, Array, float]:
    """A (g, P, p), w (g, P) and the largest residual for groups of gains (g, p): of several starts the gentlest."""
    count, p = mu.shape
    if share == 1.0:
        a, w = _start(mu, wide, np.random.default_rng([p, wide]))
        return a, w, float(np.abs(_residuals(a, w, mu, share)).max())
    blocks, weights = np.zeros((count, wide, p)), np.ones((count, wide))
    left, uneven = np.full(count, np.inf), np.full(count, np.inf)
    for start in range(STARTS):
        # Groups without a solution, or with one that scales coordinates very unevenly, try again.
        todo = np.flatnonzero((left > SOLVED) | ((uneven > EVEN) & (start < GENTLE)))
        if not len(todo):
            break
        a, w, residual = _levenberg_marquardt(mu[todo], wide, share, np.random.default_rng([p, wide, start]))
        ratio = np.abs(w).max(1) / np.maximum(np.abs(w).min(1), 1e-300)
        solved, before = residual <= SOLVED, left[todo] <= SOLVED
        better = np.where(before, solved & (ratio < uneven[todo]), residual < left[todo])
        at = todo[better]
        blocks[at], weights[at], left[at], uneven[at] = a[better], w[better], residual[better], ratio[better]
    return blocks, weights, float(left.max())


def _start(mu: Array, wide: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """A random A with A^T A = rho I and A 1 = 1 for every group, and the w that would do if its rows were units."""
    count, p = mu.shape
    u, e = np.full((wide, 1), wide**-0.5), np.full((p, 1), p**-0.5)
    tall, small = rng.standard_normal((count, wide, p - 1)), rng.standard_normal((count, p, p - 1))
    q = np.linalg.qr(tall - u @ (u.T @ tall))[0]
    r = np.linalg.qr(small - e @ (e.T @ small))[0]
    a = math.sqrt(wide / p) * (q @ r.transpose(0, 2, 1) + u @ e.T)
    sign = np.where(mu.sum(1) < 0, -1.0, 1.0)[:, None]
    return a, sign / np.sqrt((a**2 * mu[:, None] ** 2).sum(2) / (a**2).sum(2))


def _residuals(a: Array, w: Array, mu: Array, share: float) -> Array:
    _, wide, p = a.shape
    rho, upper, eye = wide / p, np.triu_indices(p), np.eye(p)
    u = w[:, :, None] * a * mu[:, None]
    tight = (a.transpose(0, 2, 1) @ a - rho * eye)[:, upper[0], upper[1]]
    normed = (u.transpose(0, 2, 1) @ u - rho * eye)[:, upper[0], upper[1]]
    return np.concatenate([tight, a.sum(2) - 1.0, normed, u.sum(1) - share * rho], 1)


def _jacobian(a: Array, w: Array, mu: Array) -> Array:
    count, wide, p = a.shape
    first, second = np.triu_indices(p)
    pairs, t = len(first), np.arange(wide)
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
    return np.concatenate([by_a.reshape(count, -1, wide * p), by_w], 2)


def _levenberg_marquardt(
    mu: Array, wide: int, share: float, rng: np.random.Generator, steps: int = 150
) -> tuple[Array, Array, Array]:
    """From one start: A, w and the largest residual of every group, all groups at once."""
    a, w = _start(mu, wide, rng)
    damping = np.full(len(mu), 1e-2)
    left = _residuals(a, w, mu, share)
    for _ in range(steps):
        active = np.flatnonzero((np.abs(left).max(1) > 1e-15) & (damping < 1e12))
        if not len(active):
            break
        jacobian = _jacobian(a[active], w[active], mu[active])
        transposed = jacobian.transpose(0, 2, 1)
        hessian = transposed @ jacobian
        diagonal = np.einsum("gii->gi", hessian)
        damped = hessian.copy()
        np.einsum("gii->gi", damped)[:] += damping[active, None] * (diagonal + 1e-12)
        move = -np.linalg.solve(damped, transposed @ left[active, :, None])[:, :, 0]
        new_a = a[active] + move[:, :-wide].reshape(len(active), wide, -1)
        new_w = w[active] + move[:, -wide:]
        new_left = _residuals(new_a, new_w, mu[active], share)
        better = (new_left**2).sum(1) < (left[active] ** 2).sum(1)
        at = active[better]
        a[at], w[at], left[at] = new_a[better], new_w[better], new_left[better]
        damping[active] = np.where(better, np.maximum(damping[active] / 5, 1e-15), damping[active] * 4)
    return a, w, np.abs(left).max(1)
