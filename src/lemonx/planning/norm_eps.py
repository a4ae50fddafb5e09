"""What becomes of the eps of norms whose input shrinks: (variance + eps) must stay in proportion.

A norm whose expanded input has eta^2 of the variance needs eta^2 eps. For every field of config.json that holds an eps,
one of three rules does that:

1. All norms that read the field shrink by one eta: the field takes eta^2 eps. This is the paper's way.
2. They shrink by different eta, but some read what a nonlinearity wrote, which cannot be rescaled, and these agree: the
   field takes their eta^2 eps, and what the others read is rescaled to match.
3. Otherwise, or if the eps is fixed in code, it stays, and whatever these norms read is rescaled by 1 / eta.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lemonx.algebra.expansions import Expansion
from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint
from lemonx.specs.norms import Norm
from lemonx.specs.signature import Side
from lemonx.specs.spec import Spec


def keep_eps(
    source: Spec,
    norms: Mapping[str, Norm],
    eta: Mapping[str, float],
    spaces: Mapping[str, Expansion],
    config: Mapping[str, Any],
    carried: Collection[str],
) -> tuple[dict[str, Expansion], dict[str, float]]:
    """The spaces with the gains that norms need, and the fields of config.json that change.

    Norms of a frame (`carried`) find mean and variance as they were, so their field stays.
    """
    fields = {name: source.eps if row.eps is None else row.eps for name, row in norms.items()}
    values = {field: _number(config, field) for field in sorted({f for f in fields.values() if isinstance(f, str)})}
    behind = {field: [name for name, other in fields.items() if other == field] for field in values}
    # Sides whose eps stays: fixed in code, of a frame, of a size that no gain reaches, or by rule 3. A norm that reads
    # one of them follows, and so may decide about another field: until nothing changes.
    unchanged = {
        row.reads
        for name, row in norms.items()
        if not isinstance(fields[name], str) or name in carried or spaces.keys().isdisjoint(row.reads.axes)
    }
    while True:
        levels = {field: _level(source, norms, eta, names, unchanged) for field, names in behind.items()}
        more = {norms[name].reads for field, names in behind.items() if levels[field] is None for name in names}
        if more <= unchanged:
            break
        unchanged |= more
    gains = dict(spaces)
    for name, row in norms.items():
        level = None if row.reads in unchanged else levels[str(fields[name])]
        wanted = 1.0 if level is None else level
        if eta[name] != wanted:
            axis = next(axis for axis in row.reads.axes if axis in spaces)
            gains[axis] = spaces[axis].with_gain(wanted / eta[name])
        axis = row.writes.axes[0]
        if not row.affine and axis in spaces:
            gains[axis] = spaces[axis].with_gain(1.0 / eta[name])
    changed = {field: values[field] * level**2 for field, level in levels.items() if level is not None}
    return gains, {field: value for field, value in changed.items() if value != values[field]}


def _level(
    source: Spec, norms: Mapping[str, Norm], eta: Mapping[str, float], names: list[str], unchanged: set[Side]
) -> float | None:
    """The eta whose square a field is multiplied by, for the norms that read it; None if the field stays (rule 3)."""
    if any(norms[name].reads in unchanged for name in names):
        return None
    together = {eta[name] for name in names}
    if len(together) == 1:
        return together.pop()
    stiff = {eta[name] for name in names if not set(norms[name].reads.axes).isdisjoint(source.acts)}
    return stiff.pop() if len(stiff) == 1 else None


def _number(config: Mapping[str, Any], field: str) -> float:
    value = config[field]
    if not isinstance(value, float | int) or not value >= 0:
        raise BadCheckpoint(f"has {field} = {value!r}, which is not a number", "correct it", file=CONFIG)
    return value
