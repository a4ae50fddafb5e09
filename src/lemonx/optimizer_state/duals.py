"""How backward signals expand: the dual of every space.

An activation x becomes x* = E x. If the expansion is lossless for every x, the chain rule says of the backward
signals d = dL/dx and d* = dL/dx* that E^T d* = d, whatever the free parameters are. How d* is shared among the
copies of a unit depends on the modules that read them:

    linear     W* = E_out W R + noise, so d* = R^T d + noise: a copy gets its share of the fan-out
    tied       logits = (E_e e) . x*, so d* = E_e d: the embedding's own expansion, an even split
    norm       its Jacobian mixes units; d* = D d only where every copy has its part of the unit's energy, which
               an even split gives; a LayerNorm that reads means also spreads the mean of its own signal, which d
               does not hold
    BatchNorm  per channel, as scales and depthwise convolutions: whatever its output has
    attention  a key-value head gets the sum of its query heads

So d* = D d with D[t] = share[t] / (amp[t] gain), where noise, uneven splits in front of a norm, and means allow.

Where each row keeps the weight of its own copy (`rest: own`), a copy gets the signals of the rows with its number. So
its share is that of these rows, and theirs that of what they write: shares pass through the network from its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.free_parameters import Free
from lemonx.optimizer_state.along import Along, of_copies, reads
from lemonx.planning.plan import Plan
from lemonx.specs.norms import LayerNorm, Norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Grouped
from lemonx.specs.weights import Linear

NOISE = "the copies of a unit are told apart by noise, which the source's gradients do not know"
ZETA = "new coordinates that hold zeros are read with random weights"
UNEVEN = "a norm mixes the backward signals of copies that are read unevenly"
MEAN = "a LayerNorm that reads means spreads the mean of its backward signal over them, which the source projects out"
GROUPS = "query heads of one key-value head are divided among its copies"
UNREAD = "nothing in the checkpoint reads it: what a loss makes of its copies is not known"
LOSSY = "the method is not lossless"
# Shares are sums of a few fractions: what differs by less is rounding.
TINY = 1e-12


@dataclass(frozen=True)
class Dual:
    """The map of a space's backward signals; `units` and `rest`: why it is not exact on copies and elsewhere."""

    share: NDArray[np.float64]
    along: Along
    units: frozenset[str] = frozenset()
    rest: frozenset[str] = frozenset()


# A stream hands its shares to itself, and half of what is not yet settled goes in each round: more than float64 holds.
ROUNDS = 64


def duals(plan: Plan) -> dict[str, Dual]:
    """The dual of every space of a plan."""
    spaces = plan.types.spaces
    shares: dict[str, tuple[NDArray[np.float64], Expansion | None]]
    shares = {name: (_even(units), None) for name, units in spaces.items()}
    for _ in range(ROUNDS if plan.free.is_own else 1):
        written = {name: share for name, (share, _) in shares.items()}
        shares = {name: _share(plan, name, frozenset({name}), written) for name in spaces}
    found = {name: Dual(share, _along(spaces[name], share, tied)) for name, (share, tied) in shares.items()}
    # Reasons pass from a norm's output to its input: through all spaces in as many rounds as there are.
    for _ in spaces:
        found = {name: _with_reasons(plan, name, found) for name in found}
    return found


def untied(plan: Plan, row: Row) -> bool:
    """Whether a row has a weight of its own in the target, and another's in the source."""
    names = (name for name in plan.rows if plan.source_spec.rows[name] is row)
    tied = getattr(row, "tied", None) is not None
    return tied and any(getattr(plan.target_spec.rows[name], "tied", None) is None for name in names)


def framed(plan: Plan) -> set[str]:
    """The spaces that frames carry, and those with neurons that pass one frame into the next."""
    if plan.frames is None:
        return set()
    streams = plan.frames.streams
    carried = {name for stream in streams for name in stream.placement.spaces}
    return carried | {name for name, units in plan.types.spaces.items() if units.is_spare.any() or units.is_dense}


def _readers(plan: Plan, space: str) -> list[Row]:
    rows = (plan.source_spec.rows[name] for name in plan.rows)
    return [row for row in rows if space in row.reads.axes]


# The shares of every space as far as they are known.
Shares = Mapping[str, NDArray[np.float64]]


def _share(
    plan: Plan, space: str, asked: frozenset[str], written: Shares
) -> tuple[NDArray[np.float64], Expansion | None]:
    """Each copy's share of its unit's backward signal, and the embedding that reads the space, if any."""
    units, readers = plan.types.spaces[space], _readers(plan, space)
    linear = [row for row in readers if isinstance(row, Linear)]
    if own := [row for row in linear if row.tied is None or untied(plan, row)]:
        if not plan.free.is_own:
            return split(units, plan.free, np.ones(1)), None
        return np.mean([split(units, plan.free, _by_number(plan, row, written)) for row in own], axis=0), None
    if linear:
        embedding = plan.source_spec.rows[linear[0].tied or ""].writes.axes[0]
        return _even(units), plan.types.spaces[embedding]
    # A norm keeps units in place, so its input has the shares of its output. Where several norms read a stream and
    # disagree (the last one in front of a tied decoder), none is right for all of it: their mean errs least.
    norms = [row for row in readers if row.in_place]
    others = sorted({_counterpart(row, space) for row in norms} & plan.types.spaces.keys() - asked)
    if others:
        return np.mean([_share(plan, other, asked | {other}, written)[0] for other in others], axis=0), None
    if (queries := _queries(plan, space)) is not None:
        return _served(plan, space, queries, _share(plan, queries, frozenset({queries}), written)[0]).mean(1), None
    return _even(units), None


