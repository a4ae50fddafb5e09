"""What a user may ask for: how a model grows, and how the result is written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.opening import MAX_JSON, read_given
from lemonx.errors import BadCheckpoint, BadTarget
from lemonx.methods import Lessons
from lemonx.planning.plan import Plan
from lemonx.planning.request import Target

# A path, as every function of Python's takes it.
PathLike = str | os.PathLike[str]
# What a field of config.json can be set to.
FieldValue = bool | int | float | str | list[int] | None
Dtype = Literal["float64", "float32", "bfloat16", "float16"]

SHARD = 5 * 10**9


@dataclass(frozen=True)
class Growth:
    """The sizes to grow to, and the choices that losslessness leaves open."""

    sizes: Target
    method: str = "lemon"
    free: str | Free | None = None
    depth_type: int | None = None
    small_gains: bool = False
    seed: int = 0
    dtype: str | None = None


@dataclass(frozen=True)
class Writing:
    """How a checkpoint is written: see `lemonx.expand`."""

    verify: bool = True
    threads: int | None = None
    max_shard_size: int = SHARD
    force: bool = False
    with_optimizer: bool = False
    allow_pickle: bool = False
    lessons: Lessons | None = None
    planned: Callable[[Plan], None] | None = None
    progress: Callable[[int], None] | None = None


def sizes(
    *,
    width: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    width_factor: float | str | Fraction | None = None,
    fields: Mapping[str, FieldValue] | None = None,
    like: PathLike | Mapping[str, object] | None = None,
) -> Target:
    """The sizes that were asked for; BadTarget if there are none."""
    target = Target(width, depth, heads, kv_heads, ffn, _factor(width_factor), dict(fields or {}), _like(like))
    if target == Target():
        raise BadTarget("no size was asked for: give --width, --depth, --ffn, --width-factor, --set or --like")
    return target


def _factor(value: float | str | Fraction | None) -> Fraction | None:
    if value is None:
        return None
    # No exponent: Fraction would compute all digits of 1e999999999.
    text = str(value)
    ratio = re.fullmatch(r"\+?([0-9]{1,7})(\.[0-9]{0,20}|/0*[1-9][0-9]{0,6})?", text)
    if ratio is None:
        raise BadTarget(f"--width-factor {text[:40]}: want a ratio such as 2, 1.5 or 3/2")
    factor = Fraction(text).limit_denominator(4096)
    if factor < 1:
        raise BadTarget(f"--width-factor {value}: only growth is possible, so at least 1")
    return factor


def _like(value: PathLike | Mapping[str, object] | None) -> Mapping[str, object] | None:
    if value is None or isinstance(value, Mapping):
        return value
    path = Path(value)
    try:
        raw, path = read_given(path, "config.json", MAX_JSON)
        return parse_config(raw, path)
    except (OSError, RuntimeError, BadCheckpoint) as error:
        raise BadTarget(f"--like {value}: cannot read a config from {path} ({error})") from None
