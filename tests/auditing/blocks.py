"""Blocks: what must be silent in one for it to be the identity, and whether a deeper model runs as it should."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

from auditing.spaces import Partition
from auditing.subject import Difference, Subject, block_paths, larger, traced
from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.errors import LemonxError
from lemonx.models.building import config_fields
from lemonx.options.sizes import Relative
from lemonx.planning.depth import eps_of, in_stream
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.request import Target
from lemonx.specs.coverage import UNIT
from lemonx.specs.family import Architecture
from lemonx.specs.norms import Norm
from lemonx.specs.spaces import Entries
from lemonx.specs.spec import LAST
from lemonx.tracing.axes import is_data
from lemonx.tracing.operations import BlockRun, Call
from lemonx.tracing.tracer import Tracer


def streams(subject: Subject, found: Partition) -> Iterator[Difference]:
    """A block is given the stack's stream and gives it back, plus what its own rows write into it."""
    spec, runs = subject.spec, dict[str, list[BlockRun]]()
    for run in subject.tracer.blocks:
        runs.setdefault(run.path, []).append(run)
    for (stack, index), path in subject.blocks.items():
        here, stream = f"{stack}.{index}", spec.stacks[stack].stream
        if index < spec.stacks[stack].pinned or spec.stacks[stack].still:
            continue
        silent, standing = set[str](), set[str]()
        for hit in subject.hits:
            row = spec.rows[hit.row]
            elsewhere = (hit.stack, hit.index) != (stack, index) or hit.suffix.startswith("running_")
            if elsewhere or subject.parameters[hit.name] not in subject.tracer.used:
                continue
            if in_stream(row, stream) or (row.is_norm and hit.row.startswith(f"{stack}.{LAST}.")):
                standing.add(subject.parameters[hit.name])
            elif stream in row.writes.axes:
                silent.add(subject.parameters[hit.name])
        if not runs.get(path):
            yield Difference("stream", here, f"a block that adds to {stream}", "it is not called as a module")
        for run in runs.get(path, []):
            yield from _unlike(run, here, found, stream, silent, standing)


def _unlike(
    run: BlockRun, here: str, found: Partition, stream: str, silent: set[str], standing: set[str]
) -> Iterator[Difference]:
    given = run.given[0]
    axes = [axis for axis in given.axes if axis is not None and not is_data(axis)]
    names = set().union(*(found.names(axis) for axis in axes)) if axes else set()
    if stream not in names:
        yield Difference("stream", here, f"it adds to {stream}", f"it is given {' '.join(sorted(names)) or 'nothing'}")
    carry = next((carry for carry in run.made[0].carries if carry.token is given.token), None) if run.made else None
    if carry is None:
        yield Difference("stream", here, f"it adds to {stream}", "what it gives is not what it was given plus a sum")
        return
    if set(carry.silent) != silent:
        odd = sorted(set(carry.silent) ^ silent)
        yield Difference("silent", here, " ".join(sorted(silent)), f"{' '.join(sorted(carry.silent))}; apart: {odd[0]}")
    if {norm.gain for norm in carry.norms} != {name for name in standing if not name.endswith("bias")}:
        yield Difference("stream", here, f"norms in it: {sorted(standing)}", str([norm.gain for norm in carry.norms]))


def grown(folder: Path) -> Plan:
    """The plan to a model twice as wide, with wider heads, and two blocks deeper, or as much of that as can be."""
    wider, deeper, same = Fraction(2), Relative(plus=2), Relative()
    with Checkpoint.open(folder) as checkpoint:
        family = architectures.find(checkpoint.config)
        sizes = {
            name: 2 * size for name in family.sizes.get("head_dim", ()) if (size := _size(family, checkpoint, name))
        }
        heads_of, keys_of = (same if option in family.sizes else None for option in ("heads", "kv_heads"))
        targets = [
            Target(width=Relative(times=wider), depth=deeper, heads=heads_of, kv_heads=keys_of, fields=sizes),
            Target(width=Relative(times=wider), depth=deeper, heads=heads_of, kv_heads=keys_of),
            Target(width=Relative(times=wider), depth=deeper),
            Target(depth=deeper),
            Target(width=Relative(times=wider)),
            Target(width=Relative(times=Fraction(3))),
            Target(fields={"model_args.layers": [3, 4]}),
        ]
        for target in targets:
            try:
                return make_plan(checkpoint, target, as_read=config_fields)
            except LemonxError:
                continue
    raise LookupError(f"no larger model can be planned from {folder}")


def _size(family: Architecture, checkpoint: Checkpoint, field: str) -> int:
    config = family.config(checkpoint.config)
    size = family.build(config).config.get(field) or config.maybe(field)
    return size if isinstance(size, int) else 0


