"""A growth that is repeated from its certificate, or from YAML, is the same growth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import pico
from commands import BAD_TARGET, Run, assert_refused, runner

GROWTHS: list[tuple[str, tuple[Any, ...]]] = [
    ("llama-tied", ("--width", "1.5x", "--depth", "+1", "--seed", 7)),
    ("llama-tied", ("--width", 96, "--set", "tie_word_embeddings=false", "--free", "vision")),
    ("llama-head-dim", ("--set", "head_dim=32", "--dtype", "float64")),
    ("bert-mlm", ("--depth", 3, "--free", "{depth_type: 2}")),
    ("t5", ("--depth", 3, "--ffn", "2x")),
    ("gemma3", ("--depth", 4, "--params", "4x")),
    ("resnet-basic", ("--width", "2x")),
    ("mixtral", ("--set", "num_local_experts=8", "--set", "num_experts_per_tok=4")),
    ("llama-untied", ("--set", "model_type=mixtral", "--set", "num_local_experts=4", "--set", "num_experts_per_tok=2")),
    ("gpt2-lm", ("--method", "net2net", "--width", 96)),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def _content(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name not in ("lemonx.json", "README.md")}


@pytest.mark.parametrize(("name", "options"), GROWTHS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_same_growth_again(name: str, options: tuple[Any, ...], run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    first = run("expand", source, "first", *options, "--no-verify")
    assert first.code == 0, first
    again = run("expand", source, "again", "--from", "first/lemonx.json", "--no-verify")
    assert again.code == 0, again
    assert _content(tmp_path / "first") == _content(tmp_path / "again")


def test_a_later_source(run: Run, tmp_path: Path) -> None:
    """The same model, trained on: the certificate's sizes and choices, the new weights, verified."""
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    assert run("expand", source, "first", "--width", 96, "--no-verify").code == 0
    later = shutil.copytree(source, tmp_path / "later")
    weights = {name: tensor * 1.25 for name, tensor in load_file(later / "model.safetensors").items()}
    save_file(weights, later / "model.safetensors", metadata={"format": "pt"})
    done = run("expand", later, "out", "--from", "first", "--json")
    assert done.code == 0 and json.loads(done.out)["verified"]["proven"], done
    assert run("plan", later, "--from", "first").code == 0


def test_yaml_has_the_keys_of_a_recipe(run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    keys = "width: 1.5x\ndepth: 4\nset: {vocab_size: 64}\nseed: 3\nfree: {like: language, phi: 0.02}\ndtype: float64\n"
    (tmp_path / "growth.yaml").write_text(keys)
    said = json.loads(run("plan", source, "--from", "growth.yaml", "--json").out)
    assert said["config"]["hidden_size"] == [48, 72] and said["config"]["vocab_size"][1] == 64
    free = ("--free", "{like: language, phi: 0.02}", "--dtype", "float64", "--seed", 3)
    assert run("expand", source, "a", "--from", "growth.yaml", "--no-verify").code == 0
    sizes = ("--width", "1.5x", "--depth", 4, "--set", "vocab_size=64")
    assert run("expand", source, "b", *sizes, *free, "--no-verify").code == 0
    assert _content(tmp_path / "a") == _content(tmp_path / "b")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "widht: 3", "'widht' is not a key of a growth: did you mean 'width'"),
        ("a.yaml", "width: [1]", "width"),
        ("a.yaml", "- 1", "is not a recipe"),
        ("a.yaml", "seed: 3", "no size was given"),
        ("a.json", "{}", "is not a certificate.*: give a lemonx.json or a YAML file"),
        ("a.json", "{", "is not valid JSON"),
        ("none.json", None, "cannot be read"),
        ("none.yaml", None, "cannot be read"),
    ],
)
def test_files_that_say_no_growth(name: str, text: str | None, says: str, run: Run, tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    if text is not None:
        (tmp_path / name).write_text(text)
    assert_refused(run("plan", source, "--from", name), BAD_TARGET, says)
    assert_refused(run("plan", source, "--from", name, "--depth", 3), BAD_TARGET, "--from says all sizes")
