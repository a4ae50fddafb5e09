"""Do two checkpoints give out the same? Both run on one sample, one model at a time.

A model runs whole, or, where that needs too much memory, with the weights of one module in memory at a time
(by_module.py). Then the streams behind the blocks are compared too (streams.py).

Where a dtype rounds weights, outputs differ, and how much one rounding grows depends on the model. Any tolerance for
that is an estimate, in which a wrong wire may hide, and which a right target may exceed. So the wiring is shown by a
twin of the target in which nothing is rounded: its config.json and every exact tensor are the target's own, and only
the others are made from the source again, by the same recipes. The twin must agree with the source as exactly as if
nothing had ever been rounded. The algebra bounds what is stored in place of these tensors, entry by entry.

A recipe is lossless by itself, whatever noise it draws: tensors made twice go together with tensors made once. Only
copies that are used together share their noise, and these are one row of the spec, which is made again as a whole.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, BadOutput, CannotVerify
from lemonx.execution.runner import everything, run_plan
from lemonx.planning.exactness import BITS, ROUNDED, UP_TO_EPS
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.verification.blocks import deepened
from lemonx.verification.by_module import Visits, opened_by_module
from lemonx.verification.comparison import Comparison, Twin, compared, largest_difference
from lemonx.verification.float64 import Float64
from lemonx.verification.inputs import View, views
from lemonx.verification.rounding import (
    Allowed,
    Rounding,
    chosen_parameters,
    round_once,
    tolerance_of,
    twin_tolerance,
    with_dtype,
)
from lemonx.verification.running import (
    Loaded,
    Outputs,
    all_outputs,
    block_bytes,
    check_inputs,
    freed,
    generated,
    given_the_same,
    load,
    memory_short,
    observe,
    running,
    wide_bytes,
    within_memory,
)
from lemonx.verification.stability import Stability, measure_stability
from lemonx.verification.streams import Layers, Seen, Streams, watched

# Bytes of the target's tensors that are copied at a time, and of a file.
PIECE, SHARD = 1 << 24, 5 * 10**9


def compare(
    source: Checkpoint,
    target: Checkpoint,
    plan: Plan | None = None,
    *,
    rounding: Rounding | None,
    by_layer: bool = False,
    twin: bool = False,
    seed: int = 0,
) -> tuple[Comparison, Layers | None]:
    """Run both on the same sample. `plan`: how the target was made; `rounding`: None if no tensor was rounded.

    `by_layer`: with the weights of one module in memory, and with streams if the plan is lossless. `twin`: where
    tensors were rounded, also run a target in which no tensor is.
    """
    advice = "verify on a larger machine" if by_layer else "verify with --layerwise, or on a larger machine"
    if (short := memory_short(source, target, by_layer=by_layer)) is not None:
        raise CannotVerify(short, advice)
    rounding = with_dtype(source, target, rounding, planned=plan is not None)
    back = plan.frames.ways_back if plan and plan.frames else None
    with Temporary() if by_layer else nullcontext() as folder, within_memory(advice):
        streams = Streams(plan, folder) if folder and plan and plan.policy.lossless else None
        before = _run(source, None, seed, by_layer=by_layer, plan=plan, rounding=rounding, streams=streams)
        runs = [before]

        def against(other: Checkpoint, allowed: Allowed, noisy: str | None = None) -> Comparison:
            """Run a target on the source's inputs: its vocabulary and its longest text may be larger."""

            def run(used: list[View] | None) -> Outputs:
                seen = streams.compared(allowed, noisy) if streams and used else None
                return _run(other, used, seed, by_layer=by_layer, seen=seen, writes=before.writes)

            runs.append(given_the_same(source, other, run, before.views))
            return compared(source, other, before, runs[-1], tolerance=allowed(before.noise), back=back)

        found = against(target, lambda noise: tolerance_of(rounding, noise), _NOISE if rounding else None)
        stored = runs[-1]
        # Block by block a twin is another reading of all weights.
        enough = by_layer and found.near and not (streams is not None and streams.differ)
        if plan and twin and rounding and not enough:
            allowed = twin_tolerance(rounding, before.noise)
            found = _with_twin(found, plan, source, target, lambda other: against(other, lambda _: allowed))
        if plan and plan.frames:
            skipped = "not measured: the models ran block by block, and a gradient needs all blocks"
            stability = Stability(skipped=skipped)
            if not by_layer:
                stability = measure_stability(source, target, before.views[0], before.as_it_is, stored.found, back)
            found = replace(found, stability=stability)
    if not by_layer:
        return found, None
    return found, Layers(
        places=tuple(streams.places) if streams else (),
        weights=max(run.weights for run in runs),
        block=block_bytes(source, target),
        model=wide_bytes(source, target),
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        skipped=None if streams else "these two are not a lossless expansion that can be planned",
    )


# ----------------------------------------------------------------- one run

# The runs of a source whose streams are kept: as it is, and with its weights rounded.
_SOURCE, _NOISE = "source", "noise"


