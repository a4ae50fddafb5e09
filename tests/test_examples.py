"""The examples do what they say, and docs/errata.md holds what examples/errata.py measures."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lemonx import cli

ROOT = Path(__file__).resolve().parents[1]
# Below this a figure is rounding, and differs from machine to machine.
ROUNDING = 1e-12


def test_what_a_benchmark_writes_is_there() -> None:
    """Every place that a page keeps for a benchmark's figures has some."""
    found = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        opened = re.findall(r"^<!-- (\w+) -->$", text, re.M)
        filled = re.findall(r"^<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->$", text, re.M | re.S)
        closed = re.findall(r"^<!-- /(\w+) -->$", text, re.M)
        assert opened == closed == [name for name, _ in filled], page
        found += len(filled)
        for name, content in filled:
            assert re.search(r"\d", content), f"{page.name}: {name}"
    assert found


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


errata = load("errata")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def doc_rows() -> dict[str, list[str]]:
    """The rows of the tables in docs/errata.md, by their first cell."""
    lines = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {first.strip(): rest for first, *rest in cells}


def assert_printed(value: float, text: str) -> None:
    """The document prints this value: to one significant digit, or both are rounding."""
    printed = float(text)
    if max(value, printed) > ROUNDING:
        assert math.isclose(value, printed, rel_tol=0.1), f"measured {value:.2g}, docs/errata.md says {text}"


@pytest.mark.parametrize("function", errata.ERRATA, ids=lambda function: function.__name__)
def test_errata(function: Any, tmp_path: Path) -> None:
    documented = doc_rows()
    for erratum in function(tmp_path):
        assert erratum.corrected_error <= erratum.bound, erratum
        assert erratum.printed_error >= max(1e-3, 1e3 * erratum.corrected_error), erratum
        model, printed, printed_error, corrected, corrected_error = documented[erratum.name]
        assert (model, printed, corrected) == (erratum.model, erratum.printed, erratum.corrected)
        assert_printed(erratum.printed_error, printed_error)
        assert_printed(erratum.corrected_error, corrected_error)


def test_uneven_copies_and_adam(tmp_path: Path) -> None:
    documented = doc_rows()
    even, uneven, vision, language = errata.symmetry(tmp_path)
    for apart in (even, uneven, vision, language):
        for value, text in zip((apart.sgd, apart.adam, apart.adam_later), documented[apart.split], strict=True):
            assert_printed(value, text)
    assert even.sgd == even.adam == even.adam_later == 0
    assert uneven.sgd > 0.5 and uneven.adam < 2e-3
    assert min(vision.adam, language.adam) > 0.5


def test_every_erratum_is_documented(tmp_path: Path) -> None:
    """No row of the document is left over from an older script."""
    source = (ROOT / "examples" / "errata.py").read_text(encoding="utf-8")
    headings = {"id", "---", "split of the fan-out"}
    for name in doc_rows().keys() - headings:
        assert name.removesuffix("-1e-12").removesuffix("-1e-05") in source, name


def run(real: Any, command: str, *arguments: str | Path) -> None:
    """Only `plan` as a process of its own: the others would wait for torch again."""
    if command == "plan":
        return real(command, *arguments)
    print(f"$ lemonx {command}")
    assert cli.app([command, *map(str, arguments)], standalone_mode=False) in (None, 0)


def test_digits(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs in place of twenty: the claims about the expansion hold for any source."""
    monkeypatch.setenv("COLUMNS", "130")  # what the example would set for the whole process
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    digits = load("digits")
    monkeypatch.setattr(digits, "run", partial(run, digits.run))
    found = digits.main(tmp_path, epochs=2, more=1)
    assert found["after"] == found["before"]
    assert found["loss_after"] == pytest.approx(found["loss_before"], abs=1e-5)
    assert found["float32"] < 1e-4 and found["float64"] < 1e-5 and found["in_memory"] < 1e-12
    assert found["parameters_after"] > 4 * found["parameters_before"]
    assert found["copied"] == 0 and found["separated"] > 0.01
    assert found["loss_trained"] < found["loss_before"]
    shown = capfd.readouterr().out
    for line in ("$ lemonx plan", "$ lemonx expand", "$ lemonx verify", "0 still identical", "the same function"):
        assert line in shown, line
    assert {path.name for path in tmp_path.iterdir()} == {"small", "large", "trained"}
