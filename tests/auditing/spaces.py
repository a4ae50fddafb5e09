"""Axes of the table and axes of the trace: which are one, which cannot grow, which an activation sees."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from auditing.subject import BECAUSE, Difference, Subject
from lemonx.specs.norms import Norm
from lemonx.specs.signature import Side
from lemonx.specs.spaces import Entries, Grouped
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Linear
from lemonx.tracing.axes import ATOM, DATA, PRODUCT, Axis, Misfit, atoms, factors, find, fused, leaves, part, split

CONSTANT = f"{BECAUSE}a constant has a number of its own for every entry"
# What an axis of the trace is, by the atoms that it is made of.
Key = tuple[object, ...]


def key(axis: Axis) -> Key:
    """What tells an axis of the trace from others."""
    axis = find(axis)
    if axis.kind in (ATOM, DATA):
        return (axis.kind, id(axis) if axis.kind == ATOM else axis.size)
    return (axis.kind, *(key(leaf) for leaf in leaves(axis, axis.kind)))


def pieces(spec: Spec, side: Side, axis: Axis) -> list[tuple[str, Axis | None]]:
    """An axis of the trace as a side of the table divides it; Misfit where it lies otherwise."""
    (by,) = side.by or ("1",)  # the parts of no table alternate by several axes
    whole, times = axis.size, spec.axis_size(by) or 1
    found, start, outer = list[tuple[str, Axis | None]](), 0, None
    if times > 1:
        outer, axis = split(axis, times)
        found.append((by, outer))
    for names in side.parts:
        sizes = [spec.axis_size(name) or whole for name in names]
        sizes[0] //= times
        size = math.prod(sizes)
        piece = part(axis, start, start + size)
        start += size
        inner = factors(piece, sizes) if piece is not None and len(sizes) > 1 else [piece]
        if outer is not None:  # a slice of the first axis for every unit
            inner[0] = outer if inner[0] is None else fused(outer, inner[0])
        found += zip(names, inner, strict=True)
    return found


@dataclass
class Partition:
    """Which axes of the trace every name of the table stands for, with the first place where it does."""

    of_name: dict[str, dict[Key, Axis]] = field(default_factory=lambda: defaultdict(dict))
    of_key: dict[Key, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, spec: Spec, side: Side, axis: Axis, where: str) -> None:
        for name, piece in pieces(spec, side, axis):
            if piece is not None and not name.isdigit() and name != "_":
                self.of_name[name][key(piece)] = piece
                self.of_key[key(piece)].setdefault(name, where)

    def names(self, axis: Axis) -> set[str]:
        """What the table calls an axis of the trace, or those that it is a part of."""
        wanted = {id(atom) for atom in atoms(axis)}
        return {
            name
            for name, known in self.of_name.items()
            if any(id(atom) in wanted for one in known.values() for atom in atoms(one))
        }


def sides(subject: Subject) -> Iterator[tuple[Side, Axis, str]]:
    """Everything that the table says of an axis that was traced: of tensors, of norms, of decoders that are tables."""
    spec, tracer = subject.spec, subject.tracer
    for said in subject.said:
        yield said.side, said.axis, f"{said.hit.name}, axis {said.number}"
    by_gain = {norm.gain: norm for norm in tracer.norms if norm.gain is not None}
    for hit in subject.hits:
        row = spec.rows[hit.row]
        norm = by_gain.get(subject.parameters[hit.name])
        if isinstance(row, Norm) and norm is not None:
            yield row.reads, norm.reads, f"what {hit.row} reads"
    for name, row in spec.rows.items():
        for hit in subject.hits if isinstance(row, Linear) and row.tied else ():
            tied = getattr(row, "tied", None)
            axis = tracer.ties.get(subject.parameters[hit.name]) if hit.row == tied else None
            if axis is not None:
                yield row.reads, axis, f"what {name} reads"


def partition(subject: Subject) -> tuple[Partition, list[Difference]]:
    """The names of the table and the axes of the trace; and sides that lie otherwise than the table says."""
    found, wrong = Partition(), list[Difference]()
    for last in (False, True):  # the first pass divides axes, the second sees all that were divided
        found = Partition()
        for side, axis, where in sides(subject):
            try:
                found.add(subject.spec, side, axis, where)
            except Misfit as misfit:
                if last:
                    wrong.append(Difference("layout", where, str(side), f"{axis!r} ({misfit})"))
    return found, wrong


def joined_by_the_table(spec: Spec) -> dict[str, str]:
    """Names of which the table itself says that they expand alike, each with one that stands for all of them."""
    root: dict[str, str] = {name: name for name in (*spec.spaces, *spec.fixed)}

    def first(name: str) -> str:
        return name if root[name] == name else first(root[name])

    pairs = [(name, space.like) for name, space in spec.spaces.items() if space.like]
    # As many query heads as keys: each sits under its own.
    pairs += [(name, space.under) for name, space in spec.spaces.items()
              if isinstance(space, Grouped) and space.size == spec.spaces[space.under].size]  # fmt: skip
    for row in spec.rows.values():
        if row.in_place and not row.is_norm:
            pairs += zip(row.reads.axes, row.writes.axes, strict=False)
    for one, other in pairs:
        if one in root and other in root:
            root[first(one)] = first(other)
    return {name: first(name) for name in root}


def merged(subject: Subject, found: Partition) -> Iterator[Difference]:
    """Axes that are one in the trace, and two in the table."""
    root = joined_by_the_table(subject.spec)
    seen = set[tuple[str, ...]]()
    for names in found.of_key.values():
        if len({root[name] for name in names}) > 1 and tuple(sorted(names)) not in seen:
            seen.add(tuple(sorted(names)))
            where = ", ".join(f"{name} ({names[name]})" for name in sorted(names))
            yield Difference("merged", " ".join(sorted(names)), "these are several spaces", f"one axis: {where}")


def reason(axis: Axis, fact: str) -> str:
    """Why the trace says so of an axis; empty if it does not."""
    return next((atom.facts[fact] for atom in atoms(axis) if fact in atom.facts), "")


def is_still(spec: Spec, name: str) -> bool:
    """Whether the table lets no size of this name grow."""
    return name in spec.fixed or bool(spec.spaces[name].still)


def grows(subject: Subject, found: Partition) -> Iterator[Difference]:
    """Axes that the trace fixes and the table grows, and the other way round."""
    for name, known in found.of_name.items():
        why = [_fixed(axis) for axis in known.values()]
        if not is_still(subject.spec, name):
            said = sorted({one for one in why if one})
            yield from (Difference("fixed", name, "it may grow", one) for one in said[:1])
        elif not all(why):
            yield Difference("free", name, subject.spec.still.get(name, "it is fixed"), "nothing stands in its way")


def computed(subject: Subject, found: Partition) -> Iterator[Difference]:
    """Tables that the model computes for itself, since the file has none, are constants: their axes stay so."""
    for name in sorted(subject.tracer.parameters.keys() - subject.stored):
        for axis in subject.tracer.parameters[name].axes:
            for space in sorted(found.names(axis)) if axis is not None else ():
                if not is_still(subject.spec, space):
                    yield Difference("computed", space, "it may grow", f"{name} is not in the file")


def _fixed(axis: Axis) -> str:
    axis = find(axis)
    return "it is an axis of the inputs" if axis.kind == DATA else reason(axis, "fixed") or reason(axis, "constant")


def seen_by_activations(spec: Spec) -> set[str]:
    """The spaces that the table takes to be under a nonlinearity, as the type check does (planning/typecheck.py)."""
    normed = {axis for row in spec.rows.values() if row.is_strict for axis in row.touches}
    free = {name for name, space in spec.spaces.items() if name not in normed and not space.is_linear}
    return free | set(spec.acts)


def activations(subject: Subject, found: Partition) -> Iterator[Difference]:
    """Spaces under a nonlinearity, of which the table says that only norms and linear maps see them."""
    known = seen_by_activations(subject.spec)
    for name in sorted(subject.spec.spaces.keys() - known):
        why = next((why for axis in found.of_name[name].values() if (why := reason(axis, "act"))), "")
        if why and not is_still(subject.spec, name):
            yield Difference("activation", name, "only norms and linear maps see it", why)


def constants(subject: Subject, found: Partition) -> Iterator[Difference]:
    """Axes whose entries a constant tells apart are those of which the table says how: by turning, or by slopes."""
    for name, space in subject.spec.spaces.items():
        known = space.kind == "alibi" or (isinstance(space, Entries) and space.turns.turning)
        why = next((why for axis in found.of_name[name].values() if (why := reason(axis, CONSTANT))), "")
        if why and not known and not is_still(subject.spec, name):
            yield Difference("constant", name, "no constant tells its entries apart", why)


def turning(subject: Subject, found: Partition) -> Iterator[Difference]:
    """How many entries of a head turn: constants tell these apart, and no others; what a norm reads turns behind it."""
    normed = {axis for row in subject.spec.rows.values() if row.is_norm for axis in row.reads.axes}
    for name, space in subject.spec.spaces.items():
        axes = found.of_name[name].values() if isinstance(space, Entries) and name not in normed else ()
        numbers = {_told_apart(axis) for axis in axes}
        if isinstance(space, Entries) and numbers - {space.turns.turning}:
            said = f"{space.turns.turning} entries turn"
            yield Difference("turning", name, said, f"{' and '.join(map(str, sorted(numbers)))} do")


def _told_apart(axis: Axis) -> int:
    """How many entries of an axis have numbers of their own in a constant; a pair that is side by side has one."""
    axis = find(axis)
    inner = [_told_apart(leaf) for leaf in leaves(axis, axis.kind)] if axis.parts else []
    if axis.kind == PRODUCT:
        return axis.size if any(inner) else 0
    return sum(inner) if inner else axis.size * (CONSTANT in axis.facts)
