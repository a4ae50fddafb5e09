"""The order of the examples of a whole run, fixed by the seed alone.

Position i of a run is the same example with the same random draws, however many processes share the work and however
often the run was killed. This makes resuming exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class ExampleStream(Dataset[Mapping[str, Tensor]]):
    """A run's examples in order: epoch after epoch, each shuffled differently."""

    def __init__(self, examples: Any, length: int, seed: int) -> None:
        self.examples, self.length, self.seed = examples, length, seed
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, positions: Sequence[int]) -> list[Mapping[str, Tensor]]:
        size = len(self.examples)
        found: list[Mapping[str, Tensor]] = []
        for epoch, group in groupby(positions, key=lambda position: position // size):
            order = self._order_of(epoch)
            self.examples.set_epoch(epoch)
            indices = [order[position % size] for position in group]
            # A batch served at once is several times faster than one example after the other.
            found += self.examples.__getitems__(indices)
        return found

    def __getitem__(self, position: int) -> Mapping[str, Tensor]:
        return self.__getitems__([position])[0]

    def _order_of(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            # Seeds of neighbouring runs and epochs must not meet.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._order = epoch, torch.randperm(len(self.examples), generator=generator).tolist()
        return self._order[1]
