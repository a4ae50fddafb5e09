"""What was asked for -> the target's config: sizes by option or by name, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.opening import MAX_JSON, read_given
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadSizes, BadTarget
from lemonx.hub.download import located_config
from lemonx.options.declared import Growth, PathLike
from lemonx.options.sizes import AskedSize, Relative, parse_size
from lemonx.specs.config import TIED, Config, with_fields
from lemonx.specs.family import Architecture, FieldSize, is_ratio, is_size
from lemonx.specs.spec import Spec

# The options whose sizes grow with the width.
FOLLOWERS = ("heads", "kv_heads", "ffn")


@dataclass(frozen=True)
class Target:
    """Sizes as a user gives them; None means: not given, so it follows or stays."""

    width: AskedSize | None = None
    depth: AskedSize | None = None
    heads: AskedSize | None = None
    kv_heads: AskedSize | None = None
    ffn: AskedSize | None = None
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    like: Mapping[str, JsonValue] | None = None

    def given(self, option: str) -> AskedSize | None:
        return getattr(self, option)

    @property
    def factor(self) -> Fraction | None:
        """The ratio of all widths, if the width was given as one."""
        return self.width.times if isinstance(self.width, Relative) and not self.width.plus else None


def asked(growth: Growth) -> Target:
    """Return the sizes that a user asks for; BadTarget if there are none, and no number of parameters."""
    sizes = {name: parse_size(_flag(name), getattr(growth, name)) for name in ("width", "depth", *FOLLOWERS)}
    target = Target(**sizes, fields=dict(growth.set or {}), like=_like(growth.like))
    if target == Target() and growth.params is None:
        raise BadTarget("no size was given", "give --width, --depth, --params, --like, --ffn or --set")
    return target


def _like(value: PathLike | Mapping[str, JsonValue] | None) -> Mapping[str, JsonValue] | None:
    if value is None or isinstance(value, Mapping):
        return value
    try:
        path = located_config(value)
    except BadCheckpoint as error:
        named = f"{str(error.file)!r} " if error.file else ""
        raise BadTarget(f"--like {named}{error.found}", error.remedy) from None
    try:
        raw, path = read_given(path, CONFIG, MAX_JSON)
        return parse_config(raw, path)
    except BadCheckpoint as error:
        raise BadTarget.of(error) from None
    except (OSError, RuntimeError) as error:
        raise BadTarget(
            f"cannot be read as a config ({error.strerror if isinstance(error, OSError) else error})",
            "give --like a config.json",
            file=path,
        ) from None


def target_config(family: Architecture, values: Mapping[str, JsonValue], wanted: Target) -> dict[str, JsonValue]:
    """The target's config.json as far as sizes go; the source's other fields stay."""
    config = family.config(values)
    spec = family.build(config)
    wanted = replace(wanted, fields=agreed(_set(family, wanted)))
    new = dict(spec.config)
    if wanted.like is not None:
        new |= _sizes_of(family, spec, wanted.like)
    ratio = asked_ratio(family, config, wanted)
    if ratio is not None:
        options = FOLLOWERS if wanted.factor is None else ("width", *FOLLOWERS)
        new |= _followers(family, config, wanted, ratio, options)
    given = agreed([*_options(family, config, spec, wanted), *_set(family, wanted)])
    new |= given
    for name, value in wanted.fields.items():
        if name == TIED and value is False and not spec.ties:
            raise BadTarget(
                f"--set {TIED}=false has no effect, as no output head here is tied to the embedding", "leave it out"
            )
        # The one field besides sizes that may be changed, from true to false: a decoder becomes a weight of its own.
        new[name] = value if name == TIED and spec.ties and value is False else _checked(family, config, name, value)
    new |= {name: new.get(leader, config[leader]) for name, leader in spec.follows.items() if name not in given}
    try:
        target = family.spec(with_fields(values, family.as_named(values, new)))
    except BadCheckpoint as error:
        raise BadSizes.of(error.about("the target's config.json")) from None
    return with_fields(values, family.as_named(values, {**new, **target.config}))


def agreed(claims: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """The value of every field, from (who says it, field, value); BadTarget if two values of one field differ.

    >>> agreed([("--depth 8", "num_layers", 8), ("--set num_layers=8", "num_layers", 8)])
    {'num_layers': 8}
    """
    said: dict[str, tuple[str, Any]] = {}
    for who, name, value in claims:
        first, before = said.setdefault(name, (who, value))
        if before != value:
            raise BadTarget(f"{first} and {who} give {name} two values", "give one of them")
    return {name: value for name, (_, value) in said.items()}


def _options(family: Architecture, config: Config, spec: Spec, wanted: Target) -> Iterator[tuple[str, str, FieldSize]]:
    """The fields that options set. A ratio of widths sets the width where it is one field; else all follow it."""
    for option in ("width", "depth", *FOLLOWERS):
        size, names = wanted.given(option), fields_behind(family, config, option)
        if option == "width" and wanted.factor and (len(names) > 1 or (names and isinstance(config[names[0]], list))):
            continue
        if size is not None:
            for name, value in _asked(family, config, spec, option, size).items():
                yield f"{_flag(option)} {size}", name, value


def _set(family: Architecture, wanted: Target) -> Iterator[tuple[str, str, Any]]:
    """The fields that --set sets, by their first names."""
    for name, value in wanted.fields.items():
        yield f"--set {name}={spell(value)}"[:60], family.aliases.get(name, name), value


def _sizes_of(family: Architecture, source: Spec, like: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The sizes of another config of this family; its units (the width of a head) must be those of the source."""
    if not family.owns(like):
        raise BadTarget(
            f"--like is a {like.get('model_type') or like.get('architecture')!r}, but the source is a "
            f"{family.model_types[0]!r}",
            "give --like a config of the same family",
        )
    try:
        other, config = family.spec(like), family.config(like)
        sizes = {name: config[name] for names in family.sizes.values() for name in names}
    except BadCheckpoint as error:
        raise BadTarget.of(error.about("the config.json of --like")) from None
    fused = {axis for row in source.rows.values() for s in (row.reads, row.writes) if s.is_fused for axis in s.axes}
    for name in sorted(fused & source.fixed.keys()):
        if other.fixed.get(name) != source.fixed[name]:
            raise BadTarget(
                f"--like has {name} = {other.fixed.get(name)}, but the source has {source.fixed[name]}, which cannot "
                "change",
                f"give --like a config with the same {name}",
            )
    return sizes


