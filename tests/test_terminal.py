"""Whatever a name or a value says, the terminal does not obey: the real commands, over text that wants it to.

`clean` takes our own colours away where a terminal is pretended; what is left must be seen, and be what was there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import attacks
import faults
from commands import BAD_CHECKPOINT, BAD_OUTPUT, BAD_TARGET, Result, Run, assert_shown, runner
from lemonx.guards import terminal
from lemonx.guards.shown import LONGEST, as_code, shown, shown_lines

# Colours of ours, and what a bar does on the terminal: the cursor, its line, one line up.
OURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|2K|1A)|\r")
HOSTILE = [
    *(
        "[red]x[/red]",
        "x[/foo]",
        "[/]",
        "[link=file:///etc/passwd]y[/link]",
        "[@click=app.bell]z[/]",
        ":boom:",
        "\\[x]",
    ),
    *(
        "\x1b]0;title\x07",
        "\x1b[?1049h",
        "\x1bP+q\x1b\\",
        "\x9b5n",
        "\x07\x08\x7f",
        "\x1b[41;5m",
        "a\rb",
        "a\nb",
        "\tx",
    ),
    *("\u202egpj.exe", "\u2066x\u2069", "\u2028", "\u200b", "\ufeff", "\U000e0041", "\x85", "日本語", "e\u0301"),
]
TEXT = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=6), min_size=1, max_size=4).map("".join)
# What may be the name of a file: anything but a slash and a zero, and bytes that are no text too.
NAME = (
    st.lists(TEXT | st.binary(min_size=1, max_size=3).map(os.fsdecode), min_size=1, max_size=3)
    .map(lambda parts: "".join(parts).replace("/", "|").replace("\0", "0"))
    .filter(lambda name: name not in (".", "..") and _size(name) <= 120)
)
OWN = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
PURE = settings(deadline=None)
QUICK = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _size(name: str) -> int:
    try:
        return len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a character, which is no name of a file
        return 1000


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    ready = runner(monkeypatch, capfd, tmp_path)
    monkeypatch.setenv("COLUMNS", "20000")
    return ready


@pytest.fixture(scope="module")
def result_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    return attacks.result(tmp_path_factory.mktemp("result")).read_text()


def clean(result: Result, *, colours: bool = False) -> str:
    """What was printed, after a look at every character of it."""
    printed = result.out + result.err
    printed = OURS.sub("", printed) if colours else printed
    assert_shown(printed)
    assert "Traceback" not in printed and "fault of lemonx" not in printed, printed
    return printed


# ----------------------------------------------------------------- the door itself


@PURE
@given(st.text(st.characters(exclude_categories=())))
def test_what_is_shown_is_one_line_that_is_seen(text: str) -> None:
    assert_shown(shown(text))
    assert "\n" not in shown(text)
    assert_shown(shown_lines(text))
    assert shown_lines(text).count("\n") == text.count("\n")
    if text.isprintable() and len(text) <= LONGEST:
        assert shown(text) == text


@PURE
@given(TEXT)
def test_what_is_shown_can_be_told_from_what_was_there(text: str) -> None:
    """Nothing is taken away: where there is no backslash, Python's own reading gives the text back."""
    if "\\" not in text and not any(ord(c) > 126 for c in text):
        assert shown(text).encode().decode("unicode_escape") == text


def test_long_text_is_cut_in_its_middle() -> None:
    text = shown("the file: " + "x" * 3_000_000 + ": do this")
    assert len(text) < LONGEST and text.startswith("the file: ") and text.endswith(": do this")
    assert re.search(r"\(\d+ characters cut\)", text)


@PURE
@given(TEXT)
def test_markdown_takes_it_as_text(text: str) -> None:
    code = as_code(text)
    fence = re.match("`+", code)
    assert fence is not None and code.endswith(fence[0]) and "\n" not in code
    inside = code[len(fence[0]) : -len(fence[0])]
    assert fence[0] not in re.findall("`+", inside) and shown(text, 200).strip() == inside.strip()


