"""Do two checkpoints compute the same outputs? Measured, against a tolerance that is derived.

Weights are taken as they are stored and the arithmetic is float64 throughout, so what remains is what the
expansion itself did. Where every tensor is exact in its stored dtype the tolerance is 1e-10 of the largest
output. Where a rounding is unavoidable (a norm's eta in bf16, say), the same rounding is tried on the source: its
weights are moved by at most one rounding of the dtype, at random, and the tolerance is MULTIPLE times what that does to
its outputs, but never more than a cap.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lemonx.algebra.norm_chains import LIMIT
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, CannotVerify, NotVerified, Refused
from lemonx.models.foreign import is_out_of_memory
from lemonx.planning.plan import Plan
from lemonx.verification.alignment import Back, aligned
from lemonx.verification.finite import larger, not_finite
from lemonx.verification.generation_settings import generation_settings
from lemonx.verification.loading import Loaded, Name, all_outputs, load, new_cache, running
from lemonx.verification.reference import deepened
from lemonx.verification.sample import UNPADDED, View, views
from lemonx.verification.stability import Stability, measure_stability

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXACT = 1e-10
# A weight of the target is rounded as often as it has copies, and so is what it is scaled by.
MULTIPLE = 4.0
# Frames are dense: they may carry a rounding twice as far as the source does.
FRAMED = 2.0
# The most that is ever allowed. Alone, outputs must agree to four spacings of bf16, the coarsest dtype there is. Where
# every tensor was checked, they only show that models are wired alike, and a router may send a token elsewhere for one
# rounding; a wrong wire changes them by about as much as they are.
CAP, WIRING = 2**-5, 2**-3
# Bytes of weights in float64 up to which a model runs whole: a block at a time needs less memory, and more reading.
WHOLE = 1 << 30
# From coarse to fine.
PRECISION = ("bfloat16", "float16", "float32", "float64")
CACHED = "with a cache"


@dataclass(frozen=True)
class Comparison:
    """Figures of one comparison; differences and noise are relative to the largest output.

    `noise`: by how much rounding the source's weights once moves its outputs, where that was needed. `derived`: where
    the tolerance comes from. `kl`: the mean divergence of the target's distribution from the source's, in nats, where
    there are logits. `missing`: tensors that neither file has, zero in both models; what the model computes below them
    was compared instead. `shortened`: fields of the config that were made small in both models.
    """

    difference: float
    tolerance: float
    derived: str
    noise: float | None
    largest_output: float
    outputs: tuple[str, ...]
    tokens_equal: bool | None
    kl: float | None
    odd_keys: tuple[str, ...]
    missing: tuple[str, ...]
    shortened: tuple[str, ...]
    inputs: str
    # Outputs that hold NaN or Inf, in words.
    not_finite: tuple[str, ...] = ()
    # Where added Post-LN blocks norm the stream again: how far that moves the stream, and the outputs. The difference
    # is then from what this makes of the source.
    stream_loss: float = 0.0
    output_loss: float = 0.0
    # Where frames carry a stream: whether what rounding adds to it, and the gradient, stay as small as the source's.
    stability: Stability | None = None

    @property
    def passed(self) -> bool:
        # A rounding may turn a near tie between two tokens: other tokens are a fault only where all is exact.
        same_tokens = self.tokens_equal is not False or self.tolerance > EXACT
        near = self.difference <= self.tolerance and self.stream_loss <= LIMIT
        steady = self.stability is None or self.stability.passed
        return near and steady and same_tokens and not self.odd_keys and not self.not_finite

    def as_dict(self) -> dict[str, Any]:
        found = self.stability.as_dict() if self.stability else None
        return {**asdict(self), "stability": found, "passed": self.passed}

    def reason(self) -> str:
        """Why it did not pass, in one line."""
        if self.odd_keys:
            return f"the target's class does not take its tensors as they are: {', '.join(self.odd_keys[:3])}"
        if self.not_finite:
            return f"outputs are not finite numbers: {', '.join(self.not_finite)}"
        if not self.difference <= self.tolerance:
            return f"outputs differ by {self.difference:.2e} of the largest, more than {self.tolerance:.1e}"
        if not self.stream_loss <= LIMIT:
            return (
                f"norms applied again move the stream by {self.stream_loss:.1e} of itself, more than {LIMIT:.1e}, "
                "because eps is not small beside its variance: give --small-gains, or keep the depth"
            )
        if self.stability is not None and not self.stability.passed:
            return self.stability.reason()
        return "greedy generation gives other tokens"


@dataclass(frozen=True)
class Rounding:
    """What is known to be rounded in a target: `tensors` of the source, by their names on disk, or all if None."""

    tensors: frozenset[str] | None = None
    framed: bool = False
    cap: float = CAP


def compare(
    source: Checkpoint,
    target: Checkpoint,
    *,
    rounding: Rounding | None,
    seed: int = 0,
    back: Back | None = None,
    plan: Plan | None = None,
) -> Comparison:
    """Run both on the same sample. `rounding`: None if no tensor was rounded; `plan`: how the target was
    made, if that is known.

    `back`: all ways from the target's hidden states to the source's, where these are not its first entries. Frames are
    also asked how steadily they compute.
    """
    if (short := memory_short(source, target)) is not None:
        raise CannotVerify(f"{short}: verify with --layerwise, or on a larger machine")
    stored = coarser(source, target)
    with within_memory("verify with --layerwise, or on a larger machine"):
        before = _run(source, seed, rounding=None if stored == "float64" else rounding, dtype=stored, plan=plan)
        # The same inputs: the target's vocabulary and its longest text may be larger.
        after = given_the_same(source, target, lambda used: _run(target, seed, used), before.views)
        tolerance = tolerance_of(rounding, before.noise, stored)
        found = compared(source, target, before, after, tolerance=tolerance, back=back)
        if plan is None or not plan.frames:
            return found
        plain, view = before.as_it_is, before.views[0]
        stability = measure_stability(source, target, view, plain, after.found, back)
    return replace(found, stability=stability)


def given_the_same(
    source: Checkpoint, target: Checkpoint, run: Callable[[list[View] | None], Outputs], used: list[View]
) -> Outputs:
    """What a target makes of the source's inputs; where it runs, but not on these, the two are different models."""
    try:
        return run(used)
    except BadCheckpoint as error:
        run(None)  # if it runs on nothing at all, then that is what is wrong
        raise NotVerified(
            f"{str(target.origin)!r} does not take the inputs of {str(source.origin)!r}, so they are different models: "
            f"{error}"
        ) from error


