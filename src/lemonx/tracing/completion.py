"""What is known only when a run is over: structures that were found late are everywhere, and facts with them."""

from __future__ import annotations

from dataclasses import replace

from lemonx.tracing.axes import ATOM, DATA, PRODUCT, SUM, Axis, Misfit, atoms, find, is_data, leaves, say
from lemonx.tracing.operations import Scalar
from lemonx.tracing.settling import mirror, settle, spread
from lemonx.tracing.tracer import Tracer


def complete(tracer: Tracer) -> Tracer:
    """The record, with norms and structures completed."""
    tracer.op = "norm"
    for norm in tracer.norms:
        if norm.bare and norm.writes is not None:
            norm.writes = tracer.unified(norm.raw, norm.writes)
            say(norm.raw, "act", norm.place)
    everywhere = [*(axis for info in tracer.parameters.values() for axis in info.axes), *tracer.ties.values()]
    everywhere += [axis for norm in tracer.norms for axis in (norm.reads, norm.raw, norm.out)]
    everywhere += [axis for pair in tracer.pairs for axis in (pair.first, pair.second)]
    everywhere += [axis for scalar in tracer.scalars for axis in (scalar.reads, scalar.writes)]
    everywhere += [axis for axis, *_ in (*tracer.lengths, *tracer.means)]
    for axis, _, _ in tracer.means:
        say(axis, "mean", tracer.why("its mean is used"))
    for step in (spread, settle, spread):
        for axis in everywhere:
            step(axis)
    edges = [(norm.reads, norm.out) for norm in tracer.norms] + [(s.reads, s.writes) for s in tracer.scalars]
    for _ in range(len(edges) + 1):
        if not any([_mirrored(tracer, a, b) for a, b in edges]):
            break
    tracer.scalars = [one for scalar in tracer.scalars for one in _single(tracer, scalar)]
    _show(tracer)
    for axis in everywhere:
        spread(axis)
    for _ in range(len(edges) + 1):
        if not any([share_fixed(a, b) for a, b in edges]):
            break
    _mix(tracer)
    return tracer


def _single(tracer: Tracer, scalar: Scalar) -> list[Scalar]:
    """A multiplication by a number as one of atoms: of every term of a sum, and of one factor of a product."""
    reads, writes = find(scalar.reads), find(scalar.writes)
    if reads.kind != writes.kind or reads is writes or reads.kind not in (PRODUCT, SUM):
        return [scalar]
    pairs = list(zip(leaves(reads, reads.kind), leaves(writes, writes.kind), strict=True))
    if reads.kind == PRODUCT:
        free = [pair for pair in pairs if not any(end.kind == DATA or _fixed(end) for end in pair)] or pairs[-1:]
        for one, other in pairs:
            if one is not free[-1][0]:
                tracer.unified(one, other)
        pairs = free[-1:]
    made = [replace(scalar, reads=one, writes=other) for one, other in pairs if find(one).kind != DATA]
    return [single for one in made for single in _single(tracer, one)]


def _fixed(axis: Axis) -> bool:
    return all("fixed" in atom.facts for atom in atoms(axis))


def _mix(tracer: Tracer) -> None:
    """Note where what a LayerNorm writes is added to what it reads, or to what another one writes."""
    written: dict[int, str | None] = {}
    for norm in tracer.norms:
        read = {id(atom) for atom in atoms(norm.reads)}
        for atom in atoms(norm.out) if norm.kind == "layer" else ():
            if written.setdefault(id(atom), norm.gain) != norm.gain or id(atom) in read:
                say(atom, "mixed", norm.place)


def _show(tracer: Tracer) -> None:
    """Units that leave the model stay in front, as they are; those of several axes in one would be among others."""
    tracer.op = "output"
    for axis in tracer.shown:
        if find(axis).kind == ATOM:
            say(axis, "shown", tracer.why("it leaves the model"))
        elif not is_data(axis):
            tracer.fix(axis, "it leaves the model, as one of several axes in one")


def _mirrored(tracer: Tracer, first: Axis, second: Axis) -> bool:
    try:
        return mirror(first, second)
    except Misfit as misfit:
        for atom in (*atoms(first), *atoms(second)):
            tracer.fix(atom, f"it wants {misfit}")
        return False


def share_fixed(first: Axis, second: Axis) -> bool:
    """What is on one side of a norm is on the other: neither grows alone. True if something changed."""
    changed = False
    for pair in zip(atoms(first), atoms(second), strict=False):
        for one, other in (pair, pair[::-1]):
            if "fixed" in one.facts and "fixed" not in other.facts:
                say(other, "fixed", one.facts["fixed"])
                changed = True
    return changed
