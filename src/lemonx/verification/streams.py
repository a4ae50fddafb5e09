"""The stream behind every block of a target, compared with the source's.

The source leaves its stream behind every block on disk. Behind a block of the target the stream must be the source's,
expanded: x* = E x, with the E that the plan's type check found. Added blocks leave the stream as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lemonx.algebra.expansions import Expansion
from lemonx.checkpoints import Checkpoint
from lemonx.planning import depth
from lemonx.planning.plan import Plan
from lemonx.verification.blocks import BlockName, blocks_of, modules_of
from lemonx.verification.check_result import CheckResult
from lemonx.verification.rounding import Allowed

# Called with a stack, the index of a block and the stream behind that block, without padding.
Seen = Callable[[str, int, np.ndarray], None]


@dataclass(frozen=True)
class ComparedBlock:
    """The stream behind a block of the target, against the source's behind `source`, relative to its largest entry."""

    block: str
    source: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class Layers(CheckResult):
    """The result of a comparison block by block; where a twin was run, the result for the twin.

    `weights`: the most bytes of parameters of either model that were in memory at once; `block`: those of the largest
    block, `model`: those of the larger model, all in float64. `memory`: the peak of this process. `skipped`: why no
    streams were compared, if so.
    """

    also = ("first",)

    places: tuple[ComparedBlock, ...]
    weights: int
    block: int
    model: int
    memory: int
    skipped: str | None = None

    @property
    def first(self) -> ComparedBlock | None:
        """The first block that differs."""
        return next((place for place in self.places if not place.passed), None)

    @property
    def passed(self) -> bool:
        return self.first is None


class Streams:
    """Keeps the source's streams in `folder`, and compares those of a target with them; `places`: the last target's."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.places: list[ComparedBlock] = []

    @property
    def differ(self) -> bool:
        """True if a stream of the last target differs from the source's."""
        return not all(place.passed for place in self.places)

    def kept(self, run: str) -> Seen:
        """Return a function that keeps the streams of a run of the source under the run's name."""
        (self.folder / run).mkdir()
        visits = Counter[BlockName]()

        def keep(stack: str, index: int, stream: np.ndarray) -> None:
            np.save(self._file(run, stack, index, visits[stack, index]), stream)
            visits[stack, index] += 1

        return keep

    def compared(self, allowed: Allowed, noisy: str | None) -> Seen:
        """Return a function that compares the streams of a target with the source's.

        `noisy`: the run of the source with rounded weights; its distance from the source is the noise of a stream.
        """
        self.places, visits = [], Counter[BlockName]()

        def compare(stack: str, index: int, found: np.ndarray) -> None:
            blocks, spec = self.plan.blocks[stack], self.plan.source_spec
            # Post-LN: the norms inside a group of copies share one affine part, so only its last block is comparable.
            if depth.stream_norms(spec, stack) and not blocks[index].closes:
                return
            origin = next(b.source for b in reversed(blocks[: index + 1]) if not b.added)
            # Blocks that shared their weights are one block of the source, which ran once for each of them.
            visit = visits[stack, index] + sum(b.source == origin and not b.added for b in blocks[: index + 1]) - 1
            visits[stack, index] += 1
            before = np.load(self._file("source", stack, origin, visit))
            noise = difference(before, np.load(self._file(noisy, stack, origin, visit)), None) if noisy else None
            off = difference(before, found, self._expansion(stack, origin))
            self.places.append(ComparedBlock(f"{stack}.{index}", f"{stack}.{origin}", off, allowed(noise)[0]))

        return compare

    def _expansion(self, stack: str, origin: int) -> Expansion | None:
        """The E that the stream behind a block of the source is multiplied by."""
        if self.plan.frames and (frames := self.plan.frames.of_stack(stack)):
            return frames.stream_after(origin)
        return self.plan.types.spaces.get(self.plan.source_spec.behind(stack, origin))

    def _file(self, run: str, stack: str, index: int, visit: int) -> Path:
        """The stream behind a block; a block that several layers share is visited several times."""
        return self.folder / run / f"{stack}.{index}.{visit}.npy"


def difference(before: np.ndarray, after: np.ndarray, expansion: Expansion | None) -> float:
    """The largest difference of `after` from E `before`, relative to the largest entry of E `before`."""
    wanted = before
    if not np.isfinite(after).all():
        return float("inf")
    if expansion is not None and not expansion.is_identity:
        axes = [i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=False)) if a != b]
        # A stream that only changes its scale (a gain) keeps its shape: it is then on the last axis.
        axis = axes[0] if axes else before.ndim - 1
        wanted = np.moveaxis(expansion.expand(np.moveaxis(before, axis, -1)), -1, axis)
        if expansion.is_free.any():
            after = np.where(np.moveaxis(np.ones(wanted.shape, bool) & ~expansion.is_free, -1, axis), after, 0)
    if wanted.shape != after.shape:
        return float("inf")
    largest = float(np.abs(wanted).max(initial=0.0))
    found = float(np.abs(after - wanted).max(initial=0.0)) / (largest or 1.0)
    return found if np.isfinite(found) else float("inf")


@contextmanager
def watched(model: Any, checkpoint: Checkpoint, mask: torch.Tensor | None, seen: Seen | None) -> Iterator[None]:
    """A context in which `seen` gets the stream behind every block of a model."""
    handles = []
    if mask is not None:
        mask = mask.flatten(0, -2)  # blocks see texts, also where a model chooses among several of them
    try:
        for (stack, index), module in modules_of(model, blocks_of(checkpoint)).items() if seen else ():

            def hook(_: Any, __: Any, result: Any, stack: str = stack, index: int = index) -> None:
                value = result[0] if isinstance(result, tuple) else result
                if mask is not None and value.shape[:2] == mask.shape:
                    value = value[mask.bool()]  # nothing reads what is computed at padding
                assert seen is not None
                seen(stack, index, value.double().numpy())

            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()