def asked_ratio(family: Architecture, config: Config, wanted: Target) -> Fraction | None:
    if wanted.width is None or wanted.factor is not None:
        return wanted.factor
    before = config[_single(family, config, "width", wanted.width)]
    width = before + wanted.width.plus if isinstance(wanted.width, Relative) else wanted.width
    if width < before:
        raise BadTarget(
            f"--width {width} is smaller than the source's {before}",
            f"lemonx only grows models, so choose at least {before}",
        )
    return Fraction(width, before)


def _asked(family: Architecture, config: Config, spec: Spec, option: str, size: AskedSize) -> dict[str, FieldSize]:
    """The config fields behind an option, at the size that was asked for: on both sides of an encoder-decoder."""
    names = [_single(family, config, option, size)] if option == "width" else _behind(family, config, option)
    return {name: _resolved(name, spec.config.get(name) or config[name], option, size) for name in names}


def _resolved(name: str, before: Any, option: str, size: AskedSize) -> Any:
    """A size in terms of the source's, or as it is. BadTarget where a list cannot take it."""
    flag = _flag(option)
    if isinstance(before, list):
        if not isinstance(size, Relative) or size.plus:
            advice = _instead(flag, size, {name: before}, sum(before))
            raise BadTarget(f"{flag} {size} cannot set {name}, which is {spell(before)}", advice)
        return [_resolved(name, value, option, size) for value in before]
    if not isinstance(size, Relative):
        return size
    if not isinstance(before, int | float):
        raise BadTarget(
            f"{flag} {size} is relative, but config.json gives no {name}", f"give a number, such as {flag} 4096"
        )
    value = size.of(before)
    if value.denominator != 1:
        near = f"{flag} {int(value)} or {flag} {int(value) + 1}"
        raise BadTarget(f"{name} = {before} times {size.times} is not a whole number", f"try {near}")
    return int(value)


def _followers(
    family: Architecture,
    config: Config,
    wanted: Target,
    ratio: Fraction,
    options: tuple[str, ...],
) -> dict[str, FieldSize]:
    """Every size that was not given, in proportion to the width."""
    followers: dict[str, FieldSize] = {
        name: config[name]
        for option in options
        if option == "width" or wanted.given(option) is None
        for name in fields_behind(family, config, option)
        if name not in wanted.fields and config[name] is not None
    }
    result: dict[str, FieldSize] = {}
    for name, value in followers.items():
        scaled = [ratio * v for v in value] if isinstance(value, list) else [ratio * value]
        if any(v.denominator != 1 for v in scaled):
            raise _not_whole(family, config, followers, name, ratio)
        result[name] = [int(v) for v in scaled] if isinstance(value, list) else int(scaled[0])
    return result


