"""Structures that are found late: entries that were selected one by one, and what a norm reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from lemonx.tracing.axes import (
    ATOM,
    DATA,
    PRODUCT,
    SUM,
    Axis,
    Misfit,
    become,
    find,
    fused,
    is_data,
    joined,
    leaves,
    made,
    say,
    unify,
)


def pick(axes: Sequence[Axis | None], place: int, number: int) -> list[Axis | None]:
    """The other axes of a tensor of which one entry of the axis at `place` is selected.

    Where that axis and those inside it were split from one axis, each entry has insides of its own: (3 heads entry) is
    queries, then keys, then values. `settle` says so in the axis that was split.
    """
    chosen, others = axes[place], [axis for at, axis in enumerate(axes) if at != place]
    if chosen is None or is_data(chosen):
        return others
    chosen = find(chosen)
    order = leaves(chosen.whole, PRODUCT) if chosen.whole is not None else []
    mates = order[order.index(chosen) + 1 :] if chosen in order else []
    say(chosen, "fixed", "single entries of it are selected")
    if not chosen.mates:
        chosen.mates = mates
    own = chosen.picked.setdefault(number, [Axis(find(mate).size) for mate in chosen.mates])
    instead = {id(find(mate)): mine for mate, mine in zip(chosen.mates, own, strict=True)}
    return [axis if axis is None else _with(axis, instead) for axis in others]


def _with(axis: Axis, instead: dict[int, Axis]) -> Axis:
    axis = find(axis)
    if id(axis) in instead:
        return instead[id(axis)]
    if axis.kind in (PRODUCT, SUM) and any(id(leaf) in instead for leaf in leaves(axis, axis.kind)):
        return made(axis.kind, [_with(leaf, instead) for leaf in leaves(axis, axis.kind)])
    return axis


def settle(axis: Axis | None) -> None:
    """Turn a product with an axis of which single entries were selected into a sum of what is inside each of them.

    Where the insides are also used as they are, for all entries alike, they stay one.
    """
    if axis is None or find(axis).kind not in (PRODUCT, SUM):
        return
    axis = find(axis)
    chosen = next((leaf for leaf in axis.parts if find(leaf).picked), None) if axis.kind == PRODUCT else None
    if chosen is not None:
        _distribute(axis, find(chosen))
    for inner in list(axis.parts):
        settle(inner)


def _distribute(axis: Axis, chosen: Axis) -> None:
    order = leaves(axis, PRODUCT)
    at, mates, picked = order.index(chosen), [find(mate) for mate in chosen.mates], chosen.picked
    chosen.picked = {}
    alike = any(mate.facts or mate.merged or mate.kind != ATOM for mate in mates)
    if alike or not mates or order[at + 1 :] != mates:
        for own in picked.values():
            for mine, mate in zip(own, mates, strict=True):
                unify(mine, mate)
        return
    terms = [fused(*picked.get(number, [Axis(mate.size) for mate in mates])) for number in range(chosen.size)]
    before, inside = order[:at], joined(*terms)
    axis.kind, axis.parts = (PRODUCT, [*before, inside]) if before else (SUM, leaves(inside, SUM))


def spread(axis: Axis | None) -> None:
    """Say of every atom what was said of the axes that it is a part of."""
    if axis is not None:
        axis = find(axis)
        for inner in axis.parts:
            for fact, why in axis.facts.items():
                say(inner, fact, why)
            spread(inner)


def mirror(first: Axis, second: Axis) -> bool:
    """Give two axes one structure, with atoms of their own: what a norm reads and writes. True if something changed.

    Raises Misfit where they have different ones.
    """
    a, b = find(first), find(second)
    if a is b or (a.kind in (ATOM, DATA) and b.kind in (ATOM, DATA)):
        return False
    if a.kind == ATOM:
        a, b = b, a
    if b.kind == ATOM:
        twins: dict[int, Axis] = {}
        whole = leaves(a, a.kind)
        parts = [leaf if leaf.kind == DATA else twins.setdefault(id(leaf), Axis(leaf.size)) for leaf in whole]
        become(b, a.kind, parts)
        for mine, other in zip(leaves(a, a.kind), parts, strict=True):
            mirror(mine, other)
        return True
    mine, other = leaves(a, a.kind), leaves(b, b.kind)
    if a.kind != b.kind or [x.size for x in mine] != [x.size for x in other]:
        raise Misfit(f"one structure, of {a} and {b}")
    return any([mirror(x, y) for x, y in zip(mine, other, strict=True)])
