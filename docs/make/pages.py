"""Puts a text into the page that has its markers, `<!-- name -->` and `<!-- /name -->`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write(name: str, text: str) -> None:
    """Replace the lines between the markers of this name, in the one page that has them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.S)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [page for page in pages if pattern.search(page.read_text())]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} pages have the markers <!-- {name} --> ... <!-- /{name} -->, 1 should")
    content = pattern.sub(lambda match: match[1] + text + match[2], found[0].read_text())
    found[0].write_text(content)