def _not_whole(
    family: Architecture,
    config: Config,
    followers: Mapping[str, FieldSize],
    name: str,
    ratio: Fraction,
) -> BadSizes:
    what = f"{name} = {spell(config[name])} times {ratio} is not a whole number"
    common = math.gcd(*(n for value in followers.values() for n in numbers(value)))
    return BadSizes(what, f"try a factor in steps of 1/{common}, or set it yourself with --set {name}=...")


def fields_behind(family: Architecture, config: Config, option: str) -> list[str]:
    """The config fields behind an option that this model has: an encoder without its decoder has no decoder's."""
    return [name for name in family.sizes.get(option, ()) if name in config.asked]


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _behind(family: Architecture, config: Config, option: str) -> list[str]:
    """The config fields behind an option; BadTarget if there are none."""
    if names := fields_behind(family, config, option):
        return names
    sizes = ", ".join(_sizes(family, config))
    raise BadTarget(f"a {config['model_type']} has no size that {_flag(option)} sets", f"set one of {sizes} with --set")


def _single(family: Architecture, config: Config, option: str, size: AskedSize) -> str:
    """The one config field behind an option, where it is one number."""
    first, *others = _behind(family, config, option)
    if others or isinstance(config[first], list):
        before = {name: config[name] for name in (first, *others)}
        what = f"a {config['model_type']} has several sizes that {_flag(option)} could set"
        raise BadTarget(what, _instead(_flag(option), size, before, numbers(config[first])[0]))
    return first


def _instead(flag: str, size: AskedSize, before: Mapping[str, FieldSize], whole: int) -> str:
    """What to give where one number cannot set several sizes: all of them in the ratio of what was asked for."""
    ratio = (size.of(whole) if isinstance(size, Relative) else Fraction(size)) / whole
    grown = [n * ratio for value in before.values() for n in numbers(value)]
    if ratio > 1 and all(number.denominator == 1 for number in grown):
        scaled = {name: _scaled(value, ratio) for name, value in before.items()}
        exact = f"{float(ratio):g}" if Fraction(f"{float(ratio):g}") == ratio else str(ratio)
        fields = " ".join(f"--set {name}={spell(value)}" for name, value in scaled.items())
        return f"for all in proportion give {flag} {exact}x, or --set for one of them: {fields}"
    fields = " ".join(f"--set {name}={spell(value)}" for name, value in before.items())
    return f"give a ratio such as {flag} 2x, or {fields} with your numbers"


def numbers(value: Any) -> list[int]:
    return [int(n) for n in (value if isinstance(value, list) else [value])]


def _scaled(value: Any, ratio: Fraction) -> FieldSize:
    grown = [int(n * ratio) for n in numbers(value)]
    return grown if isinstance(value, list) else grown[0]


def _sizes(family: Architecture, config: Config) -> list[str]:
    """Every config field that is a size of this model."""
    return sorted(field for option in family.sizes for field in fields_behind(family, config, option))


def spell(value: Any) -> str:
    return str(value).replace(" ", "")


def _checked(family: Architecture, config: Config, name: str, value: Any) -> Any:
    sizes = _sizes(family, config)
    if name not in sizes:
        what = "cannot grow" if name in config.asked else "is not a size of this model"
        raise BadTarget(f"{name!r} {what}", f"set one of {', '.join(sizes)}")
    before = config[name]
    several, unset = isinstance(before, list), value is None and before is not None
    # Only what config.json itself writes as 4.0 may be given so.
    given = value if isinstance(value, list) else [value]
    typed = isinstance(before, float) or not any(isinstance(v, float) for v in given)
    fits = is_ratio if isinstance(before, float) and family.has_ratio(name) else is_size
    if not fits(value) or not typed or isinstance(value, list) != several or unset:
        kind = "a list of whole numbers" if several else "a whole number"
        raise BadTarget(f"--set {name}={spell(value)} is not {kind}", f"use {kind}")
    if isinstance(before, list) and isinstance(value, list) and len(value) != len(before):
        raise BadTarget(f"--set {name} has {len(value)} numbers", f"give {len(before)}")
    return float(value) if isinstance(before, float) and isinstance(value, int) else value
