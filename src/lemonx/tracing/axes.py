"""Axes of tensors as terms that are unified: type inference, with axes in the place of types.

An axis is an atom, a product of axes (fused, outermost first) or a sum of axes (one after the other). What an operation
says of two axes is that they are one: `unify` makes them so, and finds a structure for an atom where the other one has
one. Axes of the inputs (batch, tokens, pixels) are `data`: they have a size and no identity, and what is unified with
one cannot grow.

Uniting too much is safe, since it only refuses more; so wherever two structures do not fit, all their atoms are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

ATOM, PRODUCT, SUM, DATA = "atom", "product", "sum", "data"


class Misfit(Exception):
    """Two structures that cannot be one, or sizes that cut through a part."""


@dataclass(eq=False)
class Axis:
    """A term: its size, its parts if it is a product or a sum, and what operations said of it.

    `facts`: name of a fact -> where it was found and why, the first that was. `merged`: it was unified with another
    axis. `whole`: the product that it was split from. `picked`: for an axis over which single entries were
    selected, the axes inside each of them, by the entry's number, in place of `mates`.
    """

    size: int
    kind: str = ATOM
    parts: list[Axis] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    parent: Axis | None = None
    merged: bool = False
    whole: Axis | None = None
    mates: list[Axis] = field(default_factory=list)
    picked: dict[int, list[Axis]] = field(default_factory=dict)

    def __repr__(self) -> str:
        root = find(self)
        if root.kind in (ATOM, DATA):
            return f"{root.size}{'d' if root.kind == DATA else ''}"
        return f"({(' ' if root.kind == PRODUCT else ' + ').join(map(repr, leaves(root, root.kind)))})"


def data(size: int) -> Axis:
    """An axis of the inputs."""
    return Axis(size, DATA)


def find(axis: Axis) -> Axis:
    """The axis that stands for all that were unified with this one."""
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def is_data(axis: Axis) -> bool:
    """Whether all of it is of the inputs."""
    axis = find(axis)
    return axis.kind == DATA or (axis.kind != ATOM and all(is_data(part) for part in axis.parts))


def leaves(axis: Axis, kind: str) -> list[Axis]:
    """The factors of a product, or the terms of a sum; the axis itself where it is neither."""
    axis = find(axis)
    return [leaf for part in axis.parts for leaf in leaves(part, kind)] if axis.kind == kind else [axis]


def atoms(axis: Axis | None) -> Iterator[Axis]:
    """Every atom in it, in order."""
    if axis is not None:
        axis = find(axis)
        if axis.kind == ATOM:
            yield axis
        for part in axis.parts:
            yield from atoms(part)


def say(axis: Axis | None, fact: str, why: str) -> None:
    """Note a fact of an axis, and so of all that it is made of."""
    if axis is not None and find(axis).kind != DATA:
        axis = find(axis)
        axis.facts.setdefault(fact, why)
        for inner in axis.parts:
            say(inner, fact, why)


def made(kind: str, parts: Iterable[Axis]) -> Axis:
    flat = [leaf for part in parts for leaf in leaves(part, kind)]
    if len(flat) == 1:
        return flat[0]
    sizes = [part.size for part in flat]
    if all(part.kind == DATA for part in flat):
        return data(math.prod(sizes) if kind == PRODUCT else sum(sizes))
    return Axis(math.prod(sizes) if kind == PRODUCT else sum(sizes), kind, flat)


def fused(*parts: Axis) -> Axis:
    """The product of these axes, outermost first.

    >>> fused(Axis(4), fused(Axis(2), Axis(3)))
    (4 2 3)
    """
    return made(PRODUCT, parts)


def joined(*parts: Axis) -> Axis:
    """The sum of these axes, one after the other."""
    return made(SUM, parts)


def become(axis: Axis, kind: str, parts: Sequence[Axis]) -> list[Axis]:
    """Give an atom a structure."""
    axis.kind, axis.parts = kind, list(parts)
    if kind == PRODUCT:
        for part in parts:
            part.whole = axis
    return axis.parts


def split(axis: Axis, outer: int) -> tuple[Axis, Axis]:
    """The two factors of an axis of which the outer one has this size.

    >>> first = Axis(12)
    >>> split(first, 3), first
    ((3, 4), (3 4))
    """
    axis = find(axis)
    if axis.size % outer:
        raise Misfit(f"{axis.size} in {outer} equal parts")
    inner = axis.size // outer
    if axis.kind == DATA:
        return data(outer), data(inner)
    if axis.kind == ATOM:
        first, second = become(axis, PRODUCT, (Axis(outer), Axis(inner)))
        return first, second
    if axis.kind == PRODUCT:
        first, second = factors(axis, (outer, inner))
        return first or data(1), second or data(1)
    return _split_sum(axis, outer, inner)


def _split_sum(axis: Axis, outer: int, inner: int) -> tuple[Axis, Axis]:
    """(a + b) as a product: its terms are equal ones, or products with one inner axis."""
    terms = leaves(axis, SUM)
    if any(term.size % inner for term in terms):
        raise Misfit(f"a sum of {[term.size for term in terms]} in {outer} equal parts")
    inside, outside = Axis(inner), []
    for term in terms:
        first, second = (data(1), term) if term.size == inner else split(term, term.size // inner)
        inside = unify(inside, second)
        outside.append(first)
    found = joined(*outside)
    become(axis, PRODUCT, (found, inside))
    return found, inside


def factors(axis: Axis, sizes: Sequence[int]) -> list[Axis | None]:
    """An axis as factors of these sizes, None for a size of one; what a view makes of it.

    >>> factors(fused(Axis(4), Axis(6)), (8, 1, 3))
    [(4 2), None, 3]
    """
    rest, result = leaves(axis, PRODUCT), list[Axis | None]()
    for size in sizes:
        got, product = list[Axis](), 1
        while product < size:
            if not rest:
                raise Misfit(f"a factor {size} of {axis.size}")
            first = find(rest.pop(0))
            if first.size == 1:
                continue
            if first.kind == DATA:  # data may be cut anywhere, so neighbours are one
                while rest and find(rest[0]).kind == DATA:
                    first = data(first.size * rest.pop(0).size)
            if size % (product * first.size) == 0:
                got.append(first)
                product *= first.size
                continue
            need = size // product
            head, tail = split(first, need)
            got.append(head)
            rest.insert(0, tail)
            product *= need
        result.append(fused(*got) if got else None)
    return result


def cut(axis: Axis, at: int) -> tuple[Axis, Axis]:
    """The first `at` entries of an axis, and the others.

    >>> whole = Axis(7)
    >>> cut(whole, 3), whole
    ((3, 4), (3 + 4))
    """
    axis = find(axis)
    if axis.kind == DATA:
        return data(at), data(axis.size - at)
    if axis.kind == ATOM:
        first, second = become(axis, SUM, (Axis(at), Axis(axis.size - at)))
        return first, second
    if axis.kind == SUM:
        before, after, place = [], [], 0
        for term in leaves(axis, SUM):
            if place < at < place + term.size:
                first, second = cut(term, at - place)
                before.append(first)
                after.append(second)
            else:
                (before if place + term.size <= at else after).append(term)
            place += term.size
        return joined(*before), joined(*after)
    first, *others = leaves(axis, PRODUCT)
    inner = math.prod(other.size for other in others)
    if at % inner:
        raise Misfit(f"a product with an inner size of {inner}, cut at {at}")
    found = cut(first, at // inner)
    before, after = (fused(*(() if part.size == 1 else (part,)), *others) for part in found)
    return before, after


def part(axis: Axis | None, start: int, stop: int) -> Axis | None:
    """The entries from `start` to `stop` of an axis; None where they are one."""
    if axis is None or (start, stop) == (0, axis.size):
        return axis
    if stop - start <= 0:
        return data(max(0, stop - start))
    if stop < axis.size:
        axis = cut(axis, stop)[0]
    if start:
        axis = cut(axis, start)[1]
    return None if axis.size == 1 else axis


def unify(first: Axis, second: Axis, why: str = "") -> Axis:
    """Make two axes one; raises Misfit where their structures differ.

    >>> a, b = fused(Axis(2), Axis(6)), fused(Axis(4), Axis(3))
    >>> unify(a, b)
    (2 2 3)
    """
    a, b = find(first), find(second)
    if a is b:
        return a
    if a.size != b.size:
        raise Misfit(f"an axis of {a.size} that is one of {b.size}")
    if is_data(a) or is_data(b):
        other = b if is_data(a) else a
        for atom in atoms(other):
            say(atom, "fixed", why or "it is an axis of the inputs")
        return a if is_data(a) else b
    if b.kind != ATOM and (a.kind == ATOM or (a.kind, b.kind) == (SUM, PRODUCT)):
        a, b = b, a
    if b.kind == ATOM:
        _link(b, a)
    elif a.kind == b.kind:
        mine, other = leaves(a, a.kind), leaves(b, b.kind)
        _link(b, a)
        _pair(mine, other, split if a.kind == PRODUCT else cut, why)
    else:
        _unify_sum(a, b, why)
    return find(a)


def _unify_sum(product: Axis, total: Axis, why: str) -> None:
    """(a b) = c + d: a is a sum too, of as many terms, and c and d are products with b."""
    terms, (outer, *others) = leaves(total, SUM), leaves(product, PRODUCT)
    inner = math.prod(other.size for other in others)
    if any(term.size % inner for term in terms):
        raise Misfit(f"a product with an inner size of {inner} and a sum of {[term.size for term in terms]}")
    _link(total, product)
    rest = outer
    for place, term in enumerate(terms):
        last = place == len(terms) - 1
        head, rest = (rest, rest) if last else cut(rest, term.size // inner)
        unify(term, fused(*(() if head.size == 1 else (head,)), *others), why)


def _link(child: Axis, parent: Axis) -> None:
    child, parent = find(child), find(parent)
    if child is not parent:
        child.parent = parent
        _mark_merged(parent)
        parent.whole = parent.whole or child.whole
        for fact, why in child.facts.items():
            parent.facts.setdefault(fact, why)
        for number, inside in child.picked.items():
            if len(parent.picked.setdefault(number, inside)) != len(inside):
                raise Misfit("single entries of two axes that are one but for what is inside")
            for mine, other in zip(parent.picked[number], inside, strict=True):
                unify(mine, other)
        parent.mates = parent.mates or child.mates


def _mark_merged(axis: Axis) -> None:
    axis = find(axis)
    axis.merged = True
    for inner in axis.parts:
        _mark_merged(inner)


def _pair(mine: list[Axis], other: list[Axis], divide: Callable[[Axis, int], tuple[Axis, Axis]], why: str) -> None:
    """Unify two lists of factors, or of terms, one by one, dividing the larger one where they differ."""
    while mine and other:
        a, b = find(mine.pop(0)), find(other.pop(0))
        if a.size > b.size:
            a, rest = divide(a, b.size)
            mine.insert(0, rest)
        elif b.size > a.size:
            b, rest = divide(b, a.size)
            other.insert(0, rest)
        unify(a, b, why)
