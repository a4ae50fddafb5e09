"""What a plan amounts to: sizes, parameters, FLOPs, bytes, and one line per group of tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lemonx.algebra.norm_chains import VARIANCE
from lemonx.checkpoints.safetensors_file import item_size
from lemonx.planning.exactness import WEAKER
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.specs.config import flat_fields


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one row with one rule, in the blocks of one stack or outside of all."""

    stack: str | None
    name: str
    shape: tuple[int, ...]
    count: int
    rule: str
    exactness: str


def size_table(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """(name, source, target) of every space and stack that this checkpoint has, as the spec names them."""
    rows = [plan.source_spec.rows[name] for name in plan.rows]
    used = {axis for row in rows for axis in row.touches}
    for name, space in plan.source_spec.spaces.items():
        if name in used:
            yield name, space.size, plan.target_spec.spaces[name].size
    for name, stack in plan.source_spec.stacks.items():
        yield f"blocks in {name}", stack.size, plan.target_spec.stacks[name].size


def config_table(plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """(field, source, target) of the sizes in config.json, changed or not, then of all else that changes."""
    old, new = plan.family.config(plan.source_config), plan.family.config(plan.target_config)
    changed = {name: (before, after) for name, before, after in changed_fields(plan)}
    written = flat_fields(plan.target_config)
    for name in dict.fromkeys(name for names in plan.family.sizes.values() for name in names):
        if name in changed:
            yield (name, *changed.pop(name))
        # A field that config.json leaves out may be one that this class has no use for, and so without a default.
        elif name in written and old.get(name) is not None and new.get(name) is not None:
            yield name, old[name], new[name]
    for name, (before, after) in changed.items():
        yield name, before, after


def sizes_text(plan: Plan) -> str:
    """The sizes that grow, by the options that set them, or by their names in config.json where these are several."""
    grown = {name: f"{before} -> {after}" for name, before, after in config_table(plan) if before != after}
    said: dict[str, str] = {}
    for option, names in plan.family.sizes.items():
        ways = {name: grown[name] for name in names if name in grown}
        same = set(ways.values())
        said |= {option: same.pop()} if len(same) == 1 else ways
    return ", ".join(f"{name} {way}" for name, way in said.items())


def exactness_text(plan: Plan) -> str:
    """How the tensors come out in the stored dtype, in words: counts of tensors, the most exact first."""
    counts = Counter(step.exactness for step in plan.steps)
    return ", ".join(f"{counts[kind]} {kind}" for kind in WEAKER if counts[kind])


def changed_fields(plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """(field, source, target) of every field of config.json that changes."""
    old = flat_fields(plan.source_config)
    for name, value in flat_fields(plan.target_config).items():
        before = old.get(name)
        if before != value:
            yield name, before, value


def lost_to_eps(plan: Plan) -> dict[str, float] | None:
    """What added Post-LN blocks cost: at most so much of the stream, where its variance is at least `variance`."""
    if not plan.chains:
        return None
    return {
        "eps": max(chain.eps for chain in plan.chains),
        "places": len(plan.chains),
        "at_each": max(chain.loss for chain in plan.chains),
        "of_stream": plan.expected_loss,
        "variance": VARIANCE,
    }


def parameters(plan: Plan) -> tuple[int, int]:
    """The number of parameters on disk, source and target."""
    written = [info for name, info in plan.tensors.items() if name not in plan.dropped]
    return sum(info.numel for info in written), sum(math.prod(step.shape) for step in plan.steps)


def bytes_on_disk(plan: Plan) -> tuple[int, int]:
    return plan.source_bytes, sum(math.prod(step.shape) * item_size(step.dtype) for step in plan.steps)


def flops(plan: Plan) -> tuple[int, int]:
    """Multiplications and additions by weights, per token or image; attention scores are not counted."""
    rows = plan.source_spec.rows
    tied = [name for name in plan.rows if getattr(rows[name], "tied", None)]
    kept = [name for name in tied if getattr(plan.target_spec.rows[name], "tied", None)]
    source = target = 0
    seen = set()
    for step in plan.steps:
        target += step.flops
        if step.source not in seen and step.flops and step.row not in tied:
            seen.add(step.source)
            source += step.flops * plan.tensors[step.source].numel // math.prod(step.shape)
    for name in tied:
        table = next(step for step in plan.steps if step.row == getattr(rows[name], "tied", None))
        source += 2 * plan.tensors[table.source].numel
        target += 2 * math.prod(table.shape) if name in kept else 0
    return source, target


def groups(plan: Plan) -> list[TensorGroup]:
    """Steps that differ only in their block's index, in the order of the spec."""
    counted: dict[tuple[str | None, str, tuple[int, ...], str, str], int] = {}
    for step in sorted(plan.steps, key=lambda step: plan.source_spec.order[step.row]):
        key = (*_place(step), step.shape, step.rule, step.exactness)
        counted[key] = counted.get(key, 0) + 1
    return [TensorGroup(stack, name, shape, n, rule, exact) for (stack, name, shape, rule, exact), n in counted.items()]


def _place(step: Step) -> tuple[str | None, str]:
    """The stack a tensor is in, and its name inside a block; a block's own rows (`layers.0.x`) stay whole."""
    if step.stack is None or "*" not in step.row:
        return None, step.name
    return step.stack, step.name.removeprefix(f"{step.stack}.{step.block}.")


def human(count: float) -> str:
    """1234567 -> 1.23M, and 999999 -> 1M."""
    for unit in ("", "K", "M", "G", "T", "P", "E", "Z"):
        if abs(count) < 999.5 or unit == "Z":
            return f"{count:.0f}" if unit == "" else f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError
