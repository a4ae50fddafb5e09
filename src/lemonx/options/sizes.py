"""Sizes as people think of them: a number, or in terms of the source's ("1.5x", "+4")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from lemonx.errors import BadTarget
from lemonx.guards.limits import LARGEST

# No exponents, and few digits: Fraction would compute every digit of 1e999999999.
_RATIO = r"([0-9]{1,7})(\.[0-9]{0,20}|/0*[1-9][0-9]{0,6})?"
WANTED = "want a number, a ratio such as 1.5x or 3/2x, or +4 for four more"


@dataclass(frozen=True)
class Relative:
    """So many times the source's size, and then so many more.

    >>> Relative(times=Fraction(3, 2)).of(48), str(Relative(plus=4))
    (Fraction(72, 1), '+4')
    """

    times: Fraction = Fraction(1)
    plus: int = 0

    def of(self, before: int | float) -> Fraction:
        return self.times * Fraction(before) + self.plus

    def __str__(self) -> str:
        return f"+{self.plus}" if self.plus else f"{self.times}x"


AskedSize = int | Relative
# The largest file, in bytes, if nothing is said.
SHARD = 5 * 10**9
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_ratio(text: str) -> Fraction | None:
    """A ratio such as 2, 1.5 or 3/2; None if it is none."""
    return Fraction(text).limit_denominator(4096) if re.fullmatch(_RATIO, text) else None


def parse_count(text: str) -> int | None:
    """A large number as people write it; None if it is none.

    >>> parse_count("1.5B"), parse_count("350 m"), parse_count("many")
    (1500000000, 350000000, None)
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMBGT]?)", text.strip().upper())
    return int(Fraction(match[1]) * _UNITS[match[2]]) if match else None


def parse_shards(shards: int | str) -> tuple[int, int | None]:
    """Return the bytes of the largest file, and the number of processes if that is what was given.

    >>> parse_shards("500MB"), parse_shards(8)
    ((500000000, None), (5000000000, 8))
    """
    text = str(shards).strip().upper()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return SHARD, int(text)
    match = re.fullmatch(r"([0-9]{1,18}) ?([KMGT]?)B", text)
    if match is None or int(match[1]) == 0:
        raise BadTarget(f"--shards {text[:40]} is not a size", "write it as 500MB or 5GB")
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[match[2]], None


def parse_size(option: str, value: int | str | None) -> AskedSize | None:
    """A size as it is given: 768, "768", "1.5x", "+4".

    >>> parse_size("depth", "12"), parse_size("depth", "2x")
    (12, Relative(times=Fraction(2, 1), plus=0))
    """
    size = _parsed(option, value)
    least = 1 + size.plus if isinstance(size, Relative) else size
    if least is not None and not 1 <= least <= LARGEST:
        bound = "at least 1" if least < 1 else f"at most {LARGEST}"
        raise BadTarget(f"{option} {str(value)[:40]} is out of range", f"use {bound}")
    return size


def _parsed(option: str, value: int | str | None) -> AskedSize | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    text = str(value).strip().lower()
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,12}", text):
        return int(text)
    if isinstance(value, str) and re.fullmatch(r"\+[0-9]{1,12}", text):
        return Relative(plus=int(text))
    ratio = parse_ratio(text[:-1]) if isinstance(value, str) and text.endswith("x") else None
    if ratio is None:
        raise BadTarget(f"{option} is {str(value)[:40]}", WANTED)
    if ratio < 1:
        raise BadTarget(f"{option} {value} is less than 1x", "lemonx only grows models, so use at least 1x")
    return Relative(times=ratio)
