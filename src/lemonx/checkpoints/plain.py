"""Parses all JSON that lemonx reads, whether from a file or from an option.

json.loads accepts nesting, numbers and texts that break the code which works on them next, and silently keeps the last
of two equal keys. The result of this parser is safe: no deeper than `MAX_DEPTH`, no number that cannot be printed, no
text that cannot be written, and not so large that memory runs out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import TypeAliasType

from lemonx.guards.shown import one_line

# What a JSON text can say; of sequences and mappings, so that a list of whole numbers is one too.
JsonValue = TypeAliasType(
    "JsonValue", "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)

# The deepest file of a real model has about ten levels; Python's own functions fail at some hundreds.
MAX_DEPTH = 64
# Tokenizers say 10**30 for "no limit". The product of a hundred such numbers can still be printed.
_LARGEST = 10**40
# Half of a pair of code units. Those that stand for a byte of a file's name that is no text are kept: it is written so.
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
# A header of 300,000 tensors has about 3 million; ten times that many would take gigabytes.
_MAX_PARTS = 4_000_000


def parse_json(raw: bytes | str) -> Any:
    """The content of a JSON text; ValueError, with a reason in one line, if it cannot be read or is not safe."""
    content = parse_flat(raw)
    require_plain(content)
    return content


def parse_flat(raw: bytes | str, *, repeats: bool = False) -> Any:
    """The same, without checks of single values: for callers that check every value themselves, or use none.

    `repeats`: a key may come twice.
    """
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        if sum(text.count(mark) for mark in ",[{") > _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} parts")
        return json.loads(text, object_pairs_hook=None if repeats else _without_repeats)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(one_line(error)) from None


def require_plain(content: Any) -> None:
    """ValueError if a value is not of a JSON type, or is a number or text of extraordinary size."""
    level = [content]
    for _ in range(MAX_DEPTH):
        inside: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inside += value.keys()
                inside += value.values()
            elif isinstance(value, list):
                inside += value
            else:
                _require_scalar(value)
        if not inside:
            return
        level = inside
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _require_scalar(value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii() and _HALF.search(value):
            raise ValueError("a text in it holds half of a character")
    elif isinstance(value, int):
        if abs(value) > _LARGEST:
            raise ValueError(f"a number in it has more than {len(str(_LARGEST)) - 1} digits")
    elif value is not None and not isinstance(value, float):
        raise ValueError(f"it holds a {type(value).__name__}, which is neither text nor a number: put it in quotes")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"the key {next(_repeated(pairs))[:200]!a} comes twice")
    return result


def _repeated(pairs: list[tuple[str, Any]]) -> Iterator[str]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            yield key
        seen.add(key)
