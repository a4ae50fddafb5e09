"""Tables of a benchmark that pages of the docs show: docs/make/measured.py puts them there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Text by the name of its markers in a page.
TABLES: dict[str, str] = {}


def table(name: str, text: str) -> None:
    """Keep a table in Markdown."""
    TABLES[name] = text


def printed(name: str, lines: Sequence[str]) -> None:
    """Keep lines as they were printed, with their columns."""
    table(name, "\n".join(["```", *lines, "```"]))
