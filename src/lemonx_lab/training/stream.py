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

from lemonx_lab.data import Prepared
from lemonx_lab.training.recipe import Recipe


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


class Rehearsal(Dataset[Mapping[str, Tensor]]):
    """Streams side by side: every batch has as many examples of each as `counts` says, one stream after the other."""

    def __init__(self, streams: Sequence[ExampleStream], counts: Sequence[int]) -> None:
        self.streams = streams
        # Of each example of a batch: its stream, how many of that stream a batch has, and which of them it is.
        self._places = [(i, count, k) for i, count in enumerate(counts) for k in range(count)]

    def __len__(self) -> int:
        return sum(map(len, self.streams))

    def __getitems__(self, positions: Sequence[int]) -> list[Mapping[str, Tensor]]:
        found: list[Mapping[str, Tensor]] = []
        for stream, group in groupby(map(self._place, positions), key=lambda place: place[0]):
            found += self.streams[stream].__getitems__([at for _, at in group])
        return found

    def __getitem__(self, position: int) -> Mapping[str, Tensor]:
        return self.__getitems__([position])[0]

    def _place(self, position: int) -> tuple[int, int]:
        batch, within = divmod(position, len(self._places))
        stream, count, k = self._places[within]
        return stream, batch * count + k


def training_examples(
    recipe: Recipe, data: Prepared, beside: Mapping[str, Prepared], steps: int
) -> ExampleStream | Rehearsal:
    """The examples of a run in order; with `rehearse`, a part of every batch is of the sections beside its own."""
    counts = recipe.rehearsed()
    own = recipe.batch_size - sum(counts.values())
    streams = [ExampleStream(data.train, steps * own, recipe.seed)]
    streams += [ExampleStream(beside[name].train, steps * count, recipe.seed) for name, count in counts.items()]
    return streams[0] if len(streams) == 1 else Rehearsal(streams, [own, *counts.values()])
