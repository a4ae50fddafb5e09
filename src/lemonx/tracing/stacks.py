"""Whether an added block, in which nothing writes the stream, is the identity: asked of the run of the larger model."""

from __future__ import annotations

from collections.abc import Mapping

from lemonx.planning.depth import in_stream, written_stream
from lemonx.specs.spec import Spec
from lemonx.tracing.blocks import LARGE, to_list
from lemonx.tracing.compare import Matched
from lemonx.tracing.operations import BlockRun
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Carry, shape_of


def identity_problem(found: Matched, stack: str, spec: Spec, held: Mapping[str, object]) -> str | None:
    """Why a silent block of this stack would not be the identity; None if it is, by what was computed in each."""
    stream, rows = spec.stacks[stack].stream, spec.rows
    inside = [name for name in rows if name.startswith(f"{stack}.*.")]
    written = [name for name in inside if written_stream(spec, rows[name], stream) in rows[name].writes.axes]
    standing = {name for name in written if in_stream(rows[name], stream)}
    silenced = {
        str(getattr(where, "parameter", ""))
        for tensor, where in held.items()
        if any(tensor.startswith(name) for name in written if name not in standing)
    }
    factors = {name for name in inside if rows[name].is_factor}
    for index, block in enumerate(found.blocks[stack]):
        if index < found.stacks[stack].pinned:
            continue
        path = to_list(f"{stack}.{index}", found.stacks, LARGE)
        runs = [run for run in found.large.blocks if run.path == path]
        if not runs:
            return f"{path} is not called as a module"
        if block.added and standing and not _behind_its_origin(found, path):
            return f"{path} has norms in its stream, and does not stand behind the block that it is a copy of"
        for run in runs:
            problem = _problem(found.large, run, stack, silenced, factors, bool(standing))
            if problem and (block.added or standing):
                return problem
    return None


def _behind_its_origin(found: Matched, path: str) -> bool:
    """Whether the block before is the one that this is a copy of, or a copy of that too."""
    within, _, index = path.rpartition(".")
    return found.origin(f"{within}.{int(index) - 1}") == found.origin(path)


def _problem(
    tracer: Tracer, run: BlockRun, stack: str, silenced: set[str], factors: set[str], norms: bool
) -> str | None:
    if not run.given or not run.made:
        return f"{run.path} was given, or gave, nothing that parameters had a part in"
    for place, made in enumerate(run.made):
        if place and tracer.last_use.get(made.token, 0) <= run.behind:  # nobody wants it: the scores of attention, say
            continue
        given = run.given[place].token if place < len(run.given) else None
        carry = next((carry for carry in made.carries if carry.token is given), None)
        if carry is None or shape_of(made) != shape_of(run.given[place]):
            return f"what {run.path} gives is not what it was given, plus what its own parameters write"
        inside = {name.replace(f"{run.path}.", f"{stack}.*.", 1) for name in carry.silent}
        if loud := sorted(inside - silenced):
            return f"{loud[0]} would have to be zero in an added block, and it does not write the stream alone"
        if strange := sorted({name.replace(f"{run.path}.", f"{stack}.*.", 1) for name in carry.ones} - factors):
            return f"{strange[0]} would have to be one in an added block, and it is not that block's alone"
        if problem := _norm_problem(run, carry, norms) or _used_elsewhere(tracer, run, carry):
            return problem
    return None


def _norm_problem(run: BlockRun, carry: Carry, norms: bool) -> str | None:
    """Norms in the stream are applied again: the same kind, with one eps, and the last thing in a block."""
    if bool(carry.norms) != norms:
        return f"{run.path} has norms in its stream that are not in the table"
    if carry.norms and (not carry.ends or len({(norm.kind, norm.eps) for norm in carry.norms}) > 1):
        return f"the norms in the stream of {run.path} are not alike, or not the last thing in it"
    return None


def _used_elsewhere(tracer: Tracer, run: BlockRun, carry: Carry) -> str | None:
    """The gain of a norm in the stream becomes one in some blocks: nothing but this norm may be multiplied by it."""
    calls = sum(other.path == run.path for other in tracer.blocks)
    for norm in carry.norms:
        uses = sum(other.gain == norm.gain for other in tracer.norms)
        if norm.gain is not None and uses != calls:
            return f"{norm.gain}, the gain of a norm in the stream of {run.path}, is used by other norms too"
    return None
