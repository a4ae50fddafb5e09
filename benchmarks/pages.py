"""Puts what a benchmark prints into a page, between its markers."""

from __future__ import annotations

import re
from pathlib import Path


def write(path: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.S)
    content, count = pattern.subn(lambda match: match[1] + text + match[2], path.read_text())
    if count != 1:
        raise SystemExit(f"{path} has no markers <!-- {name} --> ... <!-- /{name} -->")
    path.write_text(content)