def coarser(source: Checkpoint, target: Checkpoint) -> str:
    """The coarser of two checkpoints' dtypes."""
    return min(stored_dtype(source), stored_dtype(target), key=PRECISION.index)


def tolerance_of(rounding: Rounding | None, noise: float | None, dtype: str) -> tuple[float, str]:
    """By how much outputs may differ, and why."""
    if noise is None or rounding is None:
        found, why = EXACT, "every tensor is exact in its dtype, so only float64 arithmetic rounds"
    else:
        times = MULTIPLE * (FRAMED if rounding.framed else 1.0)
        found = max(EXACT, times * noise)
        why = f"{times:g} times {noise:.1e}, by which rounding weights once in {dtype} moves the source's outputs"
        if found > rounding.cap:
            found, why = rounding.cap, f"the largest that is allowed; {why}"
    return found, why


def compared(
    source: Checkpoint,
    target: Checkpoint,
    before: Outputs,
    after: Outputs,
    *,
    tolerance: tuple[float, str],
    back: Back | None = None,
) -> Comparison:
    """The figures of two runs on the same sample."""
    shared = [name for name in before.found if name in after.found]
    if not shared:
        raise NotVerified(f"{source.origin} and {target.origin} have no output in common: they are different models")
    worst, largest = 0.0, 0.0
    for name in shared:
        reference = before.found[name]
        other = aligned(name[0], reference, after.found[name], back)
        if other.shape != reference.shape:
            shapes = f"{list(reference.shape)} in the source and {list(other.shape)} in the target"
            raise NotVerified(f"{name[0]} has shape {shapes}: they are different models")
        if name[1] == CACHED:
            alike = _written_alike(before.tokens, after.tokens, reference.shape[1])
            reference, other = reference[alike], other[alike]
        scale = float(reference.abs().max()) if reference.numel() else 0.0
        found = float((reference - other).abs().max()) / (scale or 1.0) if reference.numel() else 0.0
        worst, largest = larger(worst, found), larger(largest, scale)
    # A new token may be the most likely one: then greedy texts differ, and old logits still agree.
    wider = any(after.found[name].shape != before.found[name].shape for name in shared if name[0].endswith("logits"))
    tokens = None
    if not wider and before.tokens is not None and after.tokens is not None:
        tokens = before.tokens.equal(after.tokens)
    return Comparison(
        difference=worst,
        tolerance=tolerance[0],
        derived=tolerance[1],
        noise=before.noise,
        largest_output=largest,
        outputs=tuple(dict.fromkeys(name for name, _ in shared)),
        tokens_equal=tokens,
        kl=_divergence(before.as_it_is, after.found),
        odd_keys=tuple(sorted((after.odd | after.missing) - (before.odd | before.missing))),
        missing=tuple(sorted(before.missing)),
        shortened=before.shortened,
        inputs=before.inputs,
        not_finite=tuple(
            f"{name} of the {which}"
            for which, run in (("source", before), ("target", after))
            for name in not_finite(run.found)
        ),
        stream_loss=before.moved,
        output_loss=largest_difference(before.found, before.as_it_is),
    )


