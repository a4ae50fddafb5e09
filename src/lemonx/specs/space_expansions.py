"""Experts under a router: how there can be more of them, or smaller ones, without changing what is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lemonx.algebra.expansions import _FLAGS, AVG, RAND, ZERO, Expansion, expansion, multiples_near
from lemonx.errors import BadTarget, Refused
from lemonx.specs.spaces import Space


def experts_expansion(name: str, source: Space, target: Space) -> Expansion:
    """Experts under a router that picks k of them: how more can be added without changing what is picked.

    The best k of n are the best m k of n times m copies. If k = 1, a score that is the mean of all scores is never
    above the best. If scores have a bias, one far below keeps an expert out. A single expert is picked whatever the
    router says. The last three change the sum of all weights, so those picked must share a weight of one.
    """
    times, rest = divmod(target.size, source.size)
    kept = target.chosen == source.chosen and source.renormalised
    if target.chosen > target.size:
        raise BadTarget(f"{target.chosen} of {target.size} {name} cannot be chosen: choose at most {target.size}")
    if (not rest and target.chosen == times * source.chosen) or (source.size == 1 and source.renormalised):
        return expansion("circ", source.size, target.size)
    if kept and source.biased:
        return expansion("fresh", source.size, target.size)
    if kept and source.chosen == 1:
        means = np.full(target.size - source.size, AVG)
        return Expansion(source.size, np.append(np.arange(source.size), means), np.ones(target.size))
    raise Refused(
        f"{source.chosen} of {source.size} {name} are chosen for a token, and {target.chosen} of {target.size} "
        f"would be others: try {2 * source.chosen} of {2 * source.size}"
    )


def parts(source: Space, target: Space, over: tuple[Space, Space] | None) -> int:
    """Into how many experts each is split, its units being shared out among them; 1 if it is not.

    All parts of an expert are picked together, each with its share of the weight, so each writes that much more.
    """
    times = over[1].size // over[0].size if over else 1
    whole = over is not None and over[1].size == times * over[0].size and over[1].chosen == times * over[0].chosen
    return times if whole and times > 1 and target.size * times == source.size else 1


def part(size: int, number: int, of: int, gain: float = 1.0) -> Expansion:
    """The units of one of several equal parts."""
    share = size // of
    return Expansion(size, np.arange(number * share, (number + 1) * share), np.ones(share), gain)


def grouped_expansion(size: int, target: int, under: Expansion, kind: str) -> Expansion:
    """Query heads under copies of their own key-value head: slots of a group are filled circularly.

    Of kind zero or rand, all heads have equally many copies, and slots that are left hold zeros, or anything.
    A unit of `under` with c copies offers c * (target group) slots for its source group; there must be
    enough, else a query head would have no place. The group may grow or shrink (grouped to multi-head).
    """
    group, target_group = size // under.size, target // under.target_size
    short = under.copies * target_group < group
    if size % under.size or target % under.target_size or short.any():
        least = under.target_size * max(-(-group // int(under.copies.min())), -(-target // under.target_size))
        raise Refused(
            f"{target} query heads do not fit {under.target_size} key-value heads: the {group} of each must all stand "
            f"under it and its copies: try {least} query heads, or a larger multiple of {under.target_size}, "
            "as wide as they were"
        )
    slot = np.arange(target) % target_group + under.copy_number.repeat(target_group) * target_group
    source = under.source.repeat(target_group) * group + slot % group
    if kind in _FLAGS:
        times = int(under.copies.min()) * target_group // group
        source = np.where(slot < times * group, source, _FLAGS[kind])
    heads = Expansion(size, source, np.ones(target))
    if kind != "iso":
        return heads
    return replace(heads, amp=np.sqrt((target // size) / heads.copies[source]))


def padded_expansion(size: int, target: int, inner: Expansion) -> Expansion:
    """Units to which a narrower space is added between zeros: copies where it has them, and copies of the edges around.

    >>> padded_expansion(4, 8, expansion("circ", 2, 4)).source
    array([0, 3, 1, 2, 1, 2, 0, 3])
    """
    edges, slots = size - inner.size, target - inner.target_size
    if slots < edges or (slots and not edges):
        raise Refused(
            f"{inner.size} channels are added to {size} between {edges} zeros, {inner.target_size} to {target} between "
            f"{max(slots, 0)}, and every zero must be a copy of one: grow both by the same factor, with --width-factor"
        )
    before = edges // 2
    outside = np.concatenate([np.arange(before), np.arange(before + inner.size, size)])
    filled = np.resize(outside, slots)
    middle = np.where(inner.is_copy, inner.source + before, inner.source)
    return Expansion(size, np.concatenate([filled[: slots // 2], middle, filled[slots // 2 :]]), np.ones(target))


def attention_expansion(source: Space, target: Space) -> Expansion:
    """The entries of a query or key: a turning pair goes to the pair that turns at its speed, new ones are flagged.

    Pair i of r turns at theta^(-2i/r), so it is pair m i of m r; entries that do not turn stay in order.
    """
    if source.rotary and target.rotary % source.rotary:
        raise Refused(
            f"{source.rotary} entries of a head turn in pairs, each at its own speed, and {target.rotary} would turn "
            f"at others: try heads of {multiples_near(source.size, target.size)} entries"
        )
    where = np.arange(source.size)
    if source.rotary:
        turning, factor = where[: source.rotary], target.rotary // source.rotary
        if source.adjacent:
            where[: source.rotary] = turning // 2 * 2 * factor + turning % 2
        else:
            half, pair = np.divmod(turning, max(1, source.rotary // 2))
            where[: source.rotary] = half * (target.rotary // 2) + pair * factor
        where[source.rotary :] += target.rotary - source.rotary
    index = np.full(target.size, ZERO if source.kind == "zero" else RAND)
    index[where] = np.arange(source.size)
    return Expansion(source.size, index, np.ones(target.size))
