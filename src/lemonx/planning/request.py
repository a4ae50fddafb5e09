"""What was asked for -> the target's config: sizes by option or by name, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from lemonx.errors import BadCheckpoint, BadTarget
from lemonx.guards.limits import LARGEST
from lemonx.specs.config import TIED, Config, with_fields
from lemonx.specs.family import Architecture, is_ratio, is_size
from lemonx.specs.spec import Spec

# The options whose sizes grow with the width.
FOLLOWERS = ("heads", "kv_heads", "ffn")
# How many widths on either side of the one asked for are tried, to advise one that works.
_TRIES = 50


@dataclass(frozen=True)
class Target:
    """Sizes as a user gives them; None means: not given, so it follows or stays."""

    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    width_factor: Fraction | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    like: Mapping[str, Any] | None = None

    def given(self, option: str) -> int | None:
        return getattr(self, option)


def target_config(family: Architecture, values: Mapping[str, Any], wanted: Target) -> dict[str, Any]:
    """The target's config.json as far as sizes go; the source's other fields stay."""
    config = family.config(values)
    spec = family.build(config)
    wanted = replace(wanted, fields={family.aliases.get(name, name): value for name, value in wanted.fields.items()})
    for option in ("width", "depth", *FOLLOWERS):
        _check_option(option, wanted.given(option))
    new = dict(spec.config)
    if wanted.like is not None:
        new |= _sizes_of(family, spec, wanted.like)
    ratio = _ratio(family, config, wanted)
    if ratio is not None:
        options = ["width", *FOLLOWERS] if wanted.width_factor is not None else FOLLOWERS
        new |= _followers(family, config, wanted, ratio, options)
    given = set(wanted.fields)
    for option in ("width", "depth", *FOLLOWERS):
        if (value := wanted.given(option)) is not None:
            name = _single(family, config, option)
            new[name] = value
            given.add(name)
    for name, value in wanted.fields.items():
        if name == TIED and value is False and not spec.ties:
            raise BadTarget(f"--set {TIED}=false: no decoder is the embedding here: leave it out")
        # The one field besides sizes that may be changed, from true to false: a decoder becomes a weight of its own.
        new[name] = value if name == TIED and spec.ties and value is False else _checked(family, config, name, value)
    new |= {name: new.get(leader, config[leader]) for name, leader in spec.follows.items() if name not in given}
    try:
        target = family.spec(with_fields(values, family.as_named(values, new)))
    except BadCheckpoint as error:
        raise BadTarget(f"the target's {error}") from None
    return with_fields(values, family.as_named(values, {**new, **target.config}))


def _sizes_of(family: Architecture, source: Spec, like: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of another config of this family; its units (the width of a head) must be those of the source."""
    if not family.owns(like):
        raise BadTarget(
            f"--like is a {like.get('model_type') or like.get('architecture')!r}, the source a "
            f"{family.model_types[0]!r}: sizes differ in kind"
        )
    try:
        other, config = family.spec(like), family.config(like)
        sizes = {name: config[name] for names in family.sizes.values() for name in names}
    except BadCheckpoint as error:
        raise BadTarget(f"--like: {error}") from None
    fused = {axis for row in source.rows.values() for s in (row.reads, row.writes) if s.is_fused for axis in s.axes}
    for name in sorted(fused & source.fixed.keys()):
        if other.fixed.get(name) != source.fixed[name]:
            raise BadTarget(
                f"--like has {name} = {other.fixed.get(name)}, the source {source.fixed[name]}: it cannot change"
            )
    return sizes


def _ratio(family: Architecture, config: Config, wanted: Target) -> Fraction | None:
    if wanted.width_factor is not None:
        if wanted.width is not None:
            raise BadTarget("--width and --width-factor say the same thing twice: give one")
        return wanted.width_factor
    if wanted.width is None:
        return None
    before = config[_single(family, config, "width")]
    if wanted.width < before:
        raise BadTarget(f"--width {wanted.width} is less than the source's {before}: only growth is possible")
    return Fraction(wanted.width, before)


def _followers(
    family: Architecture,
    config: Config,
    wanted: Target,
    ratio: Fraction,
    options: list[str] | tuple[str, ...],
) -> dict[str, Any]:
    """Every size that was not given, in proportion to the width."""
    followers = {
        name: config[name]
        for option in options
        if wanted.given(option) is None
        for name in _fields(family, config, option)
        if name not in wanted.fields and config[name] is not None
    }
    result = {}
    for name, value in followers.items():
        scaled = [ratio * v for v in value] if isinstance(value, list) else [ratio * value]
        if any(v.denominator != 1 for v in scaled):
            raise _not_whole(family, config, followers, name, ratio)
        result[name] = [int(v) for v in scaled] if isinstance(value, list) else int(scaled[0])
    return result


