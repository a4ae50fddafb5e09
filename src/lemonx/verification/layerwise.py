"""Two checkpoints compared block by block, with the weights of one module in memory at a time.

Both models are built without weights; accelerate's hooks read each module's weights from the files just before it
runs and drop them right after, so a model larger than memory can be verified. The source runs first, and leaves its
stream after every block on disk; then the target runs, and after each of its blocks the stream must be the source's,
expanded: x* = E x, with the E that the plan's type check found. Added blocks leave the stream as it is.

Where a rounding is unavoidable, the source runs once more with its weights rounded: that is what a rounded target is
measured by.
"""

from __future__ import annotations

import logging
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lemonx.algebra.expansions import RAND, Expansion
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, CannotVerify
from lemonx.planning import depth
from lemonx.planning.plan import Plan
from lemonx.verification import outputs as whole
from lemonx.verification.blocks import blocks_of, modules_of
from lemonx.verification.loading import load, running
from lemonx.verification.reference import deepened
from lemonx.verification.sample import View, views
from lemonx.verification.stability import Stability

Seen = Callable[[str, int, np.ndarray], None]
"""Called with a stack, a block's index and the stream behind that block, without padding."""


@dataclass(frozen=True)
class Place:
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
    """What a comparison block by block found.

    `weights`: the most bytes of parameters of either model that were in memory at once; `block`: those of the largest
    block, `model`: those of the larger model, all in float64. `memory`: the peak of this process. `skipped`: why no
    streams were compared, if so.
    """

    places: tuple[Place, ...]
    weights: int
    block: int
    model: int
    memory: int
    skipped: str | None = None

    @property
    def first(self) -> Place | None:
        """The first block that differs."""
        return next((place for place in self.places if not place.passed), None)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "first": asdict(self.first) if self.first else None}


def compare_layerwise(
    source: Checkpoint,
    target: Checkpoint,
    plan: Plan | None,
    *,
    rounding: whole.Rounding | None,
    seed: int = 0,
) -> tuple[whole.Comparison, Layers]:
    """Run both on the same sample, module by module. Without a lossless plan only the outputs are compared."""
    if (short := memory_short(source, target)) is not None:
        raise CannotVerify(f"{short}: verify on a larger machine")
    streams = plan if plan is not None and plan.policy.lossless else None
    stored = whole.coarser(source, target)
    rounding = None if stored == "float64" else rounding
    with Temporary() as folder, whole.within_memory("verify on a larger machine"):
        before, noisy = _record(source, seed, folder / "source", plan=plan), None
        if plan and plan.chains:
            before = replace(before, plain=_record(source, seed, folder / "plain", before.views).found)
        if rounding is not None:
            noisy = folder / "noise"
            moved = _record(source, seed, noisy, before.views, (rounding, stored), plan=plan)
            before = replace(before, noise=whole.largest_difference(before.found, moved.found))
        tolerance = whole.tolerance_of(rounding, before.noise, stored)
        judge = _Judge(streams, folder / "source", noisy, rounding, stored) if streams else None
        # The same inputs: the target's vocabulary may be larger.

        def run(used: list[View] | None) -> whole.Outputs:
            return _observe(target, seed, judge if judge and used else (lambda *_: None), used)

        after = whole.given_the_same(source, target, run, before.views)
    back = plan.frames.ways_back if plan and plan.frames else None
    comparison = whole.compared(source, target, before, after, tolerance=tolerance, back=back)
    if plan and plan.frames:
        skipped = "not measured: the models ran block by block, and a gradient needs all blocks"
        comparison = replace(comparison, stability=Stability(skipped=skipped))
    sizes = [_block_bytes(c) for c in (source, target)]
    layers = Layers(
        places=tuple(judge.places) if judge else (),
        weights=max(before.weights, after.weights),
        block=max(largest for largest, _ in sizes),
        model=max(total for _, total in sizes),
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        skipped=None if streams else "these two are not a lossless expansion that can be planned",
    )
    return comparison, layers


class _Judge:
    """Compares each stream of the target with what the source's becomes under the plan."""

    def __init__(
        self, plan: Plan, source: Path, noisy: Path | None, rounding: whole.Rounding | None, stored: str
    ) -> None:
        self.plan, self.source, self.noisy, self.rounding, self.stored = plan, source, noisy, rounding, stored
        self.places, self.runs = list[Place](), Counter[tuple[str, int]]()

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
        noise = None if self.noisy is None else _difference(before, _stream(self.noisy, stack, origin, run), None)
        tolerance, _ = whole.tolerance_of(self.rounding, noise, self.stored)
        self.places.append(Place(f"{stack}.{index}", f"{stack}.{origin}", difference, tolerance))


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
        if expansion.has(RAND):
            after = np.where(np.moveaxis(np.ones(wanted.shape, bool) & ~expansion.holds(RAND), -1, axis), after, 0)
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
    rounded: tuple[whole.Rounding, str] | None = None,
    plan: Plan | None = None,
) -> whole.Outputs:
    """Run a checkpoint, as its deeper target by `plan` must, and leave the stream behind every block in `folder`."""
    folder.mkdir()
    runs = Counter[tuple[str, int]]()

    def keep(stack: str, index: int, stream: np.ndarray) -> None:
        np.save(_file(folder, stack, index, runs[stack, index]), stream)
        runs[stack, index] += 1

    return _observe(checkpoint, seed, keep, given, rounded, plan)


