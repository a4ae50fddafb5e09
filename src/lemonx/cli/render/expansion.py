"""Prints the progress of an expansion, and what was measured."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from lemonx.checkpoints.destination import size_text
from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, bar, styled
from lemonx.guards import phase
from lemonx.planning import summary
from lemonx.planning.notices import of_table
from lemonx.planning.plan import Plan
from lemonx.verification.algebra import Algebra
from lemonx.verification.card import stability_text, twin_text
from lemonx.verification.certificate import Certificate
from lemonx.verification.comparison import Comparison
from lemonx.verification.rounding import EXACT_TOLERANCE
from lemonx.verification.streams import Layers
from lemonx.verification.symmetry import Symmetry
from lemonx.verification.verify import GrownAdapter, Verified
from lemonx.workflows.expanding import Expanded

if TYPE_CHECKING:
    from lemonx.in_place.growing import GrownInPlace
    from lemonx.workflows.growing import Grown
    from lemonx.workflows.shrinking import Shrunk


@dataclass(frozen=True)
class Told:
    """What the progress bar is told: the plan, bytes written, and the steps of a method that learns."""

    planned: Callable[[Plan], None]
    written: Callable[[int], None]
    learned: Callable[[int, float], None]


@contextmanager
def progress(*, quiet: bool, lessons: int) -> Iterator[Told]:
    """A bar over the bytes written, and the name of the phase: the verification takes the rest of the time."""
    with bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), hidden=quiet) as far:
        task = far.add_task("planning", total=None)

        def planned(plan: Plan) -> None:
            far.update(task, total=summary.bytes_on_disk(plan)[1], description="expanding")

        def written(count: int) -> None:
            far.advance(task, count)

        def learned(step: int, loss: float) -> None:
            far.update(task, description=f"learning to grow: step {step + 1} of {lessons}, loss {loss:.3f}")

        with phase.told(lambda begins: far.update(task, description=begins)):
            yield Told(planned, written, learned)


def print_certificate(content: Certificate, out: Out) -> None:
    out.line(f"{content.source.name}: {_parameters(content)}, method {content.method}")
    _print_evidence(out, content.verified)


def _parameters(content: Certificate) -> str:
    return f"{summary.human(content.source.parameters)} -> {summary.human(content.parameters)} parameters"


def print_shrunk(shrunk: Shrunk, out: Out) -> None:
    out.line(f"wrote {shrunk.path}: the source, bit for bit ({shrunk.tensors} tensors, sha256 {shrunk.sha256})")


def print_grown(grown: Grown, out: Out) -> None:
    before, after = map(summary.human, grown.parameters)
    out.line(f"{before} -> {after} parameters, method {grown.method}")
    out.line(", ".join(f"{name} {a} -> {b}" for name, (a, b) in grown.sizes.items() if a != b))
    _print_algebra(out, grown.algebra)
    out.line(
        f"outputs: largest difference {grown.difference:.1e} of the largest output (tolerance {grown.tolerance:.1e}), "
        f"and {grown.rehearsed:.1e} with random parameters in float64"
    )
    out.line(f"the inputs used {grown.exercised:.0%} of the learned numbers")
    if grown.unused:
        named = ", ".join(grown.unused[:3]) + ("..." if len(grown.unused) > 3 else "")
        out.line(f"nothing is claimed of {len(grown.unused)} parameters that no input used: {named}")
    _print_symmetry(out, grown.symmetry)


def print_grown_in_place(grown: GrownInPlace, out: Out) -> None:
    before, after = map(summary.human, summary.parameters(grown.plan))
    out.line(f"{type(grown.model).__name__}: {before} -> {after} parameters")
    out.line(summary.sizes_text(grown.plan))
    if grown.tensors:
        out.line(f"optimizer state: {_counts(grown.state)}")
    for reason, count in grown.reasons.items():
        out.line(f"{count} not exact: {reason}")


def _counts(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))


def print_expanded(expanded: Expanded, out: Out, source: str | None = None) -> None:
    content = expanded.certificate
    out.line(f"wrote {expanded.path}: {_parameters(content)}")
    if grown := summary.sizes_text(expanded.plan):
        out.line(grown)
    for note in of_table(expanded.plan):
        out.line(note)
    if content.optimizer:
        counts = _counts(content.optimizer.moments)
        out.line(f"optimizer state at step {content.optimizer.step}: {counts} (docs/optimizer-state.md)")
    verified = expanded.verified
    _print_evidence(out, verified)
    if verified.outputs and not content.lossless:
        kl = verified.outputs.kl
        far = "" if kl is None else f": its predictions are {kl:.2g} nats from the source's"
        out.line(styled("yellow", f"{content.method} is not lossless here"), far)
    if not verified.outputs:
        what = "outputs not compared" if verified.algebra else "not verified"
        later = shlex.join(("lemonx", "verify", source or str(expanded.plan.source), str(expanded.path)))
        out.line(f"{what} ({verified.skipped}): `{later}` does it later")


def verified_json(measured: Verified) -> dict[str, JsonValue]:
    return {"passed": measured.passed, **measured.as_dict()}


def print_verified(measured: Verified, out: Out) -> None:
    _print_evidence(out, measured)
    if measured.layers:
        _print_layers(out, measured.layers)
    if measured.proven and measured.outputs:
        rounded = "" if measured.outputs.tolerance <= EXACT_TOLERANCE else ", up to the rounding of the stored weights"
        eps = ", up to the eps of its norms" if measured.outputs.stream_loss else ""
        out.line(styled("green", "the same function"), f"{eps}{rounded}")
    elif measured.passed and measured.algebra:
        out.line(
            styled("green", "every tensor and block is as it must be"), f"; outputs not compared: {measured.skipped}"
        )
    elif measured.passed:
        out.line(
            styled("yellow", "the outputs agree on this sample"), f", and nothing else was checked: {measured.skipped}"
        )
    else:
        out.line(styled("red", "not the same function"), f": {measured.reason()}")


def _print_evidence(out: Out, verified: Verified) -> None:
    """Print what was checked, one line per kind of evidence."""
    structure = verified.structure
    _print_algebra(out, verified.algebra)
    if structure and structure.passed:
        out.line(
            f"structure: {structure.blocks} blocks have all {structure.attributes} plain attributes of the "
            "blocks they come from, and config.json is as planned"
        )
    if verified.outputs:
        _print_outputs(out, verified.outputs)
    if verified.symmetry:
        _print_symmetry(out, verified.symmetry)
    if verified.adapter:
        _print_adapter(out, verified.adapter)


def _print_algebra(out: Out, algebra: Algebra | None) -> None:
    if algebra and algebra.passed:
        out.line(f"tensors: all {algebra.entries:,} entries of {algebra.tensors} tensors obey their rules")


def _print_adapter(out: Out, adapter: GrownAdapter) -> None:
    replaced = f", {adapter.replaced} tensors in full" if adapter.replaced else ""
    out.line(f"adapter {adapter.name}: {adapter.modules} modules{replaced}, in {adapter.folder}/")
    if adapter.algebra and adapter.algebra.passed:
        out.line(f"its tensors: all {adapter.algebra.entries:,} entries of {adapter.algebra.tensors} obey their rules")
    if outputs := adapter.outputs:
        out.line(
            f"outputs with it: largest difference {outputs.difference:.1e} of the largest output (tolerance "
            f"{outputs.tolerance:.1e}: {outputs.derived})"
        )


def _print_outputs(out: Out, outputs: Comparison) -> None:
    out.line(
        f"outputs: {', '.join(outputs.outputs)} on {outputs.inputs}, in float64: largest difference "
        f"{outputs.difference:.1e} of the largest output (tolerance {outputs.tolerance:.1e}: {outputs.derived})"
    )
    if outputs.twin:
        out.line(twin_text(outputs))
    if outputs.stream_loss:
        out.line(
            f"this is against the source with its norms applied as often as in the target, which moves its stream by "
            f"at most {outputs.stream_loss:.1e} of itself and its outputs by {outputs.output_loss:.1e} of the "
            "largest: what eps costs"
        )
    if outputs.missing:
        named = ", ".join(outputs.missing[:3]) + ("..." if len(outputs.missing) > 3 else "")
        out.line(f"the files have no {named}: zero in both models, and what they read was compared instead")
    if outputs.stability:
        out.line(stability_text(outputs.stability))
    if outputs.tokens_equal is not None:
        out.line(f"greedy generation with KV cache: {'identical' if outputs.tokens_equal else 'different'} tokens")


def _print_symmetry(out: Out, symmetry: Symmetry) -> None:
    where = f" (in {', '.join(symmetry.where[:3])})" if symmetry.twins else ""
    out.line(f"symmetry: {symmetry.copies} duplicated units, {symmetry.twins} still identical to another{where}")


def _print_layers(out: Out, layers: Layers) -> None:
    if layers.places:
        worst = max(layers.places, key=lambda place: place.difference)
        out.line(
            f"block by block: the stream behind {len(layers.places)} blocks of the target differs from the source's, "
            f"expanded, by at most {worst.difference:.1e} of its largest entry (behind {worst.block})"
        )
    if layers.skipped:
        out.line(f"block by block: no streams compared, {layers.skipped}")
    if first := layers.first:
        out.line(
            "the first block that differs is ",
            styled("bold", first.block),
            f" (from {first.source}): {first.difference:.1e}, more than {first.tolerance:.1e}",
        )
    out.line(
        f"at most {size_text(layers.weights)} of weights in memory at once, in float64; the largest block has "
        f"{size_text(layers.block)}, the larger model {size_text(layers.model)}; peak of the process "
        f"{size_text(layers.memory)}"
    )
