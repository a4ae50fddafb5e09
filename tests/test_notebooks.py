"""The notebooks are run, cell after cell, at tiny size; what they print was printed by a run of their own."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# What stands for the cell of parameters.
TINY: dict[str, dict[str, Any]] = {
    "grow-a-decoder": {"source": "small", "folder": "."},
    "a-module-of-your-own": {"steps": 30},
    "train-on": {"before": 4, "after": 2, "folder": "runs"},
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "tests" / "data" / "stories260K", tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    names: dict[str, Any] = {}
    for cell in (cell for cell in book.cells if cell.cell_type == "code"):
        if "parameters" in cell.metadata.get("tags", ()):
            exec(cell.source, names)
            assert TINY[path.stem].keys() <= names.keys()
            names |= TINY[path.stem]
            continue
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell.source, str(path), "exec"), names)
        said = [output for output in cell.outputs if output.output_type == "stream"]
        assert bool(said) == bool(printed.getvalue()), cell.source
        assert all(output.output_type != "error" for output in cell.outputs)
    assert "proven" not in names or names["proven"]


def test_what_they_show(tmp_path: Path) -> None:
    """What a reader sees was stored by `make notebooks`, without the names of anybody's folders."""
    assert {path.stem for path in NOTEBOOKS} == TINY.keys()
    for path in NOTEBOOKS:
        text = path.read_text()
        counts = [cell.execution_count for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert counts == list(range(1, len(counts) + 1)), f"{path.name} was changed since it was run: make notebooks"
        assert os.path.expanduser("~") not in text and str(ROOT) not in text
