"""Dense expansions: block matrices whose rows are sums of several source entries."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DenseStack:
    """g dense blocks of one shape, `values` (g, p, P).

    Block i maps the source's entries `index[i]` (p of them) to the P entries of the target from `start[i]` on.
    """

    index: NDArray[np.int64]
    start: NDArray[np.int64]
    values: Array

    @property
    def height(self) -> int:
        return self.values.shape[2]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A sparse matrix M (size x target): rows x of X become x M, and with `mean` m also mean(x) m.

    It is the transpose of an expansion E, or a left inverse of one: W E^T along columns, W L along columns. With
    `weights` u the mean is a sum, u . x.
    """

    size: int
    target_size: int
    stacks: tuple[DenseStack, ...]
    mean: Array | None = None
    weights: Array | None = None

    def along_columns(self, x: torch.Tensor) -> torch.Tensor:
        """X M + (X u) m, in float64."""
        import torch

        x = x.double()
        y = torch.empty(len(x), self.target_size, dtype=torch.float64)
        for stack in self.stacks:
            groups, width = stack.index.shape
            taken = x[:, torch.from_numpy(stack.index.reshape(-1))].view(len(x), groups, width).transpose(0, 1)
            made = torch.bmm(taken, torch.from_numpy(stack.values)).transpose(0, 1).reshape(len(x), -1)
            y[:, torch.from_numpy(_targets(stack).reshape(-1))] = made
        if self.mean is not None:
            y += (x @ torch.from_numpy(self._weights))[:, None] * torch.from_numpy(self.mean)
        return y

    @property
    def _weights(self) -> Array:
        return np.full(self.size, 1 / self.size) if self.weights is None else self.weights

    def along_rows(
        self, read: Callable[[int, int], torch.Tensor], mean: Callable[[], torch.Tensor], start: int, stop: int
    ) -> torch.Tensor:
        """Rows start..stop of M^T X + m mean(X), in float64, from the few rows of X that they are made of."""
        import torch

        assert self.weights is None
        parts = {}
        for stack in self.stacks:
            for g in np.flatnonzero((stack.start < stop) & (stack.start + stack.height > start)):
                # The reader reuses its buffer, so take a copy even where the rows are float64 already.
                taken = torch.cat([read(int(i), int(i) + 1).to(torch.float64, copy=True) for i in stack.index[g]])
                parts[int(stack.start[g])] = torch.from_numpy(stack.values[g]).T @ taken
        first = min(parts)
        result = torch.cat([parts[at] for at in sorted(parts)])[start - first : stop - first]
        if self.mean is not None:
            result = result + torch.from_numpy(self.mean[start:stop, None]) * mean().double()
        return result

    def rows(self, start: int, stop: int) -> Array:
        """Rows start..stop of M + u m, dense."""
        result = np.zeros((stop - start, self.target_size))
        for stack in self.stacks:
            group, place = np.nonzero((stack.index >= start) & (stack.index < stop))
            where = stack.index[group, place] - start
            result[where[:, None], _targets(stack)[group]] = stack.values[group, place]
        if self.mean is not None:
            result += self._weights[start:stop, None] * self.mean
        return result

    def columns(self, start: int, stop: int) -> Array:
        """Rows start..stop of M^T + m u^T, dense: of the expansion itself."""
        result = np.zeros((stop - start, self.size))
        for stack in self.stacks:
            targets = _targets(stack)
            group, place = np.nonzero((targets >= start) & (targets < stop))
            result[(targets[group, place] - start)[:, None], stack.index[group]] = stack.values[group, :, place]
        if self.mean is not None:
            result += self.mean[start:stop, None] * self._weights
        return result

    def scaled(self, by_source: Array, by_target: Array) -> Blocks:
        """diag(by_source) M diag(by_target)."""
        assert self.mean is None
        stacks = tuple(
            DenseStack(s.index, s.start, s.values * by_source[s.index][:, :, None] * by_target[_targets(s)][:, None, :])
            for s in self.stacks
        )
        return Blocks(self.size, self.target_size, stacks)

    def repeated(self, times: int) -> Blocks:
        """M applied to each of several vectors in a row. There must be no mean: it would be taken over all of them."""
        assert self.mean is None
        steps = np.arange(times)
        stacks = tuple(
            DenseStack(
                np.concatenate([s.index + self.size * i for i in steps]),
                np.concatenate([s.start + self.target_size * i for i in steps]),
                np.tile(s.values, (times, 1, 1)),
            )
            for s in self.stacks
        )
        return Blocks(times * self.size, times * self.target_size, stacks)


@dataclass(frozen=True, eq=False)
class Woven(Blocks):
    """`each` applied to every one of `outer` vectors in a row, the entries of which lie `inner` apart: M along columns.

    So a kernel reads it, and a map that reads several vectors in a row.
    """

    _: KW_ONLY
    each: Blocks
    outer: int
    inner: int

    @classmethod
    def of(cls, each: Blocks, outer: int, inner: int) -> Woven:
        times = outer * inner
        return cls(each.size * times, each.target_size * times, (), each=each, outer=outer, inner=inner)

    def along_columns(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.reshape(len(x), self.outer, self.each.size, self.inner).transpose(2, 3)
        made = self.each.along_columns(parts.reshape(-1, self.each.size))
        shape = len(x), self.outer, self.inner, self.each.target_size
        return made.reshape(shape).transpose(2, 3).reshape(len(x), -1)

    def rows(self, start: int, stop: int) -> Array:
        return self._dense(self.each.rows(0, self.each.size))[start:stop]

    def columns(self, start: int, stop: int) -> Array:
        return self._dense(self.each.columns(0, self.each.target_size))[start:stop]

    def _dense(self, one: Array) -> Array:
        return np.asarray(np.kron(np.kron(np.eye(self.outer), one), np.eye(self.inner)), np.float64)


def _targets(stack: DenseStack) -> NDArray[np.int64]:
    return stack.start[:, None] + np.arange(stack.height)


@dataclass(frozen=True, eq=False)
class Frame:
    """A dense expansion: `forth` is E^T; `back`, if something reads it, is a left inverse L, with L E = I."""

    forth: Blocks
    back: Blocks | None = None

    def woven(self, outer: int, inner: int) -> Frame:
        """The expansion of several vectors in a row, their entries that far apart; only columns can be in it."""
        return Frame(Woven.of(self.forth, outer, inner), Woven.of(self.back, outer, inner) if self.back else None)

    def repeated(self, times: int) -> Frame:
        """The expansion of several vectors in a row, each by this one."""
        if times == 1:
            return self
        return Frame(self.forth.repeated(times), self.back.repeated(times) if self.back else None)
