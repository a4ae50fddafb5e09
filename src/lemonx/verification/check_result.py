"""The common base of the results of checks: their form as JSON, and figures that NaN cannot pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from lemonx.checkpoints.plain import JsonValue


class CheckResult:
    """A dataclass that is written as JSON with all its fields, and with the properties that `also` names."""

    also: ClassVar[tuple[str, ...]] = ("passed",)

    def as_dict(self) -> dict[str, JsonValue]:
        """The fields and properties by name."""
        return {name: as_json(getattr(self, name)) for name in (*_fields(self), *self.also)}


def as_json(value: Any) -> Any:
    """A value as JSON holds it: dataclasses become objects."""
    if isinstance(value, CheckResult):
        return value.as_dict()
    if is_dataclass(value):
        return {name: as_json(getattr(value, name)) for name in _fields(value)}
    if isinstance(value, Mapping):
        return {name: as_json(part) for name, part in value.items()}
    return [as_json(part) for part in value] if isinstance(value, tuple | list) else value


def _fields(value: Any) -> list[str]:
    return [field.name for field in fields(value)]


def larger(one: float, other: float) -> float:
    """The larger of two numbers, or NaN if either is NaN: comparisons with NaN fail, while max() can drop it.

    >>> larger(0.0, float("nan")), larger(float("nan"), 1.0), larger(2.0, 1.0)
    (nan, nan, 2.0)
    """
    return one if other <= one or one != one else other
