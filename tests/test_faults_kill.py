"""kill -9 at random moments: OUTPUT is absent, or what it was, or whole and verified; the next start clears up.

Each run is a real `lemonx expand` process (a fork of a warmed one), which is killed in a phase drawn beforehand, at a
random moment in it. What the phase was is read off the disk afterwards:

    planning    nothing beside OUTPUT yet
    writing     a hidden folder beside it, with tensors
    verifying   config.json is there too: the tensors are complete, and the models are run
    finishing   the certificate is there too: fsync, headers read back, the rename
    done        the process was faster, and no kill: OUTPUT is there
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

import faults
import lemonx
from commands import state
from forkserver import Server, alive
from lemonx.checkpoints.destination import leftovers
from lemonx.checkpoints.temporary import Temporary

KILLS = 36  # half of them with an OUTPUT that is to be replaced
RUN_KILLS = 6
POLL = 0.0005
PHASES = ("planning", "writing", "verifying", "finishing")
# Some megabytes in many shards, so that no phase is too short to be hit.
GROW = ("--width", 72, "--depth", 3, "--ffn", 600, "--shards", "100KB", "--threads", 1)


def phase(output: Path) -> str:
    """Where a run is, by what is on disk; with an old output in place, `done` cannot be told from before."""
    for folder in leftovers(output):
        if (folder / "lemonx.json").exists():
            return "finishing"
        return "verifying" if (folder / "config.json").exists() else "writing"
    return "planning"


def durations(server: Server, source: Path, output: Path) -> dict[str, float]:
    """How long each phase takes when nothing disturbs it."""
    began, spent, last = time.perf_counter(), dict.fromkeys(PHASES, 0.0), "planning"
    pid = server.start("expand", source, output, *GROW)
    while alive(pid):
        now = phase(output)
        if now != last and PHASES.index(now) > PHASES.index(last):
            spent[last], began, last = time.perf_counter() - began, time.perf_counter(), now
        time.sleep(POLL)
        if output.exists():
            break
    spent[last] = time.perf_counter() - began
    assert server.wait(pid).code == 0
    return spent


def kill(server: Server, arguments: tuple[object, ...], output: Path, wanted: str, delay: float) -> str:
    """Start a run, wait for a phase of it, wait `delay` seconds more, kill it; the phase it was then in."""
    before = set(leftovers(output))
    pid = server.start(*arguments)
    while wanted != "planning" and alive(pid):
        fresh = set(leftovers(output)) - before
        if fresh and PHASES.index(phase(output)) >= PHASES.index(wanted):
            break
        time.sleep(POLL)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    done = server.wait(pid)
    assert done.code in (0, -signal.SIGKILL), done.err
    if done.code == 0:
        return "done"
    return phase(output) if set(leftovers(output)) - before else "planning"


def test_nothing_that_looks_whole_is_left_unless_it_is(
    server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, source = tmp_path / "out", good()
    before = state(source)
    spent = durations(server(), source, output)
    whole = state(output)
    certificate = json.loads((output / "lemonx.json").read_text())
    assert certificate["verified"]["outputs"]["passed"] and len(whole) > 20
    shutil.copytree(source, tmp_path / "old")
    old = state(tmp_path / "old")
    draw, seen = random.Random(0), collections.Counter[str]()
    killed = 0
    while killed < KILLS:
        replaces = killed >= KILLS // 2
        if not replaces:
            shutil.rmtree(output, ignore_errors=True)
        elif not output.exists() or state(output) != old:
            shutil.rmtree(output, ignore_errors=True)
            shutil.copytree(tmp_path / "old", output)
        wanted = PHASES[killed % len(PHASES)]
        arguments = ("expand", source, output, *GROW, *(["--force"] if replaces else []))
        found = kill(server(), arguments, output, wanted, draw.uniform(0, 0.8 * spent[wanted]))
        seen[found] += 1
        killed += found != "done"
        assert seen["done"] < 2 * KILLS
        # Whole and verified, or what was there before; and no more than one hidden folder, as each start clears up.
        assert (state(output) in (old, whole)) if replaces else (not output.exists() or state(output) == whole)
        assert len(leftovers(output)) <= 1
    shutil.rmtree(output)
    done = server().run("expand", source, output, *GROW)
    assert done.code == 0, done.err
    assert state(output) == whole and sorted(os.listdir(tmp_path)) == ["old", "out"]
    assert state(source) == before
    with capsys.disabled():
        print(f"\n{killed} kills: " + ", ".join(f"{seen[name]} {name}" for name in (*PHASES, "done")))
    assert all(seen[name] for name in PHASES)


def test_two_at_once(server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path) -> None:
    """Two runs to the same output: neither takes the other's folder for a leftover, and one of them wins."""
    output = tmp_path / "out"
    started = [server().start("expand", good(), output, *GROW) for _ in range(2)]
    done = [server().wait(pid) for pid in started]
    assert sorted(run.code for run in done) == [0, 5], done
    loser = next(run for run in done if run.code)
    assert "was created by someone else meanwhile" in loser.err or "exists" in loser.err
    assert os.listdir(tmp_path) == ["out"] and (output / "lemonx.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_leaves_nothing_that_counts(
    number: signal.Signals, server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path
) -> None:
    """Ctrl-C cleans up and says so; SIGTERM and SIGHUP end the process at once, and the next start cleans up."""
    output = tmp_path / "out"
    pid = server().start("expand", good(), output, *GROW)
    while not leftovers(output):
        assert alive(pid)
    os.kill(pid, number)
    done = server().wait(pid)
    assert not output.exists()
    if number == signal.SIGINT:
        assert done.code == 130 and done.err.strip() == "lemonx: stopped; nothing is half written"
        assert os.listdir(tmp_path) == []
    else:
        assert done.code == -number and len(leftovers(output)) == 1
        assert server().run("expand", good(), output, *GROW, "--no-verify").code == 0
        assert os.listdir(tmp_path) == ["out"]


