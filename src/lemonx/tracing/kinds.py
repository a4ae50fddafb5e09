"""What kind of space every axis is: by what reads it, what writes it, and what stands in the way of its growth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from lemonx.errors import Refused
from lemonx.specs.spaces import Placed, Scaled, Space, avg, circ, fresh, key, projection, query, scaled, zero
from lemonx.tracing.axes import DATA, Axis, find, say
from lemonx.tracing.compare import Matched, both_scalars
from lemonx.tracing.completion import share_fixed
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import shape_of

# What no run has used may grow by anything if it is at most this share of all parameters; nothing is claimed of it.
FEW = 0.02


def fix_conflicts(found: Matched) -> None:
    """An axis that one use of a parameter reads and another writes cannot grow; nor what no run has used."""
    tracer = found.small
    for _, axis, _ in tracer.constants:
        if id(find(axis)) not in found.placed:
            say(axis, "fixed", find(axis).facts.get("constant", "it meets an axis of the inputs"))
    spared = _spared(found)
    for name, info in tracer.parameters.items():
        if name not in tracer.used and name not in spared:
            for axis in info.axes:
                say(axis, "fixed", f"{name} is not used by the inputs that were given")
        for place, axis in enumerate(info.axes):
            both = (name, place) in tracer.reads & tracer.wrote
            if both and not (name in tracer.ties and place == 1):
                say(axis, "fixed", f"{name} is used in two directions")
    fix_weight_norms(tracer)
    for norm in tracer.norms:
        if norm.gain is None and norm.bias is not None:
            say(norm.reads, "fixed", f"{norm.place}: it has a bias and no gain")
    for scalar in tracer.scalars:
        ends = [find(scalar.reads), find(scalar.writes)]
        clash = any(find(n.reads) is ends[0] for n in tracer.norms) or "act" in ends[0].facts or ends[0] is ends[1]
        if clash or any("fixed" in end.facts for end in ends) or any(end.parts for end in ends):
            for end in ends:
                say(end, "fixed", scalar.place)
    for axis, path in tracer.lengths:
        normed = {id(a) for norm in tracer.norms for end in (norm.reads, norm.out) for a in all_atoms(end)}
        for atom in all_atoms(axis):
            if "act" in atom.facts or id(atom) in normed or find(axis).parts:
                say(axis, "fixed", f"{path or 'the model'}: it is divided by its length")
    _pairs(found)
    for _ in tracer.norms:
        if not any([share_fixed(norm.reads, norm.out) for norm in tracer.norms]):
            break


def fix_weight_norms(tracer: Tracer) -> None:
    """The direction of a weight may only be used as that; the weight reads at most one of its axes and writes one."""
    for norm in tracer.weight_norms.values():
        axes = tracer.parameters[norm.direction].axes
        uses = tracer.reads | tracer.wrote
        raw = any((name, place) in uses for name in (norm.direction, norm.gain) for place in range(len(axes)))
        read = [place for place in range(len(axes)) if (norm.weight, place) in tracer.reads]
        both = any((norm.weight, place) in tracer.wrote for place in read)
        written = [p for p, axis in enumerate(axes) if p not in read and axis is not None and not is_still(axis)]
        if raw or both or norm.weight in tracer.indexed or len(read) > 1 or len(written) > 1:
            for axis in axes:
                say(axis, "fixed", f"{norm.direction}: the direction of a weight that is not a map of one axis")
        for axis in axes:
            say(axis, "act", f"{norm.direction}: it is divided by its length")


def is_still(axis: Axis) -> bool:
    """Whether no part of an axis can grow."""
    return all(atom.kind == DATA or "fixed" in atom.facts for atom in all_atoms(axis))


def _spared(found: Matched) -> set[str]:
    """Parameters that no run has used and that are few: a mask token, say. New entries of them may hold anything.

    So may those of buffers, which nobody trains.
    """
    sizes = {name: math.prod(shape_of(info)) for name, info in found.small.parameters.items()}
    unused = sizes.keys() - found.small.used.keys()
    buffers, trained = unused & found.small.buffers, unused - found.small.buffers
    few = sum(sizes[name] for name in trained) <= FEW * sum(sizes.values())
    return buffers | (trained if few else set())


@dataclass
class Kinds:
    """The spaces of a table at both sizes; those that cannot grow, with the reason; and those under a nonlinearity."""

    spaces: dict[str, tuple[Space, Space]] = field(default_factory=dict)
    fixed: dict[str, tuple[int, int]] = field(default_factory=dict)
    still: dict[str, str] = field(default_factory=dict)
    acts: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)


def kinds_of(found: Matched, names: Mapping[str, Axis]) -> Kinds:
    """What every named axis is."""
    pairs, result = _pairs(found), Kinds()
    for name, atom in names.items():
        sizes = atom.size, found.size(atom)
        if id(atom) in found.placed and "fixed" not in atom.facts:
            result.spaces[name] = Placed(sizes[0]), Placed(sizes[1], at=found.placed[id(atom)])
            continue
        if "fixed" in atom.facts:
            result.fixed[name], result.still[name] = sizes, atom.facts["fixed"]
            continue
        if "act" in atom.facts:
            result.acts.append(name)
        if "shown" in atom.facts:
            result.shown.append(name)
        if "mixed" in atom.facts:
            result.mixed.append(name)
        build = _kind(found.small, atom)
        result.spaces[name] = build(sizes[0]), build(sizes[1])
        if build is circ and _passes(found.small, atom):
            result.spaces[name] = replace(circ(sizes[0]), passes=True), replace(circ(sizes[1]), passes=True)
        if pairs.get(id(atom), ("copies",))[0] != "copies":
            kind, scales = pairs[id(atom)]
            made = [
                query(size, scale=by) if kind == "query" else key(size) for size, by in zip(sizes, scales, strict=True)
            ]
            result.spaces[name] = made[0], made[1]
    _scale(found, names, result.spaces)
    return result


def _kind(tracer: Tracer, atom: Axis) -> Callable[[int], Space]:
    """What new entries of a space may hold, by what reads it."""
    norms = tracer.norms
    if "length" in atom.facts:
        return projection
    reading = {norm.kind for norm in norms if any(find(a) is atom for a in all_atoms(norm.reads))}
    if "layer" in reading or ("mean" in atom.facts and "rms" not in reading):
        return avg
    if "rms" in reading:
        return zero
    if "act" in atom.facts or "group" in reading:
        return circ
    normed = {id(find(a)) for norm in norms for a in all_atoms(norm.out)}
    if id(atom) in normed:
        return zero
    # What a norm wrote, times a number that the sizes decide; what a table writes that is a decoder behind a norm too.
    before = {id(find(scalar.reads)) for scalar in tracer.scalars if find(scalar.writes) is atom}
    before |= {id(find(dual)) for name, dual in tracer.ties.items() if tracer.parameters[name].axes[1] is not None
               and find(tracer.parameters[name].axes[1] or dual) is atom}  # fmt: skip
    paired = any(find(dual) is atom for dual in tracer.ties.values())  # new entries of a table are not read
    return partial(Scaled, kind="zero") if before & normed or paired else fresh


def _passes(tracer: Tracer, atom: Axis) -> bool:
    """Whether they are the neurons of branches, each of which is added to what it read: two can pass a number on."""
    maps = [
        name
        for name, info in tracer.parameters.items()
        if len(info.axes) > 1 and any(find(axis) is atom for axis in info.axes if axis is not None)
    ]
    return bool(maps) and all(0 < tracer.maps[name] == tracer.returned[name] for name in maps)


def all_atoms(axis: Axis) -> Iterator[Axis]:
    axis = find(axis)
    if not axis.parts:
        yield axis
    for inner in axis.parts:
        yield from all_atoms(inner)


def _pairs(found: Matched) -> dict[int, tuple[str, tuple[float, float]]]:
    """Entries of queries and keys that may grow, with what their products are multiplied by at both sizes.

    Those of one of the two may pass a nonlinearity, as they are copies then; new ones of the other are zero.
    """
    result: dict[int, tuple[str, tuple[float, float]]] = {}
    normed = {id(a) for norm in found.small.norms for end in (norm.reads, norm.out) for a in all_atoms(end)}
    # What is multiplied by a number before it is a query follows the query; what is multiplied after is no pair's.
    scalars = {id(find(scalar.reads)) for scalar in found.small.scalars}
    factors = _factors(found)
    for pair in found.small.pairs:
        first, second = find(pair.first), find(pair.second)
        if "length" in first.facts and "length" in second.facts:  # zeros on both sides
            continue
        scale = factors.get(id(first))
        if "act" in first.facts:
            first, second = second, first
        plain = not (first.parts or second.parts) and "act" not in first.facts
        alone = not ({id(first), id(second)} & scalars) and id(first) not in normed
        kind = "copies" if "act" in second.facts else "key"
        alone = alone and (kind == "copies" or id(second) not in normed)
        wanted = ("query", scale), (kind, (1.0, 1.0))
        roles = result.get(id(first), wanted[0]), result.get(id(second), wanted[1])
        if not (plain and alone and scale is not None and roles == wanted):
            for end in (pair.first, pair.second):
                say(end, "fixed", pair.place)
            continue
        result[id(first)], result[id(second)] = ("query", scale), (kind, (1.0, 1.0))
    return result


def _factors(found: Matched) -> dict[int, tuple[float, float]]:
    """What the products of each query are multiplied by, where that is one number, in both models."""
    ends = []
    for tracer in (found.small, found.large):
        known: dict[int, set[float]] = {}
        for pair in tracer.pairs:
            known.setdefault(id(find(pair.first)), set()).update(pair.factors)
        ends.append([(pair, known[id(find(pair.first))]) for pair in tracer.pairs])
    pairs = _numbered([pair.place for pair, _ in ends[1]])
    by_place: dict[tuple[str, int], set[float]] = {}
    for (place, number), (_, values) in zip(pairs, ends[1], strict=True):
        by_place.setdefault((_where(found, place), number), values)
    result = {}
    for place, (pair, values) in zip(_numbered([pair.place for pair, _ in ends[0]]), ends[0], strict=True):
        other = by_place.get(place, set())
        if len(values) == 1 == len(other):
            result[id(find(pair.first))] = (next(iter(values)), next(iter(other)))
    return result


def _numbered(places: Iterable[str]) -> list[tuple[str, int]]:
    """Places with a number for each of several things that are in one.

    >>> _numbered(["a", "b", "a"])
    [('a', 0), ('b', 0), ('a', 1)]
    """
    seen: Counter[str] = Counter()
    found = []
    for place in places:
        found.append((place, seen[place]))
        seen[place] += 1
    return found


def _where(found: Matched, place: str) -> str:
    """The place of a pair in the larger model, as the smaller one names it."""
    path, _, rest = place.partition(",")
    return f"{found.origin(path) or path},{rest}"


def _scale(found: Matched, names: Mapping[str, Axis], spaces: dict[str, tuple[Space, Space]]) -> None:
    """What a number that the sizes decide is multiplied with expands as the product does, less the change of it."""
    called = {id(atom): name for name, atom in names.items()}
    for scalar, other in both_scalars(found):
        reads, writes = (called.get(id(find(end)), "") for end in (scalar.reads, scalar.writes))
        numbers = scalar.number, other.number
        if reads in spaces and writes in spaces:
            like = spaces[writes]
            spaces[reads] = scaled(like[0], writes, numbers[0]), scaled(like[1], writes, numbers[1])
        elif not math.isclose(*numbers):
            raise Refused(
                f"{scalar.place}: it is {numbers[0]:.6g} in the smaller model and {numbers[1]:.6g} in the larger, and "
                "no weight that grows can make up for that",
                "the sizes must not change it",
            )
