"""What every command promises: quiet when asked, errors for programs, one line on Ctrl-C, no noise of others."""

from __future__ import annotations

import html
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import faults
import lemonx
from commands import BAD_CHECKPOINT, BAD_OUTPUT, BAD_TARGET, Run, assert_refused, runner, state
from lemonx import errors
from lemonx.guards import phase
from lemonx.guards.others import doing_without, silenced, without_extras

SCRIPT = Path(sys.executable).parent / "lemonx"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def test_what_lemonx_has() -> None:
    assert lemonx.__version__ == importlib.metadata.version("lemonx")
    assert {"expand", "plan", "verify", "fsck", "grow", "Plan", "Expanded", "__version__"} <= set(dir(lemonx))
    assert all(getattr(lemonx, name) is not None for name in dir(lemonx))


def test_quiet(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    for command in (("plan", good(), "--depth", 3), ("expand", good(), "out", "--depth", 3), ("verify", good(), "out")):
        done = run(*command, "-q")
        assert (done.code, done.out, done.err) == (0, "", ""), done
    assert run("fsck", good(), "--quiet").out == ""
    # Errors, and what was asked for as JSON, are printed all the same; and the next command is heard again.
    assert_refused(run("plan", good(), "--depth", 1, "-q"), BAD_TARGET, "would lose layers")
    assert json.loads(run("plan", good(), "--depth", 3, "-q", "--json").out)["lossless"]
    assert run("plan", good(), "--depth", 3).out


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (("plan", "nowhere", "--depth", 3), "BadCheckpoint", BAD_CHECKPOINT),
        (("plan", "GOOD", "--depth", 1), "BadTarget", BAD_TARGET),
        (("fsck", "nowhere"), "BadCheckpoint", BAD_CHECKPOINT),
        (("plan", "GOOD", "--widht", 3), None, BAD_TARGET),
    ],
)
def test_errors_as_json(arguments: Any, kind: str | None, code: int, run: Run, good: Callable[..., Path]) -> None:
    done = run(*(good() if word == "GOOD" else word for word in arguments), "--json")
    error = json.loads(done.out)["error"]
    assert done.code == code == error["exit_code"] and error["kind"] == kind
    assert error["found"] in done.err and error["remedy"] in done.err and len(done.err.splitlines()) == 1


def test_the_help_that_is_named_is_the_command_s_own(run: Run) -> None:
    bare = run()
    assert bare.code == BAD_TARGET and bare.err == "" and "Commands" in bare.out
    assert "did you mean 'plan'? see `" in run("plann").err.lower()
    for words in (("plan", "x", "--widht", 3), ("expand", "x"), ("fsck",)):
        assert f" {words[0]} --help`" in run(*words).err


def test_exit_codes_are_in_the_help(run: Run) -> None:
    said = run("--help").out.partition("Exit codes:")[2]
    every = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert {0, 70, *every} == {int(code) for code in re.findall(r"(?:^|; ) *(\d+) ", " ".join(said.split()))}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    asked = {"COMP_WORDS": "lemonx archi", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "lemonx archi"}
    environment = {**os.environ, **asked, "_LEMONX_COMPLETE": f"complete_{shell}"}
    environment["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "architectures" in done.stdout and "plan" not in done.stdout, done


def test_lists_need_no_heavy_library() -> None:
    """What takes seconds is imported by whoever needs it: this is what keeps these commands near a second."""
    code = "import sys; from lemonx import cli\ntry: cli.main()\nexcept SystemExit: pass\n"
    code += "heavy = {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys(); assert not heavy, heavy"
    for command in ("architectures", "methods"):
        done = subprocess.run(
            [sys.executable, "-c", code, command], capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}
        )
        assert done.returncode == 0 and done.stderr == "", done
        assert max(map(len, done.stdout.splitlines())) <= 80 and "…" not in done.stdout


def test_what_is_not_verified_needs_no_transformers(good: Callable[..., Path], tmp_path: Path) -> None:
    code = "import sys; from lemonx import cli\ntry: cli.main()\nexcept SystemExit as stop: assert not stop.code\n"
    code += "heavy = {'transformers', 'scipy', 'accelerate'} & sys.modules.keys(); assert not heavy, heavy"
    command = [sys.executable, "-c", code, "expand", good(), tmp_path / "out", "--depth", "4", "--no-verify"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "out" / "lemonx.json").exists(), done


