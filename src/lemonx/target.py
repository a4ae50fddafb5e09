"""What was asked for -> the target's config: sizes by option or by name, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from lemonx.errors import BadTarget
from lemonx.spec import Architecture, Config

# The options whose sizes grow with the width.
FOLLOWERS = ("heads", "kv_heads", "ffn")


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
    new = {**values, **spec.config}
    if wanted.like is not None:
        new |= _sizes_of(family, wanted.like)
    ratio = _ratio(family, config, wanted)
    if ratio is not None:
        options = ["width", *FOLLOWERS] if wanted.width_factor is not None else FOLLOWERS
        new |= _followers(family, config, wanted, ratio, options)
    for option in ("width", "depth", *FOLLOWERS):
        if (value := wanted.given(option)) is not None:
            new[_single(family, config, option)] = _positive(option, value)
    for name, value in wanted.fields.items():
        new[name] = _checked(config, name, value)
    target = family.spec(new)
    return {**new, **target.config}


def _sizes_of(family: Architecture, like: Mapping[str, Any]) -> dict[str, Any]:
    if like.get("model_type") not in family.model_types:
        raise BadTarget(
            f"--like is a {like.get('model_type')!r}, the source a {family.model_types[0]!r}: sizes differ in kind"
        )
    other = family.config(like)
    return {name: other[name] for names in family.sizes.values() for name in names}


def _ratio(family: Architecture, config: Mapping[str, Any], wanted: Target) -> Fraction | None:
    if wanted.width_factor is not None:
        if wanted.width is not None:
            raise BadTarget("--width and --width-factor say the same thing twice: give one")
        return wanted.width_factor
    if wanted.width is None:
        return None
    return Fraction(_positive("width", wanted.width), config[_single(family, config, "width")])


def _followers(
    family: Architecture,
    config: Mapping[str, Any],
    wanted: Target,
    ratio: Fraction,
    options: list[str] | tuple[str, ...],
) -> dict[str, Any]:
    """Every size that was not given, in proportion to the width."""
    followers = {
        name: config[name]
        for option in options
        if wanted.given(option) is None
        for name in family.sizes.get(option, ())
        if name not in wanted.fields and config[name] is not None
    }
    result = {}
    for name, value in followers.items():
        scaled = [ratio * v for v in value] if isinstance(value, list) else [ratio * value]
        if any(v.denominator != 1 for v in scaled):
            raise BadTarget(_not_whole(family, config, followers, name, ratio))
        result[name] = [int(v) for v in scaled] if isinstance(value, list) else int(scaled[0])
    return result


def _not_whole(
    family: Architecture, config: Mapping[str, Any], followers: Mapping[str, Any], name: str, ratio: Fraction
) -> str:
    numbers = [n for value in followers.values() for n in (value if isinstance(value, list) else [value])]
    message = f"{name} = {config[name]} times {ratio} is not whole"
    width = config[family.sizes["width"][0]]
    if not isinstance(width, int):
        return f"{message}: try a factor with denominator {math.gcd(*numbers)}, or give it with --set {name}=..."
    step = width // math.gcd(width, *numbers)
    below = int(ratio * width) // step * step
    sizes = [size for size in (below, below + step) if size >= width]
    return f"{message}: widths that do are {' and '.join(map(str, sizes))}, or give --set {name}=..."


def _single(family: Architecture, config: Mapping[str, Any], option: str) -> str:
    """The one config field behind an option, where it is one number."""
    flag = f"--{option.replace('_', '-')}"
    if option not in family.sizes:
        raise BadTarget(f"a {family.model_types[0]} has no size for {flag}")
    names = family.sizes[option]
    if len(names) > 1 or isinstance(config[names[0]], list):
        advice = "--width-factor, or " if option == "width" else ""
        fields = " ".join(f"--set {name}={_spell(config[name])}" for name in names)
        raise BadTarget(f"a {family.model_types[0]} has several sizes behind {flag}: use {advice}{fields}")
    return names[0]


def _spell(value: Any) -> str:
    return str(value).replace(" ", "")


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise BadTarget(f"{option} must be at least 1, not {value}")
    return value


def _checked(config: Config, name: str, value: Any) -> Any:
    asked = sorted(n for n in config.asked if _is_size(config[n]))
    if name not in asked:
        raise BadTarget(f"{name!r} is not a size of this model: its sizes are {', '.join(asked)}")
    if not _is_size(value) or (isinstance(config[name], list) and not isinstance(value, list)):
        raise BadTarget(
            f"--set {name}={_spell(value)}: want {'a list of' if isinstance(config[name], list) else 'a'} whole number"
        )
    if isinstance(config[name], list) and len(value) != len(config[name]):
        raise BadTarget(f"--set {name}: want {len(config[name])} numbers, got {len(value)}")
    return value


def _is_size(value: Any) -> bool:
    """A whole number above 0, or a list of them; None is a size that follows another."""
    numbers = value if isinstance(value, list) and value else [value]
    return value is None or all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in numbers)