def _written_alike(one: torch.Tensor, other: torch.Tensor, steps: int) -> torch.Tensor:
    """Where two texts that were written token by token are still the same: behind another token all is another text."""
    same = (one[:, -steps:] == other[:, -steps:]).long().cumprod(1)
    return same.roll(1, 1).index_fill(1, same.new_zeros(1), 1).bool()


def _divergence(before: Mapping[Name, torch.Tensor], after: Mapping[Name, torch.Tensor]) -> float | None:
    name = next((n for n in before if n[0].endswith("logits") and n[1] != CACHED and n in after), None)
    if name is None or before[name].shape != after[name].shape:
        return None
    p, q = (torch.log_softmax(logits[name], -1) for logits in (before, after))
    return larger(0.0, float((p.exp() * (p - q)).sum(-1).mean()))


@dataclass(frozen=True)
class Outputs:
    """What one run gave; `weights`: the most bytes of parameters in memory at once, where that was measured.

    A source may be run as its deeper target must compute it. `plain`: its outputs when it is not; `moved`: how far that
    moves its stream.
    """

    found: dict[Name, torch.Tensor]
    views: list[View]
    odd: frozenset[str]
    missing: frozenset[str]
    shortened: tuple[str, ...]
    tokens: Any = None
    noise: float | None = None
    weights: int = 0
    plain: dict[Name, torch.Tensor] | None = None
    moved: float = 0.0

    @property
    def as_it_is(self) -> dict[Name, torch.Tensor]:
        return self.found if self.plain is None else self.plain

    @classmethod
    def of(cls, loaded: Loaded, found: dict[Name, torch.Tensor], used: list[View], **more: Any) -> Outputs:
        return cls(found, used, loaded.odd, loaded.missing, loaded.shortened, **more)

    @property
    def inputs(self) -> str:
        """The sample in words."""
        return "; ".join(str(view) for view in self.views)


def _run(
    checkpoint: Checkpoint,
    seed: int,
    given: list[View] | None = None,
    *,
    rounding: Rounding | None = None,
    dtype: str = "float64",
    plan: Plan | None = None,
) -> Outputs:
    """Run a checkpoint; with a plan, as its deeper target must."""
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
            if loaded.model.can_generate() and "input_ids" in used[0].inputs:
                try:
                    with running(loaded.origin):
                        tokens, cached = _generated(loaded.model, used[0])
                    found |= cached
                except BadCheckpoint:
                    if not is_source:  # a source that cannot write has nothing to be compared with
                        raise
            noise = None if rounding is None else _moved(loaded, used[0], found, rounding, dtype, seed)
    result = Outputs.of(loaded, found, used, tokens=tokens, noise=noise, plain=plain, moved=moved.most)
    del loaded
    gc.collect()
    return result


