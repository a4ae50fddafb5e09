"""What all options and recipes share."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator


class Strict(BaseModel):
    """The base class of options: unknown keys are errors, and so is `true` in place of a number or a text."""

    # What a file of these keys is called.
    called: ClassVar[str] = "a growth"
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError(f"want a value, not {str(value).lower()}")
        return value


def first_problem(error: ValidationError, whole: type[Strict]) -> tuple[str, str]:
    """What is wrong with a file of keys and values, and what to do."""
    # A key that nobody knows explains the key that is missing.
    found = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")[0]
    where = tuple(part for part in found["loc"])
    key = ".".join(map(str, where))
    if found["type"] == "extra_forbidden":
        known = _known(where[:-1], whole)
        near = difflib.get_close_matches(str(where[-1])[:80], known, n=1, cutoff=0.5)
        return (
            f"{key!r} is not a key of {whole.called}",
            f"did you mean {near[0]!r}?" if near else f"try {sorted(known)}",
        )
    if found["type"] == "missing":
        return f"{key!r} is missing", "add it"
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "value_error":
        return f"{key}: {message}" if key else message, ""
    value = repr(found["input"])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{key}: {message[0].lower()}{message[1:]}, not {value}", ""


def _known(where: tuple[Any, ...], whole: type[BaseModel]) -> list[str]:
    """The keys that a file has at a place such as ("expand",) or ("stages", 1, "expand")."""
    for name in (part for part in where if isinstance(part, str)):
        whole = next(_models(whole.model_fields[name].annotation))
    return [field.alias or name for name, field in whole.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