def _not_whole(
    family: Architecture, config: Mapping[str, Any], followers: Mapping[str, Any], name: str, ratio: Fraction
) -> BadTarget:
    numbers = [n for value in followers.values() for n in (value if isinstance(value, list) else [value])]
    what = f"{name} = {_spell(config[name])} times {ratio} is not whole"
    width = config[family.sizes["width"][0]]
    if len(family.sizes["width"]) > 1 or not isinstance(width, int):
        common = math.gcd(*numbers)
        return BadTarget(f"{what}: try a factor in steps of 1/{common}, or give it with --set {name}=...")
    step = width // math.gcd(width, *numbers)
    return NotWhole(what, name, width, step, int(ratio * width))


class NotWhole(BadTarget):
    """A size that follows the width is not whole; `advice` says which widths would do."""

    def __init__(self, what: str, name: str, width: int, step: int, asked: int) -> None:
        self.what, self.name, self.width, self.step, self.asked = what, name, width, step, asked
        super().__init__(self.advice(lambda size: True))

    def advice(self, works: Callable[[int], bool]) -> str:
        """The message, with the widths next to the one asked for that work."""
        below = self.asked // self.step * self.step
        lower, higher = range(below, self.width, -self.step), range(below + self.step, 4 * self.asked, self.step)
        down = next((n for n in lower[:_TRIES] if works(n)), None)
        up = next((n for n in higher[:_TRIES] if works(n)), None)
        sizes = " and ".join(str(n) for n in (down, up) if n is not None)
        widths = f"widths that work are {sizes}, or " if sizes else ""
        return f"{self.what}: {widths}set it yourself with --set {self.name}=..."


def _fields(family: Architecture, config: Config, option: str) -> list[str]:
    """The config fields behind an option that this model has: an encoder without its decoder has no decoder's."""
    return [name for name in family.sizes.get(option, ()) if name in config.asked]


def _single(family: Architecture, config: Config, option: str) -> str:
    """The one config field behind an option, where it is one number."""
    flag = f"--{option.replace('_', '-')}"
    if not (names := _fields(family, config, option)):
        sizes = ", ".join(_sizes(family, config))
        raise BadTarget(f"a {config['model_type']} has no size for {flag}: its sizes are {sizes}")
    first, *others = names
    if others or isinstance(config[first], list):
        advice = "--width-factor, or " if option == "width" else ""
        fields = " ".join(f"--set {name}={_spell(config[name])}" for name in (first, *others))
        raise BadTarget(f"a {config['model_type']} has several sizes behind {flag}: use {advice}{fields}")
    return first


def _sizes(family: Architecture, config: Config) -> list[str]:
    """Every config field that is a size of this model."""
    return sorted(field for option in family.sizes for field in _fields(family, config, option))


def _spell(value: Any) -> str:
    return str(value).replace(" ", "")


def _check_option(option: str, value: int | None) -> None:
    if value is not None and not 1 <= value <= LARGEST:
        bound = "at least 1" if value < 1 else f"at most {LARGEST}"
        raise BadTarget(f"{option} must be {bound}, not {str(value)[:40]}")


def _checked(family: Architecture, config: Config, name: str, value: Any) -> Any:
    sizes = _sizes(family, config)
    if name not in sizes:
        what = "cannot grow" if name in config.asked else "is not a size of this model"
        raise BadTarget(f"{name!r} {what}: its sizes are {', '.join(sizes)}")
    before = config[name]
    several, unset = isinstance(before, list), value is None and before is not None
    # Only what config.json itself writes as 4.0 may be given so.
    given = value if isinstance(value, list) else [value]
    typed = isinstance(before, float) or not any(isinstance(v, float) for v in given)
    fits = is_ratio if isinstance(before, float) and family.has_ratio(name) else is_size
    if not fits(value) or not typed or isinstance(value, list) != several or unset:
        raise BadTarget(
            f"--set {name}={_spell(value)}: want {'a list of whole numbers' if several else 'a whole number'}"
        )
    if isinstance(before, list) and isinstance(value, list) and len(value) != len(before):
        raise BadTarget(f"--set {name}: want {len(before)} numbers, got {len(value)}")
    return float(value) if isinstance(before, float) and isinstance(value, int) else value