def _queries(plan: Plan, space: str) -> str | None:
    """The space of query heads that belong to these key-value heads."""
    spaces = plan.source_spec.spaces.items()
    return next((name for name, other in spaces if isinstance(other, Grouped) and other.under == space), None)


def _by_number(plan: Plan, row: Row, written: Shares) -> NDArray[np.float64]:
    """The share of its backward signal that a row's first, second, ... copies of outputs get, in the mean over units.

    All of it is the first copies', where outputs are not copied.
    """
    name = next((axis for axis in row.writes.axes if axis in written), None)
    if name is None:
        return np.ones(1)
    units = plan.types.spaces[name]
    return np.bincount(units.copy_number, weights=np.where(units.is_copy, written[name], 0.0)) / units.size


def _served(plan: Plan, space: str, queries: str, share: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each target head and each query head of its source group, the share of that query head that it serves."""
    heads, keys = plan.types.spaces[queries], plan.types.spaces[space]
    group, target_group = heads.size // keys.size, heads.target_size // keys.target_size
    served = np.zeros((keys.target_size, group))
    slots = np.arange(heads.target_size) // target_group, heads.unit % group
    np.add.at(served, slots, share)
    return served


def _with_reasons(plan: Plan, space: str, found: dict[str, Dual]) -> Dual:
    """The dual with the reasons why it is not exact, on copies and on other coordinates."""
    units, readers = plan.types.spaces[space], _readers(plan, space)
    on_units, on_rest = set[str](), set[str]()
    for row in readers:
        if isinstance(row, Linear) and (row.tied is None or untied(plan, row)):
            on_units |= {NOISE} if plan.free.phi and units.copies.max() > 1 else set()
            on_rest |= {ZETA} if plan.free.zeta and units.is_zero.any() else set()
        elif row.in_place and (written := found.get(_counterpart(row, space))):
            on_units |= written.units | _mixed(row, units, written)
            on_rest |= written.rest | ({MEAN} if isinstance(row, LayerNorm) else set())
    # What leaves a space as it is (a convolution before attention) says nothing of who reads it then.
    kept = all(row.in_place and _counterpart(row, space) == space for row in readers)
    if kept and (queries := _queries(plan, space)) is not None:
        uneven = np.ptp(_served(plan, space, queries, found[queries].share), axis=1).max() > TINY
        on_units |= found[queries].units | ({GROUPS} if uneven else set())
    elif not readers and not units.is_identity:
        on_units.add(UNREAD)
    rest = frozenset(on_rest) if not units.is_copy.all() else frozenset[str]()
    return replace(found[space], units=frozenset(on_units), rest=rest)


def _mixed(row: Row, units: Expansion, written: Dual) -> set[str]:
    """Why a norm's Jacobian does not keep the signals of copies in proportion."""
    if not isinstance(row, Norm):
        return set()
    uneven = not np.allclose(written.share, _energy(units), rtol=0, atol=TINY)
    means = isinstance(row, LayerNorm) and units.is_mean.any()
    return ({UNEVEN} if uneven else set()) | ({MEAN} if means else set())


def split(units: Expansion, free: Free, by_number: NDArray[np.float64]) -> NDArray[np.float64]:
    """The shares of the weight that reads each copy: those of `free`; in rows numbered i, copy i takes the rest."""
    count = np.maximum(units.copies[units.unit], 1)
    further = np.array([free.share(int(k)) for k in count])
    share = np.zeros(units.target_size)
    for number, part in enumerate(by_number):
        keeps = units.copy_number == number % count
        share += part * np.where(keeps, 1.0 - (count - 1) * further, further)
    return np.where(units.is_copy, share, 0.0)


def _even(units: Expansion) -> NDArray[np.float64]:
    return np.where(units.is_copy, 1.0 / np.maximum(units.copies[units.unit], 1), 0.0)


def _energy(units: Expansion) -> NDArray[np.float64]:
    """Each copy's part of its unit's energy: the split under which a norm's Jacobian keeps copies in proportion."""
    energy = units.energy[units.unit]
    return np.where(units.is_copy, units.amp**2 / np.where(energy > 0, energy, 1.0), 0.0)


def _along(units: Expansion, share: NDArray[np.float64], embedding: Expansion | None) -> Along:
    if embedding is not None:
        return reads(embedding)
    return of_copies(units, share / (units.amp * units.gain))


def _counterpart(row: Row, space: str) -> str:
    """The space that a norm writes where it reads `space`: fused axes stand in the same order on both sides."""
    return row.writes.axes[row.reads.axes.index(space)]
