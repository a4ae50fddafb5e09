"""Two checkpoints compared block by block, with the weights of one module in memory at a time (by_module.py).

The source runs first, and leaves its stream after every block on disk; then the target runs, and after each of its
blocks the stream must be the source's, expanded: x* = E x, with the E that the plan's type check found. Added blocks
leave the stream as it is.

Where a rounding is unavoidable, the source runs once more with its weights rounded: that is what a rounded target is
measured by. Where it does not pass so, its twin decides (twin.py): that takes room on disk and another reading of all
weights, so it is left out where the stored weights pass by themselves.
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from lemonx.algebra.expansions import Expansion
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import CannotVerify
from lemonx.planning import depth
from lemonx.planning.plan import Plan
from lemonx.verification.blocks import blocks_of
from lemonx.verification.by_module import run_by_module
from lemonx.verification.comparison import Comparison, compared, largest_difference
from lemonx.verification.memory import short_of, within_memory
from lemonx.verification.outputs import Outputs, given_the_same
from lemonx.verification.rounding import Rounding, rounded_in, tolerance_of, twin_tolerance
from lemonx.verification.sample import View
from lemonx.verification.stability import Stability
from lemonx.verification.twin import with_twin


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
class Layers:
    """What a comparison block by block found; where a twin was run, what was found with that.

    `weights`: the most bytes of parameters of either model that were in memory at once; `block`: those of the largest
    block, `model`: those of the larger model, all in float64. `memory`: the peak of this process. `skipped`: why no
    streams were compared, if so.
    """

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

    def as_dict(self) -> dict[str, JsonValue]:
        return {**asdict(self), "first": asdict(self.first) if self.first else None}


def compare_layerwise(
    source: Checkpoint,
    target: Checkpoint,
    plan: Plan | None,
    *,
    rounding: Rounding | None,
    seed: int = 0,
    twin: bool = False,
) -> tuple[Comparison, Layers]:
    """Run both on the same sample, module by module. Without a lossless plan only the outputs are compared.

    `twin`: where the stored weights do not pass, run a target in which nothing is rounded.
    """
    if (short := memory_short(source, target)) is not None:
        raise CannotVerify(short, "verify on a larger machine")
    stored = rounded_in(source, target, rounding, planned=plan is not None)
    rounding = None if stored == "float64" else rounding
    with Temporary() as folder, within_memory("verify on a larger machine"):
        run = _Source.recorded(source, plan, folder, seed, rounding, stored)
        noise = run.before.noise
        comparison = run.against(target, tolerance_of(rounding, noise, stored), run.noisy)
        if plan and twin and rounding and not (comparison.near and run.passed):
            allowed = twin_tolerance(rounding, noise, stored)
            comparison = with_twin(comparison, plan, source, target, lambda other: run.against(other, allowed, None))
    if plan and plan.frames:
        skipped = "not measured: the models ran block by block, and a gradient needs all blocks"
        comparison = replace(comparison, stability=Stability(skipped=skipped))
    sizes = [_block_bytes(c) for c in (source, target)]
    layers = Layers(
        places=tuple(run.places),
        weights=run.weights,
        block=max(largest for largest, _ in sizes),
        model=max(total for _, total in sizes),
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        skipped=None if run.streams else "these two are not a lossless expansion that can be planned",
    )
    return comparison, layers


@dataclass
class _Source:
    """A source that ran, with its streams in `folder`, and what was found of the last target that ran against it."""

    checkpoint: Checkpoint
    plan: Plan | None
    folder: Path
    seed: int
    rounding: Rounding | None
    stored: str
    before: Outputs
    noisy: Path | None = None
    places: list[ComparedBlock] = field(default_factory=list)
    weights: int = 0

    @classmethod
    def recorded(
        cls, source: Checkpoint, plan: Plan | None, folder: Path, seed: int, rounding: Rounding | None, stored: str
    ) -> _Source:
        """Run the source; if its target is rounded, once more with weights rounded."""
        before, noisy = _record(source, seed, folder / "source", plan=plan), None
        if plan and plan.chains:
            before = replace(before, plain=_record(source, seed, folder / "plain", before.views).found)
        if rounding is not None:
            noisy = folder / "noise"
            moved = _record(source, seed, noisy, before.views, (rounding, stored), plan=plan)
            before = replace(before, noise=largest_difference(before.found, moved.found))
        return cls(source, plan, folder / "source", seed, rounding, stored, before, noisy, weights=before.weights)

    @property
    def streams(self) -> Plan | None:
        """The plan, if it says what becomes of a stream."""
        return self.plan if self.plan is not None and self.plan.policy.lossless else None

    @property
    def passed(self) -> bool:
        return all(place.passed for place in self.places)

    def against(self, target: Checkpoint, tolerance: tuple[float, str], noisy: Path | None) -> Comparison:
        """Run a target; each of its streams is measured by that of the noisy source, if there is one."""
        judge = None
        if self.streams:
            judge = _Judge(self.streams, self.folder, noisy, self.rounding, self.stored, tolerance[0])
        self.places = judge.places if judge else []

        # The same inputs: the target's vocabulary may be larger.
        def run(used: list[View] | None) -> Outputs:
            return run_by_module(target, self.seed, judge if judge and used else (lambda *_: None), used)

        after = given_the_same(self.checkpoint, target, run, self.before.views)
        self.weights = max(self.weights, after.weights)
        back = self.plan.frames.ways_back if self.plan and self.plan.frames else None
        return compared(self.checkpoint, target, self.before, after, tolerance=tolerance, back=back)


class _Judge:
    """Compares each stream of the target with what the source's becomes under the plan."""

    def __init__(
        self, plan: Plan, source: Path, noisy: Path | None, rounding: Rounding | None, stored: str, tolerance: float
    ) -> None:
        self.plan, self.source, self.noisy, self.rounding, self.stored = plan, source, noisy, rounding, stored
        self.tolerance = tolerance
        self.places, self.runs = list[ComparedBlock](), Counter[tuple[str, int]]()

    def __call__(self, stack: str, index: int, found: np.ndarray) -> None:
        blocks, spec = self.plan.blocks[stack], self.plan.source_spec
        # Post-LN: the norms inside a group of copies share one affine part, so only its last block is comparable.
        if depth.stream_norms(spec, stack) and not blocks[index].closes:
            return
        origin = next(b.source for b in reversed(blocks[: index + 1]) if not b.added)
        # Blocks that shared their weights are one block of the source, which ran once for each of them.
        run = self.runs[stack, index] + sum(b.source == origin and not b.added for b in blocks[: index + 1]) - 1
        self.runs[stack, index] += 1
        before = _stream(self.source, stack, origin, run)
        frames = self.plan.frames.of_stack(stack) if self.plan.frames else None
        known = self.plan.types.spaces.get(spec.behind(stack, origin))
        expansion = frames.stream_after(origin) if frames else known
        difference = _difference(before, found, expansion)
        tolerance = self.tolerance
        if self.noisy is not None:
            noise = _difference(before, _stream(self.noisy, stack, origin, run), None)
            tolerance, _ = tolerance_of(self.rounding, noise, self.stored)
        self.places.append(ComparedBlock(f"{stack}.{index}", f"{stack}.{origin}", difference, tolerance))


