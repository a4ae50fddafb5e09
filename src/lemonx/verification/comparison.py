"""Do two models give out the same? The figures of two runs on one sample, and whether they pass.

Weights are taken as they are stored and the arithmetic is float64 throughout, so what remains is what the expansion
itself did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lemonx.algebra.norm_chains import LIMIT
from lemonx.checkpoints import Checkpoint
from lemonx.errors import NotVerified
from lemonx.verification.check_result import CheckResult, larger
from lemonx.verification.rounding import EXACT_TOLERANCE
from lemonx.verification.running import CACHED, Name, Outputs
from lemonx.verification.stability import Back, Stability, aligned

if TYPE_CHECKING:
    pass


# With a twin that agrees, how far the stored model's outputs may be from the source's. Every stored entry was found to
# be one rounding from what it should be, and how far that carries is the model's own affair: where a router sends a
# token to another expert, 0.4 of the largest output was seen, in the source no less than in the target. But a model
# whose outputs are off by as much as they are large shows nothing of its source any more, whatever the reason, and
# none is handed out as its equal.
FAR = 1.0


@dataclass(frozen=True)
class Twin(CheckResult):
    """The target with every tensor that its dtype rounds made again in float64: nothing rounds, so it must agree.

    `tensors`: how many were made again; all others are the stored ones. `fault`: why it did not pass.
    """

    tensors: int
    difference: float
    tolerance: float
    derived: str
    fault: str | None

    @property
    def passed(self) -> bool:
        return self.fault is None and self.difference <= self.tolerance

    @classmethod
    def of(cls, found: Comparison, tensors: int) -> Twin:
        """Return the result of comparing the twin with the source."""
        fault = None if found.passed else found.reason()
        return cls(tensors, found.difference, found.tolerance, found.derived, fault)


@dataclass(frozen=True)
class Comparison(CheckResult):
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
    # Where stored weights are rounded: the comparison in which nothing is, which then decides.
    twin: Twin | None = None

    @property
    def amplified(self) -> bool:
        """Roundings move the stored model's outputs by more than was expected, and nothing else does."""
        return self.twin is not None and self.twin.passed and not self.difference <= self.tolerance

    @property
    def near(self) -> bool:
        """The outputs are near enough: those of the twin, where there is one."""
        if self.twin is None:
            return self.difference <= self.tolerance
        return self.twin.passed and self.difference <= FAR

    @property
    def passed(self) -> bool:
        # A rounding may turn a near tie between two tokens: other tokens are a fault only where all is exact.
        same_tokens = self.tokens_equal is not False or self.tolerance > EXACT_TOLERANCE
        near = self.near and self.stream_loss <= LIMIT
        steady = self.stability is None or self.stability.passed
        return near and steady and same_tokens and not self.odd_keys and not self.not_finite

    def reason(self) -> str:
        """Say in one line why it did not pass."""
        if self.odd_keys:
            return f"the target's class does not take its tensors as they are: {', '.join(self.odd_keys[:3])}"
        if self.not_finite:
            return f"outputs are not finite numbers: {', '.join(self.not_finite)}"
        if self.twin is not None and not self.twin.passed:
            return (
                "the target is wired otherwise than its source: even with every rounded tensor made again in float64, "
                f"{self.twin.fault}"
            )
        if not self.near and self.twin is not None:
            return (
                f"outputs differ by {self.difference:.2e} of the largest: the roundings of the stored dtype leave "
                "nothing of them, although without these the target is right: give --dtype float32"
            )
        if not self.near:
            return f"outputs differ by {self.difference:.2e} of the largest, more than {self.tolerance:.1e}"
        if not self.stream_loss <= LIMIT:
            return (
                f"norms applied again move the stream by {self.stream_loss:.1e} of itself, more than {LIMIT:.1e}, "
                "because eps is not small beside its variance: give --free '{small_gains: true}', or keep the depth"
            )
        if self.stability is not None and not self.stability.passed:
            return self.stability.reason()
        return "greedy generation gives other tokens"


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
        raise NotVerified(f"{source.origin} and {target.origin} have no output in common", "they are different models")
    worst, largest = 0.0, 0.0
    for name in shared:
        reference = before.found[name]
        other = aligned(name[0], reference, after.found[name], back)
        if other.shape != reference.shape:
            shapes = f"{list(reference.shape)} in the source and {list(other.shape)} in the target"
            raise NotVerified(f"{name[0]} has shape {shapes}", "they are different models")
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
            dict.fromkeys(
                f"{name} of the {which}"
                for which, run in (("source", before), ("target", after))
                for (name, _), value in run.found.items()
                if not bool(value.isfinite().all())
            )
        ),
        stream_loss=before.moved,
        output_loss=largest_difference(before.found, before.as_it_is),
    )


def _written_alike(one: torch.Tensor, other: torch.Tensor, steps: int) -> torch.Tensor:
    """Mask of the generated positions before the first token that differs."""
    same = (one[:, -steps:] == other[:, -steps:]).long().cumprod(1)
    return same.roll(1, 1).index_fill(1, same.new_zeros(1), 1).bool()


def _divergence(before: Mapping[Name, torch.Tensor], after: Mapping[Name, torch.Tensor]) -> float | None:
    name = next((n for n in before if n[0].endswith("logits") and n[1] != CACHED and n in after), None)
    if name is None or before[name].shape != after[name].shape:
        return None
    p, q = (torch.log_softmax(logits[name], -1) for logits in (before, after))
    return larger(0.0, float((p.exp() * (p - q)).sum(-1).mean()))


def largest_difference(reference: Mapping[Any, torch.Tensor], others: Mapping[Any, torch.Tensor]) -> float:
    """The largest difference of any output, relative to the largest entry of that output."""
    worst = 0.0
    for name, value in others.items():
        size = reference[name].abs().max().clamp(min=1e-300)
        worst = larger(worst, float((reference[name] - value).abs().max() / size))
    return worst
