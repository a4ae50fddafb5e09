"""Run the notebooks of docs/notebooks from beginning to end, each in a kernel of its own, and store what they print.

Warnings of other libraries and progress bars are not stored.

python docs/make/notebooks.py [NAME ...]
"""

from __future__ import annotations

import os
import sys

import nbformat
import pages
from nbclient import NotebookClient

FOLDER = pages.ROOT / "docs" / "notebooks"


def main(names: list[str]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        book = nbformat.read(path, 4)
        NotebookClient(book, timeout=1200, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
        book.metadata.language_info = {"name": "python"}  # not of which version, which changes
        for cell in (cell for cell in book.cells if cell.cell_type == "code"):
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(book, path)
        print(f"ran {path.relative_to(pages.ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