def test_what_other_libraries_print_passes_the_door(capfd: pytest.CaptureFixture[str]) -> None:
    with terminal.guarded(BAD_OUTPUT):
        print("\x1b[31mred", file=sys.stderr)
        sys.stdout.write("a\x07\n")
        sys.stderr.writelines(["b\u202e\n", "c\n"])
    printed = capfd.readouterr()
    assert printed.out == "a\\x07\n" and printed.err == "\\x1b[31mred\nb\\u202e\nc\n"
    assert not isinstance(sys.stdout, terminal._Guard)


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_a_reader_that_leaves_is_no_difference_of_models(more: list[str]) -> None:
    """`lemonx methods | head -0`: exit code 1 would say that two models differ."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "lemonx", "methods", *more], stdout=out, stderr=subprocess.PIPE, text=True, env=OWN
        )
    assert (done.returncode, done.stderr) == (terminal.NO_READER, "")


@pytest.mark.parametrize("more", [[], ["--json"], ["--no-such-option", "--json"]], ids=["table", "json", "error"])
def test_a_full_disk_for_what_is_printed(more: list[str]) -> None:
    with open("/dev/full", "wb") as out:
        command = [sys.executable, "-m", "lemonx", "methods", *more]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=OWN)
    assert done.returncode == BAD_OUTPUT and "No space left on device" in done.stderr
    assert all(line.startswith("lemonx: ") for line in done.stderr.splitlines())


def test_a_full_disk_for_errors_leaves_the_exit_code() -> None:
    """Exit code 1, that of an exception, would say that two models differ."""
    with open("/dev/full", "wb") as out:
        done = subprocess.run([sys.executable, "-m", "lemonx", "fsck", "nowhere"], stdout=out, stderr=out, env=OWN)
    assert done.returncode == BAD_CHECKPOINT


def test_without_a_standard_output_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's `>&-` leaves a process without one."""
    monkeypatch.setattr(sys, "stdout", None)
    with terminal.guarded(BAD_OUTPUT):
        terminal.print_lines("for nobody")
    assert sys.stdout is None


