"""Norms, tied weights, roles of axes and the scale of attention: the table's against the trace's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from auditing.spaces import Partition
from auditing.subject import Difference, Subject
from lemonx import architectures
from lemonx.planning.depth import eps_of
from lemonx.planning.typecheck import with_tied
from lemonx.specs.norms import GroupNorm, LayerNorm, Norm
from lemonx.specs.spaces import Scaled
from lemonx.specs.weights import Linear
from lemonx.tracing.values import Norm as TracedNorm


def norms(subject: Subject, found: Partition) -> Iterator[Difference]:
    """Every norm that was run has a row of its kind, with its eps and offset; every row's norm was run, unless idle."""
    spec, tracer = subject.spec, subject.tracer
    left = {id(norm): norm for norm in tracer.norms}
    for hit in subject.hits:
        row = spec.rows[hit.row]
        if not isinstance(row, Norm | GroupNorm) or hit.suffix != "weight":
            continue
        mine = [norm for norm in tracer.norms if norm.gain == subject.parameters[hit.name]]
        for norm in mine:
            left.pop(id(norm), None)
            eps = _eps(subject, hit.row) if isinstance(row, Norm) else norm.eps
            yield from _unlike(hit.row, row, norm, eps)
        idle = isinstance(row, Norm) and row.idle
        if bool(mine) == idle and subject.parameters[hit.name] in tracer.used:
            yield Difference("norm", hit.row, "it is not run" if idle else "a norm", "it is run" if idle else "none")
    bare = [(name, row) for name, row in spec.rows.items() if isinstance(row, Norm) and not row.affine]
    rows = Counter({name: _times(subject, name) for name, _ in bare})
    for norm in left.values():
        fits = [name for name, row in bare if rows[name] and not [*_unlike(name, row, norm, _eps(subject, name))]
                and found.names(norm.reads) & set(row.reads.axes)]  # fmt: skip
        if fits:
            rows[fits[0]] -= 1
        else:
            yield Difference(
                "norm", norm.path or "the model", "no norm", f"{norm.kind} over {norm.reads!r}, {norm.gain}"
            )
    for name in +rows:
        yield Difference("norm", name, "a norm without parameters", "none")


def _eps(subject: Subject, name: str) -> float:
    return eps_of(subject.spec, name, architectures.find(subject.config).config(subject.config))


def _times(subject: Subject, name: str) -> int:
    stack = subject.spec.stack_of(name) if "*" in name else None
    return subject.spec.stacks[stack].size if stack else 1


def _unlike(name: str, row: Norm | GroupNorm, norm: TracedNorm, eps: float) -> Iterator[Difference]:
    kind = "group" if isinstance(row, GroupNorm) else "layer" if isinstance(row, LayerNorm) else "rms"
    offset = row.offset if isinstance(row, Norm) else 0.0
    said = (kind, eps, offset)
    seen = (norm.kind, norm.eps, norm.offset)
    if kind != norm.kind or offset != norm.offset or not math.isclose(eps, norm.eps, rel_tol=1e-12):
        yield Difference("norm", name, f"(kind, eps, offset) = {said}", str(seen))


def factors(subject: Subject) -> Iterator[Difference]:
    """A factor that the table says a space is multiplied by is one that the model multiplies by."""
    numbers = {abs(number) for calls in subject.tracer.calls.values() for call in calls if call.op in ("mul", "div")
               for number in call.numbers}  # fmt: skip
    for name, space in subject.spec.spaces.items():
        known = any(
            math.isclose(by, number, rel_tol=1e-6) for by in (space.scale, 1 / space.scale) for number in numbers
        )
        if isinstance(space, Scaled) and space.scale != 1.0 and not known:
            yield Difference("factor", name, f"the model multiplies it by {space.scale:.6g}", "it does not")


def ties(subject: Subject) -> Iterator[Difference]:
    """Tables that are decoders too, and tables under two names."""
    spec, tracer = subject.spec, subject.tracer
    present = with_tied(spec, sorted({hit.row for hit in subject.hits}))
    said = {row.tied for name in present if isinstance(row := spec.rows[name], Linear) and row.tied}
    tables = {hit.row: subject.parameters[hit.name] for hit in subject.hits}
    known = {tables[name] for name in said if name in tables}
    for name in sorted(known ^ set(tracer.ties)):
        both = ("a decoder too", "a table alone")
        yield Difference("tied", name, *(both if name in known else both[::-1]))


def roles(subject: Subject) -> Iterator[Difference]:
    """Axes that a map reads are summed over, and no others are."""
    tracer = subject.tracer
    for said in subject.said:
        summed = (said.parameter, said.place) in tracer.reads
        tied = said.parameter in tracer.ties
        if summed != (said.role == "r") and not tied and said.parameter in tracer.used:
            words = {True: "it is summed over", False: "it is not"}
            yield Difference("role", said.hit.row, words[said.role == "r"], words[summed])


def unused(subject: Subject) -> Iterator[Difference]:
    """Parameters that the inputs did not reach: nothing is said of them."""
    for hit in subject.hits:
        row = subject.spec.rows[hit.row]
        if subject.parameters[hit.name] not in subject.tracer.used and not getattr(row, "idle", False):
            yield Difference("unused", hit.name, "a row", "it was not used")
