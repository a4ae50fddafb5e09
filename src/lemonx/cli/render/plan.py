"""Prints a plan: sizes by their names in config.json, and the rules of the tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lemonx.algebra.free_parameters import INTERLEAVED
from lemonx.cli.render.console import Out, styled, table
from lemonx.hub.names import name_of
from lemonx.planning import exactness, summary
from lemonx.planning.notices import notes
from lemonx.planning.plan import Plan
from lemonx.workflows.budget import Shape

_STYLE: dict[str, str] = dict(zip(exactness.WEAKER, ("green", "green", "yellow", "yellow", "red"), strict=True))


def plan_json(plan: Plan) -> dict[str, object]:
    """The plan as data, in the order of the printed tables."""
    return {
        "source": str(plan.source),
        "model_type": plan.source_config.get("model_type", plan.family.model_types[0]),
        "sizes": {name: [a, b] for name, a, b in summary.size_table(plan)},
        "parameters": summary.parameters(plan),
        "flops": summary.flops(plan),
        "bytes": summary.bytes_on_disk(plan),
        "config": {name: [a, b] for name, a, b in summary.changed_fields(plan)},
        "method": plan.policy.method,
        "lossless": plan.policy.lossless,
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


def print_shapes(source: str, params: str, found: Sequence[Shape]) -> None:
    """The shapes near a number of parameters, to choose from."""
    out, rows = Out(), table("options of expand", "parameters", "FLOPs", "width : depth")
    before = summary.parameters(found[0].plan)[0]
    for shape in found:
        ratio = f"{shape.proportion:.2g} times the source's" if abs(shape.proportion - 1) > 0.05 else "as the source's"
        rows.add_row(shape.options, summary.human(shape.parameters), summary.human(shape.flops), ratio)
    out.line(f"{source}: from {summary.human(before)} to about {params} parameters, all lossless, the nearest first")
    out.table(rows)
    out.line(f"`lemonx expand` with --params {params} takes the first")


def print_shape(shape: Shape, out: Out) -> None:
    out.line(f"{shape.options}: {summary.human(shape.parameters)} parameters, {summary.human(shape.flops)} FLOPs")


def print_plan(plan: Plan, out: Out, *, tensors: bool = False) -> None:
    """Sizes as config.json names them; `tensors`: also the rule of every tensor."""
    out.line(styled("bold", plan.family.title))
    out.line(f"{name_of(plan.source) or plan.source}")
    sizes = table("config.json", "source", "target")
    for name, before, after in summary.config_table(plan):
        sizes.add_row(name, _short(before), styled("bold" if before != after else "", _short(after)))
    per = {"vision": "image", "language": "token"}.get(plan.family.kind, "step")
    for label, (before, after) in (
        ("parameters", summary.parameters(plan)),
        (f"FLOPs per {per}", summary.flops(plan)),
        ("bytes on disk", summary.bytes_on_disk(plan)),
    ):
        sizes.add_row(styled("dim", label), summary.human(before), summary.human(after))
    out.table(sizes)
    if tensors:
        _print_tensors(out, plan)
    lossless = styled("green", "lossless") if plan.policy.lossless else styled("red", "not lossless")
    out.line(f"method {plan.policy.method}: ", lossless)
    for note in notes(plan):
        out.line(f"note: {note}")
    if lost := summary.lost_to_eps(plan):
        out.line(
            f"expected loss: {lost['of_stream']:.1e} of the stream at most, at {lost['places']} places where added "
            f"blocks norm it again, if its variance is at least {lost['variance']} there"
        )
    words = [] if plan.free.placement == INTERLEAVED else [plan.free.placement]
    words += ["ramp"] if plan.free.ramp else []
    chosen = ", ".join([plan.free.name, f"depth type {plan.free.depth_type}", *words, f"seed {plan.seed}"])
    out.line(f"free parameters: {chosen}")
    out.line(f"{len(plan.steps)} tensors in the stored dtype: {summary.exactness_text(plan)}")
    for name, why in plan.dropped.items():
        out.line(f"not written: {name} ({why})")
    if not tensors:
        out.line(styled("dim", "--tensors lists the shape and the rule of every tensor"))


def _print_tensors(out: Out, plan: Plan) -> None:
    """Print the name of each tensor, then one line for all blocks in which it has the same rule."""
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