def test_a_locale_without_the_characters(tmp_path: Path) -> None:
    (tmp_path / "日本").mkdir()
    command = [sys.executable, "-m", "lemonx", "fsck", str(tmp_path / "日本")]
    for more, says in (({"PYTHONUTF8": "0"}, rb"\udce6\udc97\udca5"), ({}, rb"\u65e5\u672c: 2 errors")):
        environment = {**OWN, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", **more}
        done = subprocess.run(command, capture_output=True, env=environment)
        assert done.returncode == BAD_CHECKPOINT and done.stderr == b"", done
        assert says in done.stdout and done.stdout.isascii()


# ----------------------------------------------------------------- the commands


@QUICK
@given(name=NAME, colours=st.booleans())
def test_names_of_folders(
    name: str, colours: bool, run: Run, good: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan, expand, fsck and verify of a folder with this name, into another with it."""
    monkeypatch.setenv("FORCE_COLOR", "1") if colours else monkeypatch.delenv("FORCE_COLOR", raising=False)
    folder = tmp_path / "a"
    folder.mkdir(exist_ok=True)
    source, output = folder / name, folder / f"out{name}"
    shutil.copytree(good(), source)
    try:
        for command, says in (
            (("plan", source, "--depth", 3), shown(source)),
            (("expand", source, output, *attacks.GROW), f"wrote {shown(output)}: "),
            (("fsck", source, "--quick"), f"{shown(source)}: clean"),
        ):
            result = run(*command)
            assert result.code == 0, result
            assert says in clean(result, colours=colours)
        again = run("expand", source, output, *attacks.GROW)
        assert shown(repr(str(output))) in clean(again, colours=colours)
        card = (output / "README.md").read_text()
        assert_shown(card)
        assert card.count("\n---\n") == 1 and as_code(name) in card and "base_model" not in card
    finally:
        shutil.rmtree(folder)


@QUICK
@given(text=TEXT, where=st.sampled_from(["model_type", "hidden_act", "architectures", "rope_scaling", "other"]))
def test_keys_and_values_of_a_config(
    text: str, where: str, run: Run, good: Callable[..., Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(good(), source)
    value: Any = {"architectures": [text], "rope_scaling": {text: text}}.get(where, text)
    faults._config(**{text if where == "other" else where: value})(source)
    for command in (("plan", source, "--depth", 3), ("fsck", source, "--quick"), ("architectures", "--why", source)):
        clean(run(*command))


@QUICK
@given(text=TEXT)
def test_names_of_tensors(text: str, run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(good(), source)
    first = source / faults.FIRST
    try:
        save_file({**load_file(first), f"{text}.weight": torch.ones(3)}, first, metadata={"format": "pt"})
    except UnicodeEncodeError:
        return  # half of a character: no file can hold it
    index = json.loads((source / faults.INDEX).read_text())
    index["weight_map"][f"{text}.weight"] = faults.FIRST
    (source / faults.INDEX).write_text(json.dumps(index))
    for command in (("plan", source, "--depth", 3), ("fsck", source, "--quick"), ("architectures", "--why", source)):
        result = run(*command)
        assert shown(text) in clean(result) or not text.isprintable() or "'" in text or "\\" in text, result


@QUICK
@given(text=TEXT, where=st.sampled_from(["task", "config", "data", "key", "--set"]))
def test_values_of_a_recipe(text: str, where: str, run: Run, tmp_path: Path) -> None:
    content: dict[str, Any] = {"task": "causal-lm", "steps": 1, "data": {"kind": "stdlib"}}
    content |= {"config": {"model_type": "gpt2"}, "batch_size": 1, "learning_rate": 1e-3}
    content |= {
        "task": {"task": text},
        "config": {"config": {"model_type": text}},
        "data": {"data": {"kind": text, text: text}},
        "key": {text: text},
        "--set": {},
    }[where]
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    more = ("--set", f"task={text}".replace("\0", "")) if where == "--set" else ()
    try:
        os.fsencode("".join(map(str, more)))
    except UnicodeEncodeError:
        return  # no command line can hold it
    result = run("train", tmp_path / "recipe.yaml", "-o", tmp_path / "out", *more)
    assert result.code in (BAD_TARGET, BAD_CHECKPOINT), result
    clean(result)


@QUICK
@given(text=TEXT, colours=st.booleans())
def test_labels_of_a_result(
    text: str, colours: bool, result_json: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1") if colours else monkeypatch.delenv("FORCE_COLOR", raising=False)
    content = json.loads(result_json)
    content["experiment"] |= {"title": text, "claim": text, "cost": text}
    content["arms"][1]["label"] = f"arm {text}"
    (tmp_path / "result.json").write_text(json.dumps(content))
    result = run("report", tmp_path / "result.json", "-o", tmp_path / "page.html")
    assert result.code == 0, result
    clean(result, colours=colours)
    page = (tmp_path / "page.html").read_bytes().decode("ascii")
    assert_shown(page)
    assert not re.search(r"&#(?:[0-9]|[12][0-9]|3[01]|127|8206|8207|823[4-8]|829[4-7]|5[56]\d{3});", page)


def test_labels_of_a_bar_and_of_a_table(
    result_json: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from lemonx_lab.cli import show_experiments as show
    from lemonx_lab.experiments.pool import Progress
    from lemonx_lab.experiments.result_file import parse

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "20000")
    content = json.loads(result_json)
    for text in HOSTILE:
        with show.progress(quiet=False) as tell:
            tell(Progress(1, 3, 60.0, text))
        printed = capfd.readouterr()
        assert shown(text) in clean(Result(0, printed.out, printed.err), colours=True)
        content["arms"][1]["label"] = content["experiment"]["title"] = text
        show.print_result(parse(content, tmp_path), tmp_path / text.replace("/", "|"))
        printed = capfd.readouterr()
        assert clean(Result(0, printed.out, printed.err), colours=True).count(shown(text)) >= 2


def test_a_name_of_three_megabytes_is_cut(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(good(), source)
    faults._config(**{"model_type": "x" * 3_000_000})(source)
    for command in (("plan", source, "--depth", 3), ("fsck", source, "--quick"), ("architectures", "--why", source)):
        assert len(clean(run(*command))) < 4 * LONGEST