def test_a_command_does_without_a_package_only_where_it_says_so() -> None:
    found = []
    with doing_without("graphlib", "json"):  # one that nobody has imported, one that everybody has
        sys.modules.pop("graphlib", None)
        with without_extras():
            found.append((importlib.util.find_spec("graphlib"), sys.modules["json"]))
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module("graphlib")
        assert importlib.import_module("graphlib")
    assert found == [(None, json)] and sys.modules["json"] is json
    sys.modules.pop("graphlib")
    with without_extras():
        assert importlib.import_module("graphlib")


def test_methods_check_names_what_it_lacks_before_it_starts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    began = time.process_time()
    assert_refused(run("methods", "--check"), BAD_TARGET, r"methods --check.*needs the package matplotlib: pip install")
    assert time.process_time() - began < 30  # to check them takes minutes


def test_other_libraries_are_not_heard(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEMONX_DEBUG", raising=False)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    before = dict(os.environ)
    with silenced():
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        logging.getLogger("another.library").warning("mind the gap")
        assert os.environ["TRANSFORMERS_VERBOSITY"] == "info" and os.environ["PYTHONWARNINGS"] == "ignore"
        code = "import warnings; warnings.warn('in a child')"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
    assert dict(os.environ) == before
    assert capfd.readouterr().err == ""


def test_parents_are_created_and_do_not_stay_without_an_output(
    run: Run, good: Callable[..., Path], tmp_path: Path
) -> None:
    assert run("expand", good(), "a/b/out", "--depth", 3, "--no-verify").code == 0
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()
    broken = faults.save_sharded("llama-tied", tmp_path / "broken")
    shard = broken / "model-00004-of-00004.safetensors"
    save_file({name: torch.full_like(t, torch.nan) for name, t in load_file(shard).items()}, shard)
    before = state(tmp_path)
    assert_refused(run("expand", broken, "c/d/out", "--depth", 3, "--no-verify"), BAD_CHECKPOINT, "NaN")
    assert_refused(run("expand", broken, "broken/d/out", "--depth", 3), BAD_OUTPUT, "lies inside the source")
    assert state(tmp_path) == before


def test_a_plan_says_whether_an_output_can_be_written(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    done = run("plan", good(), "a/out", "--depth", 3)
    assert done.code == 0 and "lossless" in done.out and done.out.endswith("can be written, and nothing was\n"), done
    assert json.loads(run("plan", good(), "a/out", "--depth", 3, "--json").out)["lossless"]
    (tmp_path / "taken").write_text("mine")
    assert_refused(run("plan", good(), "taken", "--depth", 3), BAD_OUTPUT, "exists")
    assert_refused(run("plan", good(), "a/out", "--depth", 1), BAD_TARGET, "would lose layers")
    assert state(tmp_path).keys() == {"taken"}


def test_results_show_what_the_command_line_prints(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    """Every public result is short, as text and as a table of a notebook, and says what the command would."""
    source, how = good(), {"width": 96, "free": "inside"}
    expanded = lemonx.expand(source, "large", depth=3, **how)
    broken = shutil.copytree("large", "broken")
    weights = load_file(f"{broken}/model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, f"{broken}/model.safetensors")
    (found,) = (report := lemonx.fsck(broken)).findings
    small, large = (torch.nn.Sequential(torch.nn.Linear(4, n), torch.nn.Linear(n, 3)) for n in (4, 8))
    model = AutoModelForCausalLM.from_pretrained(source)
    results = [
        plan := lemonx.plan(source, depth=3, **how),
        lemonx.shapes(source, "4x")[0],
        expanded,
        expanded.certificate,
        verified := lemonx.verify(source, expanded),
        shrunk := lemonx.shrink("large", "again"),
        report,
        found,
        lemonx.grow(small, large, torch.randn(5, 4)),
        lemonx.grow_in_place(model, torch.optim.AdamW(model.parameters()), depth=3, **how),
    ]
    inputs = (lemonx.Free, lemonx.Lessons)
    known = {getattr(lemonx, name) for name in lemonx.__all__}
    shown = {one for one in known if isinstance(one, type) and not issubclass(one, (Exception, *inputs))}
    assert {type(one) for one in results} == shown
    for one in results:
        text, page = repr(one), one._repr_html_()
        assert 0 < len(text) < 3000 and type(one).__name__ not in text and "\x1b" not in text, text
        assert page.startswith("<table><tr><td") and len(page) < 9000
        assert str(one) == (str(one.path) if isinstance(one, lemonx.Expanded) else text)  # from_pretrained(expanded)
        # A table has what the text has.
        bare = html.unescape(re.sub(r"<[^>]*>", "", page))
        assert re.sub(r"\s", "", bare) == re.sub(r"\s", "", text)
    options = ("--width", 96, "--depth", 3, "--free", "inside")
    for one, arguments in (
        (plan, ("plan", source, *options)),
        (expanded, ("expand", source, "large", *options, "--force")),
        (verified, ("verify", source, "large")),
        (report, ("fsck", broken)),
        (shrunk, ("shrink", "large", "again", "--force")),
    ):
        assert re.sub(r"\s", "", run(*arguments).out) == re.sub(r"\s", "", repr(one))


def test_phases_have_names(good: Callable[..., Path], tmp_path: Path) -> None:
    said = list[str]()
    with phase.told(said.append):
        lemonx.expand(good(), tmp_path / "out", depth=3)
    assert said == [
        f"verifying: {what}" for what in ("every tensor", "every block", "duplicated units", "both models in float64")
    ]


def test_ctrl_c_says_one_thing(server: Callable[[], Any], good: Callable[..., Path], tmp_path: Path) -> None:
    train = ("train", "lm-small", "--output", "run", "--set", "steps=100000")
    for arguments, begun, says in (
        (("expand", good(), "out", "--depth", 400), ".out.lemonx-*", "lemonx: stopped; nothing is half written"),
        (train, "run/run.json", "lemonx: stopped: the same command goes on from .*"),
    ):
        pid = server().start(*arguments, cwd=tmp_path)
        for _ in range(6000):
            if list(tmp_path.glob(begun)):
                break
            time.sleep(0.02)
        os.kill(pid, signal.SIGINT)
        done = server().wait(pid)
        assert done.code == errors.Stopped.exit_code and re.fullmatch(f"{says}\n", done.err), done
    assert not list(tmp_path.glob("*out*"))


def test_workers_end_with_the_process_that_started_them() -> None:
    code = (
        "import multiprocessing as mp, os, time; from concurrent.futures import ProcessPoolExecutor as Pool\n"
        "from lemonx.guards.workers import end_with_parent\n"
        "pool = Pool(1, mp_context=mp.get_context('spawn'), initializer=end_with_parent)\n"
        "print(pool.submit(os.getpid).result(), flush=True); pool.submit(time.sleep, 60).result()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.terminate()
    until = time.monotonic() + 30
    while Path(f"/proc/{worker}/cmdline").exists() and Path(f"/proc/{worker}/cmdline").read_bytes():
        assert time.monotonic() < until, "the worker goes on"
        time.sleep(0.05)


def test_a_config_that_is_given_is_the_one_that_errors_name(
    run: Run, good: Callable[..., Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((good() / "config.json").read_text())
    for wrong in ({**config, "hidden_size": "wide"}, {**config, "model_type": "unheard-of"}):
        (other / "config.json").write_text(json.dumps(wrong))
        for given in (other, other / "config.json"):
            done = run("plan", good(), "--config", given, "--ffn", "+8")
            assert done.code != 0 and str(other / "config.json") in done.err and str(good()) not in done.err, done


def test_paths_are_what_they_say(
    run: Run, good: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces and letters of all kinds, and a home that no shell has put in place of `~`."""
    home = tmp_path / "a höme"
    shutil.copytree(good(), home / "my model")
    monkeypatch.setenv("HOME", str(home))
    done = run("expand", "~/my model", "~/größer", "--depth", "+1", "--no-verify")
    assert done.code == 0 and (home / "größer" / "lemonx.json").exists() and not (tmp_path / "~").exists(), done
    said = " ".join(done.out.split()).partition("`")[2].partition("`")[0]
    assert shlex.split(said)[:2] == ["lemonx", "verify"] and len(shlex.split(said)) == 4
    assert_refused(run("train", "nothere.yaml", "--output", "run"), BAD_TARGET, r"read \(No such file or directory\)")
