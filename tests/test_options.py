"""Every option of every command with absurd values, and memory that runs out: one line and a documented exit code."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from attacks import recipe, result
from commands import Run, assert_shown, runner
from forkserver import Server
from lemonx.cli.app import app

# Numbers of every size, sign and spelling; what is no number; what a terminal or a file system could take amiss.
VALUES = ["-1", "0", "1e5000", "nan", "-inf", "1/0", "1000000000", "9" * 5000, "", "\x1b[31m", "[/x]", "a\nb", "\udcff"]
# A run that is written somewhere is a run: these are no names for a folder.
FEW = {("train", "--output"): ["", "9" * 5000, "a\0b"]}
CODES = {0, 2, 3, 4, 5, 6}
# Exit code 1 is for models that differ, and none of these compares any.
COMMANDS: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "plan": lambda folder: (folder / "source", "--depth", 3),
    "expand": lambda folder: (folder / "source", folder / "out", "--depth", 3, "--no-verify"),
    "shrink": lambda folder: (folder / "source", folder / "out"),
    "verify": lambda folder: (folder / "source", folder / "nothing"),
    "architectures": lambda folder: (),
    "methods": lambda folder: (),
    "fsck": lambda folder: (folder / "source",),
    "infer": lambda folder: (folder / "nothing",),
    "train": lambda folder: (recipe(folder),),
    "recipe": lambda folder: (folder / "source", folder / "source"),
    "compare": lambda folder: ("no-such-experiment",),
    "report": lambda folder: (result(folder),),
    "survey": lambda folder: ("--type", "no-such-type"),
}


def valued() -> Iterator[tuple[str, str]]:
    """Each option that takes a value, by its command, as the parser has them."""
    for command, parsed in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for option in parsed.params:
            if option.param_type_name == "option" and not option.is_flag and not option.hidden:
                yield command, option.opts[0]


def test_the_parser_has_these_commands_and_options() -> None:
    assert set(typer.main.get_command(app).commands) == set(COMMANDS)  # type: ignore[attr-defined]
    assert {("expand", "--threads"), ("recipe", "--steps"), ("compare", "--jobs"), ("plan", "--set")} <= {*valued()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("LEMONX_DEBUG", "1")  # what would be an internal error, exit code 70, is raised here
    return runner(monkeypatch, capfd, tmp_path)


@pytest.mark.parametrize(("command", "option"), valued(), ids="".join)
def test_absurd_values(command: str, option: str, run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(good(), tmp_path / "source")
    words = COMMANDS[command](tmp_path)
    for value in FEW.get((command, option), VALUES):
        for text in (value, f"num_hidden_layers={value}", f"seed={value}") if option == "--set" else (value,):
            done = run(command, *words, option, text)
            _assert_one_line(done.code, done.out, done.err)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)


def _assert_one_line(code: int, out: str, err: str) -> None:
    """A documented exit code, and nothing but one short line where it is not 0."""
    assert code in CODES, (code, err)
    assert_shown(out, err)
    if code:
        (line,) = err.strip().splitlines()
        assert line.startswith("lemonx: ") and len(line) < 2000, err


@pytest.mark.parametrize("command", ["plan", "expand", "fsck", "recipe", "report"])
def test_memory_that_runs_out(
    command: str, server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path
) -> None:
    """Whatever is being done when there is no more of it. With none at all, Python's own threads do not start."""
    shutil.copytree(good(), tmp_path / "source")
    words = COMMANDS[command](tmp_path)
    for limit in (64_000_000, 8_000_000, 3_000_000, 1_000_000):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(tmp_path / "out")
        (tmp_path / "report.html").unlink(missing_ok=True)
        done = server().run(command, *words, limits={"RLIMIT_AS": limit}, cwd=tmp_path, seconds=60)
        _assert_one_line(done.code, done.out, done.err)