def observe(loaded: Loaded, given: list[View] | None, seed: int) -> tuple[list[View], dict[Name, torch.Tensor]]:
    """What a model gives out for these views, or for its own; of the latter those that it takes."""
    found: dict[Name, torch.Tensor] = {}
    used = []
    tried = views(loaded.model, seed) if given is None else given
    for number, view in enumerate(tried):
        try:
            with running(loaded.origin, view):
                found |= all_outputs(loaded, view)
        except BadCheckpoint:
            if given is None and number:
                continue  # pictures of another size, say: not every model takes them
            raise
        used.append(view)
    return used, found


def check_inputs(loaded: Loaded, given: list[View] | None) -> None:
    """NotVerified if a model does not read what the other was given: texts are not images."""
    if given and loaded.model.main_input_name not in given[0].inputs:
        reads, other = loaded.model.main_input_name, next(iter(given[0].inputs))
        raise NotVerified(f"{str(loaded.origin)!r} reads {reads}, the source {other}: they are different models")


def _generated(model: PreTrainedModel, view: View) -> tuple[torch.Tensor, dict[Name, torch.Tensor]]:
    """Tokens of greedy generation with a cache, and the logits that they were chosen by."""
    # Who goes on writing a text has no padding behind it.
    rows = slice(None) if model.config.is_encoder_decoder else torch.tensor(UNPADDED)
    result: Any = model.generate(  # pyright: ignore[reportCallIssue]
        **{name: value[rows] for name, value in view.inputs.items()},
        **new_cache(model),
        generation_config=generation_settings(model),
    )
    return result.sequences, {("logits", CACHED): torch.stack(result.logits, 1).double()}


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


def round_once(weight: torch.Tensor, dtype: str, generator: torch.Generator) -> None:
    """Move every entry at random by at most one rounding to a dtype.

    In float32 what is rounded are copies, which are as large as is usual in the tensor, however small their sum; in
    bf16 and fp16 copies are split exactly, and what is rounded are entries.
    """
    kind = torch.finfo(getattr(torch, dtype))
    with torch.no_grad():
        usual = weight.square().mean().sqrt() if kind.bits > 16 else 0.0
        noise = torch.rand(weight.shape, generator=generator, dtype=weight.dtype).mul_(2).sub_(1)
        weight.add_(noise.mul_(weight.abs() + usual), alpha=kind.eps / 2)


def chosen_parameters(model: PreTrainedModel, rounding: Rounding) -> set[str] | None:
    """The parameters of these tensors; None for all, also where a parameter holds several tensors."""
    from lemonx.models.building import disk_names

    if rounding.tensors is None:
        return None
    try:
        return {name for name, disk in disk_names(model).items() if disk in rounding.tensors} or None
    except Refused:
        return None


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the largest tensor, which is that of nearly all."""
    from lemonx.checkpoints.safetensors_file import torch_dtype

    largest = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    name = str(torch_dtype(largest.dtype)).removeprefix("torch.")
    if name not in PRECISION:
        raise BadCheckpoint(f"{largest.name} is stored as {largest.dtype}, not as a float: dequantise the model first")
    return name


def largest_difference(reference: Mapping[Any, torch.Tensor], others: Mapping[Any, torch.Tensor]) -> float:
    """The largest difference of any output, relative to the largest entry of that output."""
    worst = 0.0
    for name, value in others.items():
        size = reference[name].abs().max().clamp(min=1e-300)
        worst = larger(worst, float((reference[name] - value).abs().max() / size))
    return worst


@contextmanager
def within_memory(advice: str) -> Iterator[None]:
    """A context in which running out of memory is an error in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise CannotVerify(f"memory ran out during verification: {advice}") from None


def runs_whole(source: Checkpoint, target: Checkpoint) -> bool:
    """Whether both models are small enough that running them whole costs less than block by block."""
    return 8 * max(sum(i.numel for i in c.tensors.values()) for c in (source, target)) <= WHOLE


def memory_short(source: Checkpoint, target: Checkpoint) -> str | None:
    """Why a comparison cannot run here, if it cannot: one model in float64 at a time must fit in memory."""
    numbers = max(sum(i.numel for i in c.tensors.values()) for c in (source, target))
    return short_of(8 * numbers, "verification in float64")


def short_of(weights: int, what: str) -> str | None:
    """Why there is not enough memory for so many bytes of weights, and for what is computed with them."""
    needed = 1.3 * weights
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable")), None)
    if free is None or needed <= free:
        return None
    return f"{what} needs {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