def calls(subject: Subject, found: Partition, plan: Plan) -> Iterator[Difference]:
    """Every module of the larger model runs as the module that it comes from: operations, numbers and constants."""
    model = larger(plan)
    after = block_paths(model, plan.target_spec, [step.name for step in plan.steps])
    origins = {
        path: subject.blocks[stack, plan.blocks[stack][index].source]
        for (stack, index), path in after.items()
        if (stack, plan.blocks[stack][index].source) in subject.blocks
    }
    decisions = subject.tracer.decisions
    tracer = traced(model, subject.batch, lambda path: decisions.get(_origin(path, origins), []))
    for path, run in tracer.calls.items():
        origin = _origin(path, origins)
        known = subject.tracer.calls.get(origin) or subject.tracer.calls.get(_first_unit(subject, origin), [])
        mine, made = ([call for call in calls if call.op not in _MOVES] for calls in (known, run))
        if [call.op for call in mine] != [call.op for call in made]:
            yield Difference("run", path or "the model", f"it runs as {origin} does", "other operations")
            continue
        for one, two in zip(mine, made, strict=True):
            yield from _other(plan, path, one, two)
    yield from _scales(subject, found, plan, tracer, origins)


# What numbers lie where is a matter of sizes, and torch copies what does not lie as it wants.
_MOVES = frozenset(("view", "_unsafe_view", "reshape", "clone", "alias", "expand", "slice"))


def _origin(path: str, origins: Mapping[str, str]) -> str:
    for block, origin in origins.items():
        if path == block or path.startswith(f"{block}."):
            return origin + path.removeprefix(block)
    return path


def _first_unit(subject: Subject, path: str) -> str:
    """Where every unit of a space is a module (a norm for every head), the first of them."""
    units = any(UNIT.search(row) for row in subject.spec.rows)
    return re.sub(r"\.\d+$", ".0", path) if units else path


def _other(plan: Plan, path: str, one: Call, two: Call) -> Iterator[Difference]:
    if len(one.numbers) != len(two.numbers):
        yield Difference("run", path, f"{one.op} with {one.numbers}", str(two.numbers))
    for a, b in zip(one.numbers, two.numbers, strict=False):
        if not _close(a, b) and not _is_known(plan, a, b):
            yield Difference("number", f"{path}, {one.op}", f"no size decides {a:.6g}", f"it becomes {b:.6g}")
    for a, b in zip(one.constants, two.constants, strict=False):
        if a.shape == b.shape and not math.isclose(a.digest, b.digest, rel_tol=1e-6, abs_tol=1e-6):
            changed = f"a constant of {a.shape} has other numbers"
            yield Difference("constant", f"{path}, {one.op}", "no size decides it", changed)


def _close(a: float, b: float) -> bool:
    """Equal but for rounding; some code computes its numbers in float32."""
    return math.isclose(a, b, rel_tol=1e-6)


def _is_known(plan: Plan, a: float, b: float) -> bool:
    """Whether the table has a number that becomes another with the sizes: a scale, or the eps of a norm.

    A scale may be divided by, and queries and keys may have its root each.
    """
    source, target = plan.source_spec, plan.target_spec
    known = [(space.scale, target.spaces[name].scale) for name, space in source.spaces.items()]
    before, after = plan.family.config(plan.read_as), plan.family.config(plan.target_config)
    for name, row in source.rows.items():
        if isinstance(row, Norm):
            known.append((eps_of(source, name, before), eps_of(target, name, after)))
    powers = [(x**power, y**power) for x, y in known if x > 0 and y > 0 for power in (1, -1, 0.5)]
    return any(_close(a, x) and _close(b, y) for x, y in powers)


def _scales(
    subject: Subject, found: Partition, plan: Plan, tracer: Tracer, origins: Mapping[str, str]
) -> Iterator[Difference]:
    """What products of queries and keys are multiplied by changes as the table says."""
    changed = {b / a for x, y in _numbers(subject.tracer, tracer) for a, b in ((x, y), (x * x, y * y)) if a and b != a}
    pairs = {pair.place: pair for pair in subject.tracer.pairs}
    seen = set[str]()
    for two in tracer.pairs:
        path, _, rest = two.place.partition(",")
        one = pairs.get(f"{_origin(path, origins)},{rest}")
        for name in sorted(found.names(one.first) - seen) if one is not None else ():
            space = plan.source_spec.spaces.get(name)
            if not isinstance(space, Entries) or one is None or len(one.factors) != 1 or len(two.factors) != 1:
                continue
            seen.add(name)
            said, ran = plan.target_spec.spaces[name].scale / space.scale, max(two.factors) / max(one.factors)
            if not any(_close(said, ran * by) for by in (1.0, *(changed if ran == 1.0 else ()))):
                yield Difference("scale", name, f"times {said:.6g}", f"times {ran:.6g}")


def _numbers(small: Tracer, large: Tracer) -> set[tuple[float, float]]:
    """The factors of both models, as far as they have the same modules."""
    return {
        (one.numbers[0], two.numbers[0])
        for path, calls in small.calls.items()
        for one, two in zip(calls, large.calls.get(path, []), strict=False)
        if one.op == two.op in ("mul", "div") and len(one.numbers) == 1 == len(two.numbers)
    }
