"""Puts what a benchmark prints into a page, between its markers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(page: str, name: str, text: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->` in a page of this project."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.S)
    content, count = pattern.subn(lambda match: match[1] + text + match[2], (ROOT / page).read_text())
    if count != 1:
        raise SystemExit(f"{page} has no markers <!-- {name} --> ... <!-- /{name} -->")
    (ROOT / page).write_text(content)


def write_printed(page: str, name: str, lines: list[str]) -> None:
    """The same for lines as they were printed, which keep their columns."""
    write(page, name, "\n".join(["```", *lines, "```"]))
