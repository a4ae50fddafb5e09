"""What a user may ask for: how a model grows, and how the result is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.opening import MAX_JSON, read_given
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadTarget
from lemonx.hub.download import located_config
from lemonx.methods import Lessons
from lemonx.planning.plan import Plan
from lemonx.planning.request import Target, agreed
from lemonx.planning.sizes import Relative, parse_ratio, parse_size
from lemonx.workflows.tables import Tables

# A path, as every function of Python's takes it.
PathLike = str | os.PathLike[str]
# What a field of config.json can be set to.
FieldValue = bool | int | float | str | list[int] | None
Dtype = Literal["float64", "float32", "bfloat16", "float16", "fp64", "fp32", "bf16", "fp16"]
Placement = Literal["interleaved", "before", "stacked", "middle"]

SHARD = 5 * 10**9


@dataclass(frozen=True)
class GrowthOptions:
    """The sizes to grow to, and the choices that a lossless expansion leaves open."""

    sizes: Target
    method: str = "lemon"
    # A number of parameters, which chooses the sizes that are not given.
    params: int | str | None = None
    free: str | Free | None = None
    depth_type: int | None = None
    placement: str | None = None
    small_gains: bool = False
    ramp: bool = False
    seed: int = 0
    dtype: str | None = None
    tables: Tables = field(default_factory=Tables)


@dataclass(frozen=True)
class Writing:
    """How a checkpoint is written: see `lemonx.expand`."""

    verify: bool = True
    threads: int | None = None
    max_shard_size: int = SHARD
    force: bool = False
    with_optimizer: bool = False
    allow_pickle: bool | str = False
    adapter: PathLike | None = None
    keep_adapter: bool = False
    config: PathLike | None = None
    # For how many processes a distributed checkpoint is written; as many as wrote the source if nothing is said.
    processes: int | None = None
    lessons: Lessons | None = None
    planned: Callable[[Plan], None] | None = None
    progress: Callable[[int], None] | None = None


def sizes(
    *,
    width: int | str | None = None,
    depth: int | str | None = None,
    heads: int | str | None = None,
    kv_heads: int | str | None = None,
    ffn: int | str | None = None,
    width_factor: float | str | Fraction | None = None,
    set: Mapping[str, FieldValue] | None = None,
    fields: Mapping[str, FieldValue] | None = None,
    like: PathLike | Mapping[str, JsonValue] | None = None,
    params: int | str | None = None,
) -> Target:
    """The sizes that were asked for; BadTarget if there are none, and no number of parameters. `fields` is `set`."""
    asked = {"width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    given = {name: parse_size(f"--{name.replace('_', '-')}", value) for name, value in asked.items()}
    factor = _factor(width_factor)
    if isinstance(wide := given["width"], Relative) and not wide.plus:
        if factor is not None:
            raise BadTarget("--width and --width-factor both set the width", "give one of them")
        factor, given["width"] = wide.times, None
    claims = [
        (key, name, value) for key, said in (("fields", fields), ("set", set)) for name, value in (said or {}).items()
    ]
    target = Target(**given, width_factor=factor, fields=agreed(claims), like=_like(like))
    if target == Target() and params is None:
        raise BadTarget("no size was given", "give --width, --depth, --ffn, --width-factor, --set, --params or --like")
    return target


def _factor(value: float | str | Fraction | None) -> Fraction | None:
    if value is None:
        return None
    factor = parse_ratio(str(value).removeprefix("+").removesuffix("x"))
    if factor is None:
        raise BadTarget(f"--width-factor {str(value)[:40]} is not a ratio", "use a ratio such as 2, 1.5 or 3/2")
    if factor < 1:
        raise BadTarget(f"--width-factor {value} is less than 1", "lemonx only grows models, so use at least 1")
    return factor


def _like(value: PathLike | Mapping[str, JsonValue] | None) -> Mapping[str, JsonValue] | None:
    if value is None or isinstance(value, Mapping):
        return value
    try:
        path = located_config(value)
    except BadCheckpoint as error:
        named = f"{str(error.file)!r} " if error.file else ""
        raise BadTarget(f"--like {named}{error.found}", error.remedy) from None
    try:
        raw, path = read_given(path, "config.json", MAX_JSON)
        return parse_config(raw, path)
    except BadCheckpoint as error:
        raise BadTarget.of(error) from None
    except (OSError, RuntimeError) as error:
        raise BadTarget(
            f"cannot be read as a config ({error.strerror if isinstance(error, OSError) else error})",
            "give --like a config.json",
            file=path,
        ) from None