def _observe(
    checkpoint: Checkpoint,
    seed: int,
    seen: Seen,
    given: list[View] | None = None,
    rounded: tuple[whole.Rounding, str] | None = None,
    plan: Plan | None = None,
) -> whole.Outputs:
    """Run a checkpoint's model with one module's weights in memory; `seen` gets the stream behind every block.

    `rounded`: with these weights rounded once to that dtype.
    """
    from lemonx.verification.float64 import Float64

    with Float64(), Temporary() as offloaded, _weights_in_files(checkpoint), running(checkpoint.origin):
        options = {"device_map": {"": "disk"}, "offload_folder": str(offloaded)}
        # It would warn that parameters are on the disk, which is the point.
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        loaded = load(checkpoint, torch.float64, **options)
        model = loaded.model
        _give_parts(model)
        if rounded:
            _round(model, *rounded, seed)
        whole.check_inputs(loaded, given)
        used = given or views(model, seed)[:1]  # every one more is another reading of all weights
        with (
            _watched(model, blocks_of(checkpoint), used[0].inputs.get("attention_mask"), seen),
            _metered(model) as meter,
            deepened(model, plan) as moved,
        ):
            used, found = whole.observe(loaded, used, seed)
    return whole.Outputs.of(loaded, found, used, weights=meter.peak, moved=moved.most)


def _round(model: Any, rounding: whole.Rounding, dtype: str, seed: int) -> None:
    """Have every module's weights rounded once, at random, whenever it is given them."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    chosen = whole.chosen_parameters(model, rounding)

    class Round(ModelHook):
        def __init__(self, path: str, number: int) -> None:
            self.path, self.number = path, number

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            generator = torch.Generator().manual_seed(seed + self.number)
            for name, weight in module.named_parameters(recurse=False):
                if chosen is None or f"{self.path}.{name}".lstrip(".") in chosen:
                    whole.round_once(weight, dtype, generator)
            return args, kwargs

    for number, (path, module) in enumerate(model.named_modules()):
        if any(True for _ in module.parameters(recurse=False)):
            add_hook_to_module(module, Round(path, number), append=True)


def _give_parts(model: Any) -> None:
    """torch's own attention takes the weights of its parts without calling these: they get them when it is called."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Parts(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            for part in module.children():
                part._hf_hook.pre_forward(part)
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            for part in module.children():
                part._hf_hook.post_forward(part, None)
            return output

    for module in model.modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            add_hook_to_module(module, Parts(), append=True)


@contextmanager
def _weights_in_files(checkpoint: Checkpoint) -> Iterator[None]:
    """A context in which a weight that is in no file, because a model computes it, is an error in one line."""
    try:
        yield
    except BadCheckpoint as error:
        if "meta device" not in str(error.__cause__):
            raise
        raise CannotVerify(
            f"{str(checkpoint.origin)!r} has weights that its model computes (positions, say) and no file holds, so it "
            "cannot be run block by block: verify without --layerwise"
        ) from None


def _block_bytes(checkpoint: Checkpoint) -> tuple[int, int]:
    """The bytes in float64 of the largest block, or tensor outside of all blocks, and of all tensors."""
    numbers = {name: info.numel for name, info in checkpoint.tensors.items()}
    blocks = blocks_of(checkpoint)
    inside = {name for names in blocks.values() for name in names}
    sums = [sum(numbers[name] for name in names) for names in blocks.values()]
    outside = [count for name, count in numbers.items() if name not in inside]
    return 8 * max([*sums, *outside]), 8 * sum(numbers.values())


@contextmanager
def _watched(
    model: Any, blocks: Mapping[tuple[str, int], list[str]], mask: torch.Tensor | None, seen: Seen
) -> Iterator[None]:
    handles = []
    if mask is not None:
        mask = mask.flatten(0, -2)  # blocks see texts, also where a model chooses among several of them
    try:
        for (stack, index), module in modules_of(model, blocks).items():

            def hook(_: Any, __: Any, result: Any, stack: str = stack, index: int = index) -> None:
                value = result[0] if isinstance(result, tuple) else result
                if mask is not None and value.shape[:2] == mask.shape:
                    value = value[mask.bool()]  # what is computed at padding is nobody's business
                seen(stack, index, value.double().numpy())

            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Meter:
    """The most bytes of a model's parameters that were in memory at once."""

    def __init__(self, model: Any) -> None:
        self.peak = 0
        self._modules = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]

    def look(self) -> None:
        live = {
            parameter.data_ptr(): parameter.nbytes
            for module in self._modules
            for parameter in module.parameters(recurse=False)
            if parameter.device.type != "meta"
        }
        self.peak = max(self.peak, sum(live.values()))


@contextmanager
def _metered(model: Any) -> Iterator[_Meter]:
    """Looks whenever a module has just been given its weights."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    meter = _Meter(model)

    class Look(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            meter.look()
            return args, kwargs

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            add_hook_to_module(module, Look(), append=True)
    yield meter


def memory_short(source: Checkpoint, target: Checkpoint) -> str | None:
    """Why a comparison cannot run here, if it cannot: the largest block or tensor must fit in float64, twice."""
    largest = max(_block_bytes(c)[0] for c in (source, target))
    return whole.short_of(2 * largest, "verification block by block, in float64,")
