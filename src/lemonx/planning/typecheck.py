"""The type check: which expansion every space gets, and a refusal where a module cannot follow.

An operator states what it reads and writes; consecutive operators are lossless together if the types agree
(the paper's appendix B.4.3). It runs on specs alone, before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lemonx.algebra.expansions import Expansion, concat, identity, multiples_near, product
from lemonx.algebra.norm_chains import Chain, require_small
from lemonx.errors import BadTarget, Refused
from lemonx.frames import placement
from lemonx.frames.placement import FramePlacement
from lemonx.planning import depth
from lemonx.planning.norm_eps import keep_eps
from lemonx.specs.config import TIED
from lemonx.specs.norms import Norm
from lemonx.specs.rows import Row
from lemonx.specs.signature import Side, side
from lemonx.specs.spaces import Grouped, Growth
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
            self._known[key] = concat(*parts, by=self.by(side))
        return self._known[key]

    def by(self, side: Side) -> Expansion:
        """The expansion of the slices that the parts of a side lie in, if they alternate; else of one."""
        return product(*(self._axis(name, None) for name in side.by)) if side.by else identity(1)

    def _axis(self, name: str, size: int | None) -> Expansion:
        if name in self.spaces:
            return self.spaces[name]
        return identity(self.source.axis_size(name) or size or 1)


def with_tied(spec: Spec, rows: Collection[str]) -> list[str]:
    """These rows, and those without a tensor: tied decoders of what they write, norms without parameters."""
    bare = {name for name, row in spec.rows.items() if not row.tensors()}
    written = {spec.rows[name].writes for name in {*rows, *bare}}
    made = (spec.spaces.get(axis) for one in written for axis in one.axes)  # by a number, of what is written
    written |= {side(space.like) for space in made if space is not None and space.like}
    tied = {n for n, row in spec.rows.items() if isinstance(row, Linear) and row.tied and row.reads in written}
    return sorted({*rows, *bare, *tied})


def check(
    source: Spec, target: Spec, rows: Collection[str], config: Mapping[str, Any], *, share: float | None = None
) -> Types:
    """The types under which every row in `rows` is lossless; raises BadTarget or Refused if there are none.

    Copies, means and zeros first; frames where these cannot follow. What is lost to eps must be little. `share`: of
    small gains (algebra/norm_chains.py), if they are asked for.
    """
    _check_sizes(source, target)
    depth.check_added(source, target)
    types = _found(source, target, rows, config)
    chains = depth.chains(source, target, config, share)
    if share is not None:
        _check_gains(source, chains)
        if types.framed:
            widths = multiples_near(types.framed[0].size, types.framed[0].target)
            raise Refused(
                "small gains enlarge gradients, and the change of basis that this width needs would multiply them "
                "further",
                f"leave small_gains out, or choose a multiple of the width, {widths}",
            )
    require_small(chain for uses in chains.values() for chain in uses)
    return replace(types, chains=chains)


def _check_gains(source: Spec, chains: Mapping[tuple[str, int], tuple[Chain, ...]]) -> None:
    """Small gains need norms that follow one another, and gains to be small."""
    if not chains:
        raise BadTarget("small_gains is for layers added to a Post-LN model, and none are added here", "leave it out")
    for stack, _ in chains:
        for name in depth.stream_norms(source, stack):
            if not source.rows[name].tensors():
                raise Refused(f"{name} has no weights that could be made small", "leave small_gains out")


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
                f"{name} is a norm that only the last layer has, so it cannot take part in the change of basis that "
                "this width needs",
                f"try {multiples_near(framed.size, framed.target)}, or first expand with --set {TIED}=false alone and "
                "then widen the result",
            )


def _checked(
    source: Spec, target: Spec, rows: Collection[str], config: Mapping[str, Any], framed: tuple[FramePlacement, ...]
) -> Types:
    carried = {name for stream in framed for name in (*stream.norms, *stream.angles)}
    spaces = _expansions(source, target)
    for stream in framed:
        spaces |= stream.expansions(target)
    norms = {name: row for name in rows if isinstance(row := source.rows[name], Norm)}
    eta = _shrinkage(norms, Types(source, spaces, {}), carried)
    spaces, eps = keep_eps(source, norms, eta, spaces, config, carried)
    _follow(source, target, rows, spaces)
    types = Types(source, spaces, eps, framed=framed)
    for name in rows:
        row = source.rows[name]
        if name in carried:
            continue
        try:
            row.require(types.of(row.reads), types.of(row.writes))
        except Refused as refusal:
            raise refusal.about(name) from None
    _check_units(source, rows, types)
    _check_shown(source, target, spaces)
    _check_tied(source, target, rows, spaces)
    for stream in framed:
        stream.require_untied(target, rows)
    return types


def _shrinkage(norms: Mapping[str, Norm], types: Types, carried: Collection[str]) -> dict[str, float]:
    """By what factor the input of every norm shrinks; that of a frame does not."""
    eta = dict[str, float]()
    for name, row in norms.items():
        try:
            eta[name] = 1.0 if name in carried else row.eta(types.of(row.reads))
        except Refused as refusal:
            raise refusal.about(name) from None
    return eta


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
    """Give a space that is `like` another its expansion, and what a tied decoder reads the dual of the embedding's.

    logits = embedding . final: the final space is paired with the one the embedding writes.
    """
    like = {name: space.like for name, space in source.spaces.items() if space.like}

    def imitate(*names: str) -> None:
        for name in names:
            one = spaces[like[name]]
            spaces[name] = one.with_gain(one.gain * _rescale(name, source, target))

    imitate(*like)
    for name in rows:
        row = source.rows[name]
        if isinstance(row, Linear) and row.tied and is_tied(target, name):
            final, embedded = row.reads.axes[0], source.rows[row.tied].writes.axes[0]
            # The checks say so, if nothing else is in the way.
            if spaces[embedded].is_dense or final == embedded:
                continue
            spaces[final] = spaces[embedded].dual().with_gain(_rescale(final, source, target))
            imitate(*(other for other, one in like.items() if one == final))


def _check_tied(source: Spec, target: Spec, rows: Collection[str], spaces: Mapping[str, Expansion]) -> None:
    """A decoder that reads the very stream that its own weight wrote needs the stream to be its own dual."""
    for name in rows:
        row = source.rows[name]
        if isinstance(row, Linear) and row.tied and is_tied(target, name):
            stream = row.reads.axes[0]
            grown = spaces[stream]
            if stream in source.rows[row.tied].writes.axes and not grown.is_identity:
                raise Refused(
                    f"{name}: the output head is tied to the embedding, and no norm can absorb the rescaling from "
                    f"{grown.size} to {grown.target_size}",
                    f"untie it with --set {TIED}=false",
                )


def _check_shown(source: Spec, target: Spec, spaces: Mapping[str, Expansion]) -> None:
    for grown, name in ((spaces[name], name) for name in source.shown):
        scales = grown.amp[grown.is_copy] * grown.gain
        if (scales != 1.0).any():
            tied = any(
                is_tied(target, row) and name in source.rows[row].reads.axes
                for row in target.rows.keys() & source.rows.keys()
            )
            raise Refused(
                f"the model outputs {name} itself, which from {grown.size} to {grown.target_size} would be scaled by "
                f"{scales[scales != 1.0][0]:.4g}",
                f"untie the decoder that reads it with --set {TIED}=false"
                if tied
                else f"try {multiples_near(grown.size, grown.target_size)}",
            )


def is_tied(target: Spec, name: str) -> bool:
    """Whether a decoder that was tied to the embedding still is; an untied one has a tensor of its own."""
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
        f"at these sizes the model would {('gain' if gained else 'lose')} the module {odd[0]}, which leads "
        f"from {sizes}",
        f"choose sizes at which these are {('equal, as they were' if gained else 'not equal')}",
    )


def _check_names(source: Spec, target: Spec) -> None:
    for name in sorted((source.spaces.keys() ^ target.spaces.keys()) | (source.stacks.keys() ^ target.stacks.keys())):
        change = "lose" if name in {*source.spaces, *source.stacks} else "gain"
        raise Rewired(
            f"at these sizes the model would {change} {name}, so it would be built differently",
            "choose sizes that are equal where they were, and not equal where they were not",
        )


def _check_sizes(source: Spec, target: Spec) -> None:
    require_same_rows(source, target)
    for name, size in source.fixed.items():
        if target.fixed[name] != size:
            why = source.still.get(name, "it cannot grow losslessly here")
            raise Refused(
                f"{name} would change from {size} to {target.fixed[name]}, and {why}",
                f"choose sizes that keep it at {size}",
            )
    for name, space in source.spaces.items():
        if target.spaces[name].size < space.size and split_into(source, target, name) == 1:
            raise BadTarget(
                f"{name} would shrink from {space.size} to {target.spaces[name].size}",
                f"lemonx only grows models, so choose at least {space.size}",
            )
    for name, stack in source.stacks.items():
        if target.stacks[name].size < stack.size:
            raise BadTarget(
                f"{name} would lose layers, from {stack.size} to {target.stacks[name].size}",
                f"lemonx only grows models, so choose at least {stack.size}",
            )
        _check_sets(name, stack, target.stacks[name])


def _check_sets(name: str, source: Stack, target: Stack) -> None:
    """Blocks go on sharing their weights as they did, or every one gets its own."""
    same = (target.size, target.stored) == (source.size, source.stored)
    if target.stored > target.size and not same:
        raise BadTarget(
            f"{source.sets_in}={target.stored} asks for more sets of weights than {name} has layers, {target.size}",
            f"give --depth {target.stored} too",
        )
    if target.stored != target.size and not same:
        raise Refused(
            f"layers in {name} share their weights, so an added layer cannot start as the identity",
            f"give each layer its own weights with --set {source.sets_in}={target.size}",
        )


def split_into(source: Spec, target: Spec, name: str) -> int:
    """How many experts share the units of one, in the space `name` that every expert has."""
    return source.spaces[name].parts(target.spaces[name], Growth(source.spaces, target.spaces))


def _expansions(source: Spec, target: Spec, kinds: Mapping[str, str] | None = None) -> dict[str, Expansion]:
    result: dict[str, Expansion] = {}
    growth = Growth(source.spaces, target.spaces, result, kinds or {})
    # Grouped spaces ask for the one they are under: those last. A padded one comes behind its inner one as it is.
    for name, space in sorted(source.spaces.items(), key=lambda item: isinstance(item[1], Grouped)):
        try:
            grown = space.expand_to(target.spaces[name], growth)
        except Refused as refusal:
            raise refusal.about(name) from None
        result[name] = grown.with_gain(_rescale(name, source, target))
    return result


def _check_units(source: Spec, rows: Collection[str], types: Types) -> None:
    """Raise Refused if a nonlinearity sees units that it does not take to the same expansion of its outputs."""
    present = [source.rows[name] for name in rows]
    normed = {axis for row in present if row.is_strict for axis in row.touches}
    used = {axis for row in present for axis in row.touches}
    for name in sorted(used & set(types.spaces)):
        units = types.spaces[name]
        space = source.spaces[name]
        passes = (name not in normed and not space.is_linear) or name in source.acts
        if passes and not units.passes_nonlinearity(calm=space.calm):
            near = multiples_near(units.size, units.target_size)
            raise Refused(
                f"cannot widen {name} from {units.size} to {units.target_size}, as its units pass through a "
                "nonlinearity, so every new unit must duplicate an old one",
                f"try {near}",
            )
