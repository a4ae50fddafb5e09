"""A plan, the progress of an expansion, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from lemonx.checkpoints.destination import size_text
from lemonx.cli.render.console import Out, bar, styled, table
from lemonx.planning import summary
from lemonx.planning.notices import notes
from lemonx.planning.plan import Plan
from lemonx.verification.certificate import stability_text
from lemonx.verification.layerwise import Layers
from lemonx.verification.outputs import EXACT, Comparison
from lemonx.verification.symmetry import Symmetry
from lemonx.verification.verify import Verified
from lemonx.workflows.expanding import Expanded

_STYLE = {
    **{"bit-exact": "green", "exact-sum": "green"},
    **{"rounding-limited": "yellow", "up to eps": "yellow", "made anew": "red"},
}


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as data, in the order of the printed tables."""
    return {
        "source": str(plan.source),
        "model_type": plan.source_config.get("model_type", plan.family.model_types[0]),
        "sizes": {name: [a, b] for name, a, b in summary.size_table(plan)},
        "parameters": summary.parameters(plan),
        "flops": summary.flops(plan),
        "bytes": summary.bytes_on_disk(plan),
        "config": {name: [a, b] for name, a, b in summary.changed_fields(plan)},
        "method": plan.reading.method,
        "lossless": plan.reading.lossless,
        "free": plan.free.name,
        "depth_type": plan.free.depth_type,
        "exactness": plan.exactness,
        "expected_loss": summary.lost_to_eps(plan),
        "tensors": [
            {
                "name": f"{g.stack}.*.{g.name}" if g.stack else g.name,
                "shape": g.shape,
                "count": g.count,
                "rule": g.rule,
                "exactness": g.exactness,
            }
            for g in summary.groups(plan)
        ],
        "notes": notes(plan),
        "not_written": dict(plan.dropped),
    }


def print_plan(plan: Plan, *, tensors: bool = False) -> None:
    """Sizes as config.json names them; `tensors`: also the rule of every tensor."""
    out = Out()
    out.line(styled("bold", plan.family.title))
    out.line(f"{plan.source}")
    sizes = table("config.json", "source", "target")
    for name, before, after in summary.config_table(plan):
        sizes.add_row(name, _short(before), styled("bold" if before != after else "", _short(after)))
    per = "image" if plan.family.kind == "vision" else "token"
    for label, (before, after) in (
        ("parameters", summary.parameters(plan)),
        (f"FLOPs per {per}", summary.flops(plan)),
        ("bytes on disk", summary.bytes_on_disk(plan)),
    ):
        sizes.add_row(styled("dim", label), summary.human(before), summary.human(after))
    out.table(sizes)
    if tensors:
        _print_tensors(out, plan)
    lossless = styled("green", "lossless") if plan.reading.lossless else styled("red", "not lossless")
    out.line(f"method {plan.reading.method}: ", lossless)
    for note in notes(plan):
        out.line(f"note: {note}")
    if lost := summary.lost_to_eps(plan):
        out.line(
            f"expected loss: {lost['of_stream']:.1e} of the stream at most, at {lost['places']} places where added "
            f"blocks norm it again, if its variance is at least {lost['variance']} there"
        )
    out.line(f"free parameters: {plan.free.name}, depth type {plan.free.depth_type}, seed {plan.seed}")
    out.line(f"{len(plan.steps)} tensors in the stored dtype: {summary.exactness_text(plan)}")
    for name, why in plan.dropped.items():
        out.line(f"not written: {name} ({why})")
    if not tensors:
        out.line(styled("dim", "--tensors lists the shape and the rule of every tensor"))


def _print_tensors(out: Out, plan: Plan) -> None:
    """The name of a tensor, then a line for all blocks in which it is made alike."""
    groups = [(" x ".join(map(str, group.shape)) or "scalar", group) for group in summary.groups(plan)]
    width, rules = max(len(shape) for shape, _ in groups), max(len(group.rule) for _, group in groups)
    heading = None
    for shape, group in groups:
        name = f"{group.stack}.*.{group.name}" if group.stack else group.name
        if name != heading:
            out.line(styled("bold", name))
        heading = name
        exactness = styled(_STYLE[group.exactness], group.exactness)
        out.line(f"  {shape:<{width}} {f'x{group.count}':<4} {group.rule:<{rules}} ", exactness)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


@dataclass(frozen=True)
class Told:
    """What the progress bar listens to: the plan, bytes written, and the steps of a method that learns."""

    planned: Callable[[Plan], None]
    written: Callable[[int], None]
    learned: Callable[[int, float], None]


@contextmanager
def progress(*, quiet: bool, verify: bool, lessons: int) -> Iterator[Told]:
    """A bar over the bytes written; then a word on the verification, which takes the rest of the time."""
    with bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), hidden=quiet) as far:
        task = far.add_task("planning", total=None)

        def planned(plan: Plan) -> None:
            far.update(task, total=summary.bytes_on_disk(plan)[1], description="expanding")

        def written(count: int) -> None:
            far.advance(task, count)
            far.update(task, description="verifying" if verify and far.tasks[0].finished else "expanding")

        def learned(step: int, loss: float) -> None:
            far.update(task, description=f"learning to grow: step {step + 1} of {lessons}, loss {loss:.3f}")

        yield Told(planned, written, learned)


def print_expanded(source: Path, made: Expanded) -> None:
    out, content = Out(), made.certificate
    before, after = summary.human(content.source.parameters), summary.human(content.parameters)
    out.line(f"wrote {made.path}: {before} -> {after} parameters")
    if content.optimizer:
        moments: Any = content.optimizer["moments"]
        counts = ", ".join(f"{count} {status}" for status, count in sorted(moments.items()))
        out.line(f"Adam's moments at step {content.optimizer['step']}: {counts} (docs/optimizer-state.md)")
    verified = made.verified
    _print_evidence(out, verified)
    if verified.outputs and not content.lossless:
        kl = verified.outputs.kl
        far = "" if kl is None else f": its predictions are {kl:.2g} nats from the source's"
        out.line(styled("yellow", f"{content.method} is not lossless here"), far)
    if not verified.outputs:
        what = "outputs not compared" if verified.algebra else "not verified"
        out.line(f"{what} ({verified.skipped}): `lemonx verify {source} {made.path}` does it later")


def verified_json(measured: Verified) -> dict[str, Any]:
    return {"passed": measured.passed, **measured.as_dict()}


def print_verified(measured: Verified) -> None:
    out = Out()
    _print_evidence(out, measured)
    if measured.layers:
        _print_layers(out, measured.layers)
    if measured.proven and measured.outputs:
        rounded = "" if measured.outputs.tolerance <= EXACT else ", up to the rounding of the stored weights"
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
    """What was checked, a line for each kind."""
    algebra, structure = verified.algebra, verified.structure
    if algebra and algebra.passed:
        out.line(f"tensors: all {algebra.entries:,} entries of {algebra.tensors} tensors obey their rules")
    if structure and structure.passed:
        out.line(
            f"structure: {structure.blocks} blocks have all {structure.attributes} plain attributes of the "
            "blocks they come from, and config.json is as planned"
        )
    if verified.outputs:
        _print_outputs(out, verified.outputs)
    if verified.symmetry:
        _print_symmetry(out, verified.symmetry)


def _print_outputs(out: Out, outputs: Comparison) -> None:
    out.line(
        f"outputs: {', '.join(outputs.outputs)} on {outputs.inputs}, in float64: largest difference "
        f"{outputs.difference:.1e} of the largest output (tolerance {outputs.tolerance:.1e}: {outputs.derived})"
    )
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
