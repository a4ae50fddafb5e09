"""Shapes for a number of parameters: near it, near the source's proportions, lossless, and what their options say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import lemonx
import pico
from commands import Run, runner
from lemonx.errors import BadTarget
from lemonx.planning.summary import parameters

MODELS = [
    "llama-tied",
    "qwen3",
    "gemma3",
    "mixtral",
    "bert-mlm",
    "t5",
    "whisper",
    "resnet-basic",
    "swin-cls",
    "vit-cls",
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_proposed(name: str, run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    for budget in (2, 5):
        found = lemonx.shapes(source, f"{budget}x")
        before = parameters(found[0].plan)[0]
        assert found == sorted(found, key=lambda shape: shape.flops)
        for shape in found:
            assert shape.plan.policy.lossless and shape.parameters > before
            assert 0.5 <= shape.proportion <= 2.001 or len(found) == 1
            # The options alone say it all.
            said = run("plan", source, *shlex.split(shape.options), "--json")
            assert json.loads(said.out)["parameters"][1] == shape.parameters, (shape.options, said)
        close = [abs(shape.parameters / (budget * before) - 1) for shape in found]
        assert max(close) <= 0.1 or len(found) <= 3, close


def test_expand_takes_the_first(run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    first = lemonx.shapes(source, "4x")[0]
    done = run("expand", source, "out", "--params", "4x", "--json")
    certificate = json.loads(done.out)
    assert done.code == 0 and certificate["verified"]["proven"], done
    assert certificate["target"]["parameters"] == first.parameters
    table = run("plan", source, "--params", "4x").out
    assert first.options in table.splitlines()[2] and "takes the first" in table
    assert lemonx.plan(source, params=4 * certificate["source"]["parameters"]).target_config == first.plan.target_config


def test_a_size_that_is_given_stays(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    assert {shape.plan.target_config["num_hidden_layers"] for shape in lemonx.shapes(source, "4x", depth=4)} == {4}
    assert {shape.plan.target_config["hidden_size"] for shape in lemonx.shapes(source, "4x", width=72)} == {72}
    with pytest.raises(BadTarget, match="not more than the source's"):
        lemonx.shapes(source, "1x")


def test_set_has_one_name(run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    grown = {"intermediate_size": 200}
    new, old = lemonx.plan(source, set=grown), lemonx.plan(source, fields=grown)
    assert new.target_config == old.target_config and new.target_config["intermediate_size"] == 200
    said = json.loads(run("plan", source, "--set", "intermediate_size=200", "--json").out)
    assert said["config"]["intermediate_size"] == [100, 200]