def _difference(before: np.ndarray, after: np.ndarray, expansion: Expansion | None) -> float:
    """The largest difference of `after` from E `before`, relative to the largest entry of the latter."""
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


def _file(folder: Path, stack: str, index: int, run: int) -> Path:
    """Where the stream behind a block is; blocks that several layers share run several times."""
    return folder / f"{stack}.{index}.{run}.npy"


def _stream(folder: Path, stack: str, index: int, run: int) -> np.ndarray:
    return np.load(_file(folder, stack, index, run))


def _record(
    checkpoint: Checkpoint,
    seed: int,
    folder: Path,
    given: list[View] | None = None,
    rounded: tuple[Rounding, str] | None = None,
    plan: Plan | None = None,
) -> Outputs:
    """Run a checkpoint, as its deeper target by `plan` must, and leave the stream behind every block in `folder`."""
    folder.mkdir()
    runs = Counter[tuple[str, int]]()

    def keep(stack: str, index: int, stream: np.ndarray) -> None:
        np.save(_file(folder, stack, index, runs[stack, index]), stream)
        runs[stack, index] += 1

    return run_by_module(checkpoint, seed, keep, given, rounded, plan)


def _block_bytes(checkpoint: Checkpoint) -> tuple[int, int]:
    """The bytes in float64 of the largest block, or tensor outside of all blocks, and of all tensors."""
    numbers = {name: info.numel for name, info in checkpoint.tensors.items()}
    blocks = blocks_of(checkpoint)
    inside = {name for names in blocks.values() for name in names}
    sums = [sum(numbers[name] for name in names) for names in blocks.values()]
    outside = [count for name, count in numbers.items() if name not in inside]
    return 8 * max([*sums, *outside]), 8 * sum(numbers.values())


def memory_short(source: Checkpoint, target: Checkpoint) -> str | None:
    """Why a comparison cannot run here, if it cannot: the largest block or tensor must fit in float64, twice."""
    largest = max(_block_bytes(c)[0] for c in (source, target))
    return short_of(2 * largest, "verification block by block, in float64,")
