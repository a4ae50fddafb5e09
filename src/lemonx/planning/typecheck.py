"""The type check: which expansion every space gets, and a refusal where a module cannot follow.

An operator states what it reads and writes; consecutive operators are lossless together if the types agree
(the paper's appendix B.4.3). It runs on specs alone, before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lemonx.algebra.expansions import (
    DENSE,
    RAND,
    SPARE,
    ZERO,
    Expansion,
    concat,
    expansion,
    identity,
    multiples_near,
    product,
)
from lemonx.algebra.norm_chains import Chain, require_small
from lemonx.errors import BadCheckpoint, BadTarget, Refused
from lemonx.frames import placement
from lemonx.frames.placement import FramePlacement
from lemonx.planning import depth
from lemonx.specs.config import TIED
from lemonx.specs.norms import Norm
from lemonx.specs.rows import Row
from lemonx.specs.signature import Side
from lemonx.specs.space_expansions import (
    attention_expansion,
    experts_expansion,
    grouped_expansion,
    padded_expansion,
    part,
    parts,
)
from lemonx.specs.spec import LAST, Spec, Stack
from lemonx.specs.weights import Linear


@dataclass(frozen=True)
class Types:
    """The expansion of every space, and the eps that the target's norms need (config field -> value).

    `exact`: every row was proved to follow. `framed`: the streams that frames carry.
    """

    source: Spec
    spaces: Mapping[str, Expansion]
    eps: Mapping[str, float]
    exact: bool = True
    framed: tuple[FramePlacement, ...] = ()
    # The norms in a row that added Post-LN blocks make: what is exact up to eps.
    chains: Mapping[tuple[str, int], tuple[Chain, ...]] = field(default_factory=dict)
    # One object per side, however many blocks there are: a plan holds a reference, not an array, per tensor.
    _known: dict[tuple[Side, int | None], Expansion] = field(default_factory=dict, compare=False, repr=False)

    def of(self, side: Side, size: int | None = None) -> Expansion:
        """The expansion of a side; `size` stands in for an axis `_`."""
        key = side, size if "_" in side.axes else None
        if key not in self._known:
            parts = [product(*(self._axis(name, size) for name in part)) for part in side.parts]
            self._known[key] = concat(*parts, by=self.spaces[side.by] if side.by else None)
        return self._known[key]

    def _axis(self, name: str, size: int | None) -> Expansion:
        if name in self.spaces:
            return self.spaces[name]
        return identity(self.source.axis_size(name) or size or 1)


def with_tied(spec: Spec, rows: Collection[str]) -> list[str]:
    """These rows, and those without a tensor: tied decoders of what they write, norms without parameters."""
    bare = {name for name, row in spec.rows.items() if not row.tensors()}
    written = {spec.rows[name].writes for name in {*rows, *bare}}
    tied = {n for n, row in spec.rows.items() if isinstance(row, Linear) and row.tied and row.reads in written}
    return sorted({*rows, *bare, *tied})


def check(
    source: Spec, target: Spec, rows: Collection[str], config: Mapping[str, Any], *, small_gains: bool = False
) -> Types:
    """The types under which every row in `rows` is lossless; raises BadTarget or Refused if there are none.

    Copies, means and zeros first; frames where these cannot follow. What is lost to eps must be little.
    """
    _check_sizes(source, target)
    depth.check_added(source, target)
    types = _found(source, target, rows, config)
    chains = depth.chains(source, target, config, small_gains)
    if small_gains:
        _check_gains(source, chains)
        if types.framed:
            widths = multiples_near(types.framed[0].size, types.framed[0].target)
            raise Refused(
                "a frame would multiply the gradient that small gains make large already: leave --small-gains out, or "
                f"choose a multiple of the width: {widths}"
            )
    require_small(chain for uses in chains.values() for chain in uses)
    return replace(types, chains=chains)


def _check_gains(source: Spec, chains: Mapping[tuple[str, int], tuple[Chain, ...]]) -> None:
    """Small gains need norms that follow one another, and gains to be small."""
    if not chains:
        raise BadTarget("--small-gains is for blocks added to a Post-LN stack, and none are here: leave it out")
    for stack, _ in chains:
        for name in depth.stream_norms(source, stack):
            if not source.rows[name].tensors():
                raise Refused(f"{name} has no gains that could be small: leave --small-gains out")


def _found(source: Spec, target: Spec, rows: Collection[str], config: Mapping[str, Any]) -> Types:
    """The types, without what depends on depth."""
    try:
        return _checked(source, target, rows, config, ())
    except Refused:
        framed = placement.find(source, target, rows, _refusing(source, target, rows))
        if not framed:
            raise
        for stream in framed:
            _check_last(source, stream)
    return _checked(source, target, rows, config, framed)


def _check_last(source: Spec, framed: FramePlacement) -> None:
    for name, row in source.rows.items():
        if row.is_norm and name.startswith(f"{framed.stack}.{LAST}."):
            raise Refused(
                f"{name}: a norm that only the last block has cannot feed a frame: try "
                f"{multiples_near(framed.size, framed.target)}, or give --set {TIED}=false alone, and widen the result"
            )


def _checked(
    source: Spec, target: Spec, rows: Collection[str], config: Mapping[str, Any], framed: tuple[FramePlacement, ...]
) -> Types:
    carried = {name for stream in framed for name in (*stream.norms, *stream.angles)}
    spaces = _expansions(source, target)
    for stream in framed:
        spaces |= stream.expansions(target)
    norms = {name: row for name in rows if isinstance(row := source.rows[name], Norm)}
    spaces, eps = _with_gains(source, norms, Types(source, spaces, {}), config, carried)
    _follow(source, target, rows, spaces)
    types = Types(source, spaces, eps, framed=framed)
    for name in rows:
        row = source.rows[name]
        if name in carried:
            continue
        try:
            row.require(types.of(row.reads), types.of(row.writes))
        except Refused as refusal:
            raise Refused(f"{name}: {refusal}") from None
    _check_units(source, rows, types)
    _check_shown(source, spaces)
    _check_tied(source, target, rows, spaces)
    for stream in framed:
        placement.require_untied(stream, target, rows)
    return types


def _refusing(source: Spec, target: Spec, rows: Collection[str]) -> list[str]:
    """The rows that cannot follow copies, means and zeros."""
    spaces = _expansions(source, target)
    _follow(source, target, rows, spaces)
    types, result = Types(source, spaces, {}), []
    for name in rows:
        row = source.rows[name]
        try:
            row.require(types.of(row.reads), types.of(row.writes))
        except Refused:
            result.append(name)
    return result


def unchecked(source: Spec, target: Spec, rows: Collection[str], kinds: Mapping[str, str]) -> Types:
    """Types for a method that is not lossless: every space expands by `kinds`, and nothing is proved."""
    _check_sizes(source, target)
    spaces = _expansions(source, target, kinds)
    _follow(source, target, rows, spaces)
    return Types(source, spaces, {}, exact=False)


def _follow(source: Spec, target: Spec, rows: Collection[str], spaces: dict[str, Expansion]) -> None:
    """What is like another space takes its expansion, and what a tied decoder reads the dual of the embedding's.

    logits = embedding . final: the final space is paired with the one the embedding writes.
    """
    for name, space in source.spaces.items():
        if space.like:
            spaces[name] = spaces[space.like].with_gain(spaces[space.like].gain * _rescale(name, source, target))
    for name in rows:
        row = source.rows[name]
        if isinstance(row, Linear) and row.tied and is_tied(target, name):
            final, embedded = row.reads.axes[0], source.rows[row.tied].writes.axes[0]
            # The checks say so, if nothing else is in the way.
            if spaces[embedded].has(DENSE) or final == embedded:
                continue
            spaces[final] = spaces[embedded].dual().with_gain(_rescale(final, source, target))


def _check_tied(source: Spec, target: Spec, rows: Collection[str], spaces: Mapping[str, Expansion]) -> None:
    """A decoder that reads the very stream that its own weight wrote needs the stream to be its own dual."""
    for name in rows:
        row = source.rows[name]
        if isinstance(row, Linear) and row.tied and is_tied(target, name):
            stream = row.reads.axes[0]
            grown = spaces[stream]
            if stream in source.rows[row.tied].writes.axes and not grown.is_identity:
                raise Refused(
                    f"{name}: the output head is tied to the embedding, and no norm can absorb the rescaling of "
                    f"{stream} from {grown.size} to {grown.target_size}: untie it with --set {TIED}=false"
                )


def _check_shown(source: Spec, spaces: Mapping[str, Expansion]) -> None:
    for grown, name in ((spaces[name], name) for name in source.shown):
        if grown.gain != 1.0:
            raise Refused(
                f"{name} leaves the model as it is, and at {grown.size} -> {grown.target_size} it would be "
                f"{grown.gain:.4g} times what it was: try {multiples_near(grown.size, grown.target_size)}"
            )


def is_tied(target: Spec, name: str) -> bool:
    """Whether a decoder that was the embedding still is: what is untied is written on its own."""
    return getattr(target.rows[name], "tied", None) is not None


def _rescale(name: str, source: Spec, target: Spec) -> float:
    """What undoes the change of the factor that a space is multiplied by."""
    return source.spaces[name].scale / target.spaces[name].scale


def _kinds(spec: Spec) -> dict[str, Row]:
    """Rows by their names, whether or not a block has a row of its own."""
    kinds = dict(spec.rows)
    for stack in spec.stacks:
        for own in ("0", LAST):
            kinds = {name.replace(f"{stack}.{own}.", f"{stack}.*."): row for name, row in kinds.items()}
    return kinds


class Rewired(Refused):
    """At other sizes a module would come or go: a shortcut that only changes of width have, a projection."""


def require_same_rows(source: Spec, target: Spec) -> None:
    """Rewired, unless the sizes leave the model with the modules, spaces and stacks that it had."""
    before, after = _kinds(source), _kinds(target)
    if not (odd := sorted(before.keys() ^ after.keys())):
        _check_names(source, target)
        return
    gained = odd[0] in after
    spec, row = (target, after[odd[0]]) if gained else (source, before[odd[0]])
    sizes = " to ".join(f"{side} ({spec.side_size(side) or 'any'})" for side in (row.reads, row.writes))
    raise Rewired(
        f"at these sizes the model would {'gain' if gained else 'lose'} {odd[0]}, which leads from {sizes}: choose "
        f"sizes at which these are {'equal, as they were' if gained else 'not equal'}"
    )


def _check_names(source: Spec, target: Spec) -> None:
    for name in sorted((source.spaces.keys() ^ target.spaces.keys()) | (source.stacks.keys() ^ target.stacks.keys())):
        kind = "stack" if name in {*source.stacks, *target.stacks} else "space"
        change = "lose" if name in {*source.spaces, *source.stacks} else "gain"
        raise Rewired(
            f"at these sizes the model would {change} the {kind} {name}, which no module stands for: choose sizes that "
            "are equal where they were, and not equal where they were not"
        )


def _check_sizes(source: Spec, target: Spec) -> None:
    require_same_rows(source, target)
    for name, size in source.fixed.items():
        if target.fixed[name] != size:
            why = source.still.get(name, "it cannot grow losslessly here")
            raise Refused(
                f"{name} would change from {size} to {target.fixed[name]}, and {why}: "
                f"choose sizes that keep it at {size}"
            )
    for name, space in source.spaces.items():
        if target.spaces[name].size < space.size and split_into(source, target, name) == 1:
            raise BadTarget(
                f"{name} would shrink from {space.size} to {target.spaces[name].size}: only growth is possible"
            )
    for name, stack in source.stacks.items():
        if target.stacks[name].size < stack.size:
            raise BadTarget(
                f"{name} would lose blocks, {stack.size} to {target.stacks[name].size}: only growth is possible"
            )
        _check_sets(name, stack, target.stacks[name])


def _check_sets(name: str, source: Stack, target: Stack) -> None:
    """Blocks go on sharing their weights as they did, or every one gets its own."""
    same = (target.size, target.stored) == (source.size, source.stored)
    if target.stored > target.size and not same:
        raise BadTarget(
            f"{source.sets_in}={target.stored} makes more sets of weights than {name} has blocks, {target.size}: give "
            f"--depth {target.stored} too"
        )
    if target.stored != target.size and not same:
        raise Refused(
            f"blocks in {name} share their weights, so that an added one could not be silent alone: give each its "
            f"own, with --set {source.sets_in}={target.size}"
        )


def split_into(source: Spec, target: Spec, name: str) -> int:
    """How many experts share the units of one, in the space `name` that every expert has."""
    over = source.spaces[name].within
    between = (source.spaces[over], target.spaces[over]) if over else None
    return parts(source.spaces[name], target.spaces[name], between)


def _expansions(source: Spec, target: Spec, kinds: Mapping[str, str] | None = None) -> dict[str, Expansion]:
    result: dict[str, Expansion] = {}
    kinds = kinds or {}
    # Grouped spaces stand on others: those first. A padded one stands behind what it is padded from.
    for name, space in sorted(source.spaces.items(), key=lambda item: item[1].under is not None):
        size, kind = target.spaces[name].size, kinds.get(space.kind, space.kind)
        try:
            if space.still and size != space.size:
                raise Refused(f"{space.still}: keep it at {space.size}")
            if space.under:
                grown = grouped_expansion(space.size, size, result[space.under], kind)
            elif space.padded:
                grown = padded_expansion(space.size, size, result[space.padded])
            elif (times := split_into(source, target, name)) > 1:
                grown = part(space.size, 0, times)
            elif space.chosen:
                grown = experts_expansion(name, space, target.spaces[name])
            elif space.linear and not space.like:
                grown = attention_expansion(space, target.spaces[name])
            else:
                grown = expansion(kind, space.size, size)
        except Refused as refusal:
            raise Refused(f"{name}: {refusal}") from None
        result[name] = grown.with_gain(_rescale(name, source, target))
    return result


def _with_gains(
    source: Spec, norms: Mapping[str, Norm], types: Types, config: Mapping[str, Any], carried: Collection[str]
) -> tuple[dict[str, Expansion], dict[str, float]]:
    """Keep (variance + eps) in proportion: eps* = (gain eta)^2 eps.

    Where all norms behind one config field shrink alike, the field takes eta^2 (the paper's way) and every
    gain is 1. Where they differ, or a norm's eps is fixed in code, the space it reads takes gain 1/eta; but if one
    of them reads what a nonlinearity wrote, which can take no gain, the field is its, and the others take what is left.
    Norms of a frame (`carried`) find mean and variance as they were, so their field stays.
    """
    eta = {}
    for name, row in norms.items():
        try:
            eta[name] = 1.0 if name in carried else row.eta(types.of(row.reads))
        except Refused as refusal:
            raise Refused(f"{name}: {refusal}") from None
    spaces, eps, shared = dict(types.spaces), dict[str, float](), dict[str, float]()
    stiff = {name: eta[name] for name, row in norms.items() if not {*row.reads.axes}.isdisjoint(source.acts)}
    fields = {name: source.eps if row.eps is None else row.eps for name, row in norms.items()}
    fixed = {norms[name].reads for name, where in fields.items() if not isinstance(where, str)}
    known = sorted({f for f in fields.values() if isinstance(f, str)})
    for where in known * len(known):  # a gain that one field needs may decide another: once more for each
        behind = [name for name, other in fields.items() if other == where]
        values = {eta[name] for name in behind}
        if not isinstance(config[where], float | int) or not config[where] >= 0:
            raise BadCheckpoint(f"config.json: {where} is {config[where]!r}, not a number: save the model again")
        bound = any(norms[name].reads in fixed or name in carried for name in behind)
        if len(values) == 1 and not bound:
            eps[where] = config[where] * values.pop() ** 2
        elif len(own := {stiff[name] for name in behind if name in stiff}) == 1 and not bound:
            shared[where] = own.pop()
            eps[where] = config[where] * shared[where] ** 2
        else:
            eps.pop(where, None)
            shared.pop(where, None)
            fixed |= {norms[name].reads for name in behind}
    for name, row in norms.items():
        level = 1.0 if row.reads in fixed else shared.get(str(fields[name]), eta[name])
        if eta[name] != level:
            axis = next(axis for axis in row.reads.axes if axis in spaces)
            spaces[axis] = types.spaces[axis].with_gain(level / eta[name])
        if not row.affine:
            axis = row.writes.axes[0]
            spaces[axis] = types.spaces[axis].with_gain(1.0 / eta[name])
    return spaces, {where: value for where, value in eps.items() if value != config[where]}


def _check_units(source: Spec, rows: Collection[str], types: Types) -> None:
    """A nonlinearity maps copies to copies and nothing else: no means, no amplitudes, no gains.

    Nobody reads a fresh unit, so it may be anything; zero may stay zero.
    """
    present = [source.rows[name] for name in rows]
    normed = {axis for row in present if row.is_strict for axis in row.touches}
    used = {axis for row in present for axis in row.touches}
    for name in sorted(used & set(types.spaces)):
        units = types.spaces[name]
        linear = source.spaces[name].linear or source.spaces[name].chosen  # a router picks units, by their scores
        passes = (name not in normed and not linear) or name in source.acts
        copied = units.is_copy | units.holds(RAND, SPARE)
        copied |= source.spaces[name].calm & units.holds(ZERO)
        if passes and not (units.is_plain and copied.all()):
            near = multiples_near(units.size, units.target_size)
            raise Refused(
                f"cannot widen {name} from {units.size} to {units.target_size}, as its units pass through a "
                f"nonlinearity, so every new unit must duplicate an old one: try {near}"
            )
