"""Expansions that are more than copies and a remainder: experts, grouped heads, padded channels, rotary entries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lemonx.algebra.expansions import Expansion, expansion, multiples_near
from lemonx.algebra.runs import Fill, remainder
from lemonx.errors import Refused


def experts_expansion(
    sizes: tuple[int, int], chosen: tuple[int, int], *, renormalised: bool, biased: bool
) -> Expansion:
    """More experts under a router that picks k of them, without changing the outcome.

    With m copies of every expert, the best m k are the copies of the best k. With k = 1, an expert whose score is the
    mean of all scores is never picked over the best. If scores have a bias, a very low one keeps an expert out. A
    single expert is picked whatever the router says. The last three ways change the sum of all weights, so the weights
    of the experts picked must be normalised to one.
    """
    size, target = sizes
    times, rest = divmod(target, size)
    kept = chosen[1] == chosen[0] and renormalised
    if (not rest and chosen[1] == times * chosen[0]) or (size == 1 and renormalised):
        return expansion("circ", size, target)
    if kept and biased:
        return expansion("fresh", size, target)
    if kept and chosen[0] == 1:
        return Expansion(size, np.append(np.arange(size), np.full(target - size, Fill.AVG)), np.ones(target))
    raise Refused(
        f"the router picks {chosen[0]} of {size} experts per token, and {chosen[1]} of {target} would be others",
        f"try {2 * chosen[0]} of {2 * size}",
    )


def share_of(size: int, number: int, of: int, gain: float = 1.0) -> Expansion:
    """The units of one of several equal parts."""
    share = size // of
    return Expansion(size, np.arange(number * share, (number + 1) * share), np.ones(share), gain)


def grouped_expansion(size: int, target: int, under: Expansion, kind: str) -> Expansion:
    """Query heads under copies of their own key-value head: slots of a group are filled circularly.

    With the kinds zero and rand, all heads have equally many copies, and the remaining slots hold zeros, or anything.
    A unit of `under` with c copies offers c * (target group) slots to its source group, which must all find a place
    there. The group may grow or shrink (grouped to multi-head).
    """
    group, target_group = size // under.size, target // under.target_size
    short = under.copies * target_group < group
    if size % under.size or target % under.target_size or short.any():
        least = under.target_size * max(-(-group // int(under.copies.min())), -(-target // under.target_size))
        raise Refused(
            f"{target} query heads do not fit {under.target_size} key-value heads, as the {group} query heads of "
            "each must stay with it or its copies",
            f"try {least} query heads, or a larger multiple of {under.target_size}, each as wide as before",
        )
    slot = np.arange(target) % target_group + under.copy_number.repeat(target_group) * target_group
    source = under.unit.repeat(target_group) * group + slot % group
    if (fill := remainder(kind)) is not None:
        times = int(under.copies.min()) * target_group // group
        source = np.where(slot < times * group, source, fill)
    heads = Expansion(size, source, np.ones(target))
    if kind != "iso":
        return heads
    return replace(heads, amp=np.sqrt((target // size) / heads.copies[source]))


def padded_expansion(size: int, target: int, inner: Expansion) -> Expansion:
    """Units to which a narrower space is added between zeros: its copies in the middle, copies of the edges around.

    >>> padded_expansion(4, 8, expansion("circ", 2, 4)).unit
    array([0, 3, 1, 2, 1, 2, 0, 3])
    """
    edges, slots = size - inner.size, target - inner.target_size
    if slots < edges or (slots and not edges):
        raise Refused(
            f"{inner.size} channels are padded with {edges} zeros to {size}, and {inner.target_size} would be "
            f"with {max(slots, 0)} to {target}, but every new zero must duplicate an old one",
            "grow both by the same factor, such as --width 2x",
        )
    before = edges // 2
    outside = np.concatenate([np.arange(before), np.arange(before + inner.size, size)])
    filled = np.resize(outside, slots)
    middle = np.where(inner.is_copy, inner.source + before, inner.source)
    return Expansion(size, np.concatenate([filled[: slots // 2], middle, filled[slots // 2 :]]), np.ones(target))


def entries_expansion(
    kind: str, sizes: tuple[int, int], turning: tuple[int, int], *, adjacent: bool = False
) -> Expansion:
    """The entries of a query or key: a turning pair goes to the pair that turns at its speed; others are new.

    Pair i of r turns at theta^(-2i/r), so it is pair m i of m r; entries that do not turn stay in order.
    """
    (size, target), (before, after) = sizes, turning
    if before and after % before:
        raise Refused(
            f"the {before} rotary entries of a head turn in pairs, each at its own speed, and {after} would turn "
            "at other speeds",
            f"try heads of {multiples_near(size, target)} entries",
        )
    where = np.arange(size)
    if before:
        turned, factor = where[:before], after // before
        if adjacent:
            where[:before] = turned // 2 * 2 * factor + turned % 2
        else:
            half, pair = np.divmod(turned, max(1, before // 2))
            where[:before] = half * (after // 2) + pair * factor
        where[before:] += after - before
    index = np.full(target, Fill.ZERO if kind == "zero" else Fill.RAND)
    index[where] = np.arange(size)
    return Expansion(size, index, np.ones(target))
