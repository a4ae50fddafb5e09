"""Former spellings of options: each still works, and says once what it is called now."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lemonx.algebra.free_parameters import Free, as_section
from lemonx.errors import BadTarget
from lemonx.options.declared import NO_TABLE, Values


class Renamed(FutureWarning):
    """An option was given by a former spelling."""


@dataclass(frozen=True)
class Former:
    """A former option: the option that it is now, that option's new value, and how a user writes it.

    `value` gets the value of the former option, and the present value of the new one. On the command line the former
    option takes a text, or is a flag, or did not exist.
    """

    now: str
    value: Callable[[Any, Any], Any]
    written: str
    on_command_line: Literal["text", "flag", "never"] = "text"


def _free(key: str, on_command_line: Literal["text", "flag"] = "text") -> Former:
    def value(given: Any, free: Any) -> Any:
        fits = free is None or isinstance(free, str | Mapping | Free)  # what does not is refused with all other types
        return {**as_section(free), key: _number(given)} if given and fits else free

    return Former("free", value, f"'{{{key}: {{}}}}'", on_command_line)


def _method(key: str) -> Former:
    def value(given: Any, method: Any) -> dict[str, object]:
        if not isinstance(method, str | Mapping | None):
            return method
        # In Python, lessons were an object with all of these.
        told = vars(given) if hasattr(given, "steps") else {key: _number(given)}
        return {**({"name": method} if isinstance(method, str) else method or {}), **told}

    return Former("method", value, f"'{{name: ligo, {key}: {{}}}}'")


def _number(value: Any) -> Any:
    """A text that is a whole number as one."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value) else value


def _agreed(fields: Any, present: Any) -> Any:
    if not isinstance(fields, Mapping) or not isinstance(present, Mapping | None):
        return present if isinstance(fields, Mapping) else fields
    for name, value in (present or {}).items():
        if name in fields and fields[name] != value:
            raise BadTarget(f"set and fields give {name} two values", "give one of them")
    return {**fields, **(present or {})}


FORMER: Mapping[str, Former] = {
    "width_factor": Former("width", lambda value, _: f"{str(value).strip().removesuffix('x')}x", "{}"),
    "fields": Former("set", _agreed, "FIELD=VALUE", "never"),
    "depth_type": _free("depth_type"),
    "placement": _free("placement"),
    "small_gains": _free("small_gains", "flag"),
    "ramp": _free("ramp", "flag"),
    "infer": Former("spec", lambda value, spec: spec if value or spec is not None else NO_TABLE, "{}", "never"),
    "no_infer": Former("spec", lambda value, spec: NO_TABLE if value and spec is None else spec, "{}", "flag"),
    "max_shard_size": Former("shards", lambda value, _: f"{value}B" if isinstance(value, int) else value, "{}"),
    "processes": Former("shards", lambda value, _: value, "{}"),
    "data": _method("data"),
    "lessons": _method("steps"),
}


def present(given: Mapping[str, Any], known: Iterable[str], *, shown: Callable[[str], str] = str) -> Values:
    """Return options with those in a former spelling put into the present one; `shown` writes a name as the user did.

    An option is in a former spelling if it is not among the known ones, and its present one is.
    """
    known = set(known)
    result = {name: value for name, value in given.items() if name in known or name not in FORMER}
    for name, value in given.items():
        if name in result or (former := FORMER[name]).now not in known:
            result.setdefault(name, value)
            continue
        if value is None:
            continue
        if name == "width_factor" and result.get("width") is not None:
            raise BadTarget(f"{shown('width')} and {shown(name)} both set the width", "give one of them")
        result[former.now] = former.value(value, result.get(former.now))
        new = value if former.now in ("free", "method") else result[former.now]
        told = getattr(new, "steps", new)
        spelling = former.written.replace("{}", str(told).lower() if isinstance(told, bool) else str(told)[:40])
        warnings.warn(f"{shown(name)} is now {shown(former.now)} {spelling}", Renamed, stacklevel=4)
    return result