@freed()
def _run(
    checkpoint: Checkpoint,
    given: list[View] | None,
    seed: int,
    *,
    by_layer: bool,
    plan: Plan | None = None,
    rounding: Rounding | None = None,
    streams: Streams | None = None,
    seen: Seen | None = None,
    writes: bool = True,
) -> Outputs:
    """Run a checkpoint; a source (`given` is None) runs as its deeper target by `plan` must, and draws its inputs.

    `rounding`: run once more with weights rounded. `writes`: have it generate text, if it can.
    """
    is_source = given is None
    with Float64(), running(checkpoint.origin), _opened(checkpoint, by_layer) as (loaded, visits):
        model, plain, tokens, noise = loaded.model, None, None, None
        check_inputs(loaded, given)
        if by_layer and is_source:
            given = views(model, seed)[:1]  # every view more is another reading of all weights
        if plan and plan.chains:
            given, plain = observe(loaded, given, seed)
        mask = given[0].inputs.get("attention_mask") if given else None
        with deepened(model, plan) as moved:
            with watched(model, checkpoint, mask, streams.kept(_SOURCE) if streams else seen):
                used, found = observe(loaded, given, seed)
            if writes and not by_layer and model.can_generate() and "input_ids" in used[0].inputs:
                try:
                    with running(loaded.origin):
                        tokens, cached = generated(model, used[0])
                    found |= cached
                except BadCheckpoint:
                    if not is_source:  # a source that cannot write has nothing to be compared with
                        raise
            if rounding is not None:
                _round(loaded, visits, rounding, seed)
                with watched(model, checkpoint, mask, streams.kept(_NOISE) if streams else None):
                    after = all_outputs(loaded, used[0])
                noise = largest_difference({name: found[name] for name in after}, after)
    figures = {"noise": noise, "weights": visits.peak if visits else 0, "moved": moved.most}
    return Outputs.of(loaded, found, used, tokens=tokens, plain=plain, **figures)


@contextmanager
def _opened(checkpoint: Checkpoint, by_layer: bool) -> Iterator[tuple[Loaded, Visits | None]]:
    """The model of a checkpoint, whole or module by module."""
    if by_layer:
        with opened_by_module(checkpoint) as opened:
            yield opened
    else:
        yield load(checkpoint, torch.float64), None


def _round(loaded: Loaded, visits: Visits | None, rounding: Rounding, seed: int) -> None:
    """Round the weights of a model once at random."""
    if visits:
        visits.round(rounding, seed)
        return
    generator = torch.Generator().manual_seed(seed + 1)
    chosen = chosen_parameters(loaded.model, rounding)
    for name, weight in loaded.model.named_parameters():
        if chosen is None or name in chosen:
            round_once(weight, rounding.dtype, generator)


# ----------------------------------------------------------------- the twin


def remade(plan: Plan) -> set[str]:
    """The tensors of the target that may be rounded."""
    # Norms that an added block applies again may have a gain of their own, which rounds as any other.
    rows = {(step.row, step.suffix) for step in plan.steps if step.exactness in (ROUNDED, UP_TO_EPS)}
    return {step.name for step in plan.steps if (step.row, step.suffix) in rows and step.dtype in BITS}


def has_twin(plan: Plan) -> bool:
    """Check that a plan rounds a tensor, and that every tensor has a rule by which it can be made again."""
    return plan.policy.lossless and plan.is_rounded and not any(step.made for step in plan.steps)


def _with_twin(
    found: Comparison, plan: Plan, source: Checkpoint, target: Checkpoint, run: Callable[[Checkpoint], Comparison]
) -> Comparison:
    """A comparison with that of the twin, which `run` makes.

    Where there is no room for a twin, the comparison of what is stored must do: if that does not pass, nobody knows.
    """
    try:
        with _twin(plan, source, target) as twin:
            return replace(found, twin=Twin.of(run(twin), len(remade(plan))))
    except BadOutput as error:
        if found.passed:
            return found
        raise CannotVerify(
            f"{found.reason()}; every tensor is right to one rounding, so it may be by rounding alone, but the "
            f"temporary folder has no room for a copy that is not rounded ({error.found})",
            "set TMPDIR to a larger one",
        ) from None


@contextmanager
def _twin(plan: Plan, source: Checkpoint, target: Checkpoint) -> Iterator[Checkpoint]:
    """The twin of a target, in a folder for a while; its errors name the target's."""
    names = remade(plan)
    exact = replace(plan, steps=tuple(replace(s, dtype="F64") if s.name in names else s for s in plan.steps))

    def again(step: Step) -> range:
        return everything(step) if step.name in names else range(0)

    with Temporary() as folder:
        entries = [(step.name, step.dtype, step.shape) for step in exact.steps]
        with CheckpointWriter(folder / "twin", entries, max_shard_size=SHARD, kept=False) as writer:
            run_plan(exact, source, writer, wanted=again)
            for step in plan.steps:
                if step.name not in names:
                    _copy(target, step, writer)
            writer.add_text("config.json", json.dumps(target.config))
        with Checkpoint.open(folder / "twin") as twin:
            twin.origin = target.origin
            yield twin


def _copy(target: Checkpoint, step: Step, writer: CheckpointWriter) -> None:
    """A tensor as it is stored."""
    rows = len(everything(step))
    piece = max(1, PIECE * rows // max(1, target.tensors[step.name].nbytes))
    for start in range(0, rows, piece):
        writer.write(step.name, start, target.read(step.name, start, min(start + piece, rows)))
