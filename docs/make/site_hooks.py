"""Hooks of mkdocs.yml: notebooks become pages, and brackets in the tables of errors are text."""

from __future__ import annotations

from typing import Any

import nbformat

_NOTEBOOK = ".ipynb"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """A page for every notebook, with what it prints and draws; the notebook itself can be downloaded from there."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(_NOTEBOOK)]:
        name = file.src_uri.removesuffix(_NOTEBOOK)
        files.append(File.generated(config, f"{name}.md", content=as_page(file.content_string, file.name)))
    return files


def as_page(notebook: str, name: str) -> str:
    """A notebook as Markdown."""
    cells = nbformat.reads(notebook, 4).cells
    title, *rest = [part for cell in cells for part in _parts(cell)]
    return "\n\n".join([title, f"[Download this notebook]({name}{_NOTEBOOK}#)", *rest]) + "\n"


def _parts(cell: Any) -> list[str]:
    if cell.cell_type != "code":
        return [cell.source]
    shown = [f"```python\n{cell.source}\n```"]
    for output in cell.outputs:
        if output.output_type == "stream":
            shown.append(f"```text\n{output.text.rstrip()}\n```")
        elif picture := output.data.get("image/png"):
            shown.append(f"![what the cell draws](data:image/png;base64,{''.join(picture.split())})")
    return shown


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A pattern such as [A-Z][a-z] in the row of a table would be read as a link; pages have no links of that form.

    Among the notebooks, links lead to pages.
    """
    lines = (line.replace("][", "]\\[") if line.startswith("|") else line for line in markdown.split("\n"))
    text = "\n".join(lines)
    return text.replace(f"{_NOTEBOOK})", ".md)") if page.file.src_uri.startswith("notebooks/") else text