def test_pickles_are_read_without_a_copy(
    good: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--allow-pickle` makes no temporary folder, so that a kill leaves nothing there."""
    source = tmp_path / "source"
    shutil.copytree(good(), source)
    faults.as_pickles(source)
    monkeypatch.setattr(Temporary, "__init__", lambda *given, **options: pytest.fail("a temporary folder is made"))
    lemonx.expand(source, tmp_path / "out", width=72, allow_pickle=True, verify=False)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_run_is_whole_whenever_its_growth_is_killed(
    server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path
) -> None:
    """A distributed checkpoint, weights and moments: OUTPUT is absent or whole, and SOURCE is never touched."""
    run, output = distributed(good(), tmp_path / "run"), tmp_path / "out"
    before, options = state(run), (*GROW, "--with-optimizer", "--no-verify", "--shards", 3)
    began = time.perf_counter()
    assert server().run("expand", run, output, *options).code == 0
    spent, whole, draw = time.perf_counter() - began, state(output), random.Random(1)
    for number in range(RUN_KILLS):
        shutil.rmtree(output, ignore_errors=True)
        wanted = ("planning", "writing", "finishing")[number % 3]
        kill(server(), ("expand", run, output, *options), output, wanted, draw.uniform(0, 0.1 * spent))
        assert not output.exists() or state(output) == whole
        assert state(run) == before and len(leftovers(output)) <= 1
    shutil.rmtree(output, ignore_errors=True)
    assert server().run("expand", run, output, *options).code == 0
    assert state(output) == whole and sorted(os.listdir(tmp_path)) == ["out", "run"]


def distributed(source: Path, folder: Path) -> Path:
    """The same weights as a run saves them, with Adam's moments."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)
    shutil.copy(source / "config.json", folder)
    return folder
