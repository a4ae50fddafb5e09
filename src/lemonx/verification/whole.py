"""Two models compared with all their weights in memory, one model at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, CannotVerify
from lemonx.planning.plan import Plan
from lemonx.verification.alignment import Back
from lemonx.verification.comparison import Comparison, compared, largest_difference
from lemonx.verification.loading import Loaded, Name, all_outputs, load, running
from lemonx.verification.memory import freed, memory_short, within_memory
from lemonx.verification.outputs import Outputs, check_inputs, generated, given_the_same, observe
from lemonx.verification.reference import deepened
from lemonx.verification.rounding import (
    Rounding,
    chosen_parameters,
    round_once,
    rounded_in,
    tolerance_of,
    twin_tolerance,
)
from lemonx.verification.sample import View
from lemonx.verification.stability import measure_stability
from lemonx.verification.twin import with_twin


def compare(
    source: Checkpoint,
    target: Checkpoint,
    *,
    rounding: Rounding | None,
    seed: int = 0,
    back: Back | None = None,
    plan: Plan | None = None,
    twin: bool = False,
) -> Comparison:
    """Run both on the same sample. `rounding`: None if no tensor was rounded; `plan`: how the target was
    made, if that is known. `twin`: where tensors were rounded, run a target in which they are not, too.

    `back`: all ways from the target's hidden states to the source's, where these are not its first entries. Frames are
    also asked how steadily they compute.
    """
    if (short := memory_short(source, target)) is not None:
        raise CannotVerify(short, "verify with --layerwise, or on a larger machine")
    stored = rounded_in(source, target, rounding, planned=plan is not None)
    with within_memory("verify with --layerwise, or on a larger machine"):
        before = _run(source, seed, rounding=None if stored == "float64" else rounding, dtype=stored, plan=plan)

        # The same inputs: the target's vocabulary and its longest text may be larger.
        def run(other: Checkpoint) -> Outputs:
            again = partial(_run, other, seed, writes=before.writes)
            return given_the_same(source, other, again, before.views)

        after = run(target)
        tolerance = tolerance_of(rounding, before.noise, stored)
        found = compared(source, target, before, after, tolerance=tolerance, back=back)
        if plan and twin and rounding and before.noise is not None:
            allowed = twin_tolerance(rounding, before.noise, stored)

            def exactly(other: Checkpoint) -> Comparison:
                return compared(source, other, before, run(other), tolerance=allowed, back=back)

            found = with_twin(found, plan, source, target, exactly)
        if plan is None or not plan.frames:
            return found
        plain, view = before.as_it_is, before.views[0]
        stability = measure_stability(source, target, view, plain, after.found, back)
    return replace(found, stability=stability)


@freed()
def _run(
    checkpoint: Checkpoint,
    seed: int,
    given: list[View] | None = None,
    *,
    rounding: Rounding | None = None,
    dtype: str = "float64",
    plan: Plan | None = None,
    writes: bool = True,
) -> Outputs:
    """Run a checkpoint; with a plan, as its deeper target must. `writes`: have it generate text, if it can."""
    from lemonx.verification.float64 import Float64

    is_source = given is None
    with Float64(), running(checkpoint.origin):
        loaded, plain = load(checkpoint, torch.float64), None
        if plan and plan.chains:
            given, plain = observe(loaded, given, seed)
        check_inputs(loaded, given)
        with deepened(loaded.model, plan) as moved:
            used, found = observe(loaded, given, seed)
            tokens = None
            if writes and loaded.model.can_generate() and "input_ids" in used[0].inputs:
                try:
                    with running(loaded.origin):
                        tokens, cached = generated(loaded.model, used[0])
                    found |= cached
                except BadCheckpoint:
                    if not is_source:  # a source that cannot write has nothing to be compared with
                        raise
            noise = None if rounding is None else _moved(loaded, used[0], found, rounding, dtype, seed)
    return Outputs.of(loaded, found, used, tokens=tokens, noise=noise, plain=plain, moved=moved.most)


def _moved(
    loaded: Loaded,
    view: View,
    reference: Mapping[Name, torch.Tensor],
    rounding: Rounding,
    dtype: str,
    seed: int,
) -> float:
    """By how much all that is compared moves when weights are rounded once."""
    generator = torch.Generator().manual_seed(seed + 1)
    chosen = chosen_parameters(loaded.model, rounding)
    for name, weight in loaded.model.named_parameters():
        if chosen is None or name in chosen:
            round_once(weight, dtype, generator)
    after = all_outputs(loaded, view)
    return largest_difference({name: reference[name] for name in after}, after)
