"""What mkdocs.yml adds to the pages: brackets in the tables of errors are text, not references."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A pattern such as [A-Z][a-z] in the row of a table would be read as a link; pages have no links of that form."""
    lines = (line.replace("][", "]\\[") if line.startswith("|") else line for line in markdown.split("\n"))
    return "\n".join(lines)
