"""The examples do what they say, and docs/errata.md holds what examples/errata.py measures."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
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


def test_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps in place of many: growth changes nothing, every figure said is measured, and the picture is drawn."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    demo = load("demo")

    def trained(folder: Path, runs: dict[str, Any]) -> dict[str, Any]:
        return {name: demo.train(asked, str(folder / name)) for name, asked in runs.items()}

    def command(*arguments: str | Path) -> None:
        assert cli.app([*map(str, arguments)], standalone_mode=False) in (None, 0)

    # Processes of their own would wait for torch again.
    monkeypatch.setattr(demo, "train_all", trained)
    monkeypatch.setattr(demo, "command", command)
    found = demo.main(tmp_path, before=24, after=8)
    curves, said = found["curves"], found["said"]
    small = curves["small"][-1]["validation_loss"]
    for name in ("grown", "small, trained on"):
        assert curves[name][0]["validation_loss"] == pytest.approx(small, abs=1e-5)
        assert curves[name][-1]["step"] == 8 and f"{curves[name][-1]['validation_loss']:.3f}" in said
    spent = {name: curve[-1]["flops"] for name, curve in curves.items()}
    assert spent["from scratch"] == pytest.approx(spent["small"] + spent["grown"], rel=0.1)
    shown = capfd.readouterr().out
    assert "0 still identical" in shown and "validation loss" in shown
    for name, start in (("demo.png", b"\x89PNG"), ("demo.svg", b"<?xml")):
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["loop", "trainer", "accelerate", "lightning"])
def test_a_model_grows_while_it_trains(name: str, tmp_path: Path) -> None:
    """The loss is the same before and after, training goes on, and what is saved is an ordinary checkpoint."""
    example = load("grow_in_place")
    example.GROWTH["verify"] = name == "loop"
    found = example.EXAMPLES[name](tmp_path)
    assert found.after == pytest.approx(found.before, rel=100 * torch.finfo(torch.float32).eps)
    assert found.last < found.after
    last = tmp_path / f"checkpoint-{example.STEPS}" if name == "trainer" else tmp_path
    saved = example.LlamaForCausalLM.from_pretrained(last)
    assert saved.config.hidden_size == 64 and saved.config.num_hidden_layers == 3
    assert example.measured(saved) == found.last
    if name == "trainer":
        # Resumed, without lemonx, from a checkpoint after the growth: moments, schedule and data are all there.
        middle = tmp_path / f"checkpoint-{example.AT + 2}"
        resumed = example.LlamaForCausalLM.from_pretrained(middle)
        running = example.Trainer(resumed, example.settings(tmp_path), train_dataset=example.Counting())
        running.train(resume_from_checkpoint=str(middle))
        assert example.measured(running.model) == pytest.approx(found.last, rel=1e-6)
    if name == "accelerate":
        optimizer = torch.optim.AdamW(saved.parameters())
        optimizer.load_state_dict(torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True))
        kept = [optimizer.state[p]["exp_avg"].shape for p in saved.parameters()]
        assert kept == [p.shape for p in saved.parameters()]
    if name == "lightning":
        held = torch.load(tmp_path / "lightning.ckpt", weights_only=False)
        shapes = {key: value.shape for key, value in saved.state_dict().items()}
        assert {key.removeprefix("model."): value.shape for key, value in held["state_dict"].items()} == shapes
        assert len(held["optimizer_states"][0]["state"]) == len(list(saved.parameters()))
