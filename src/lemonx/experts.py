"""Experts under a router: how there can be more of them, or smaller ones, without changing what is computed."""

from __future__ import annotations

import numpy as np

from lemonx.errors import BadTarget, Refused
from lemonx.spaces import Space
from lemonx.vectors import AVG, Expansion, expansion


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
