"""Attacks: one line, the exit code, no control character on the terminal, and nothing else touched.

Where a pipe would hang it, or a device or a number would fill it, a command runs in a process with limits of memory and
of time, and takes little of either.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks import FILES, Attack, row
from attacks_of_size import ATTACKS, RUN, SIZE
from commands import Result, Run, assert_refused, assert_shown, runner, state
from forkserver import Server

# What a run may take: CPU seconds, for the machine may be busy; what takes none and goes on is a hang. None of them
# takes more than 2 on an idle core, and one that had its way would take minutes.
SECONDS, HANG, MEMORY = 20, 120, 500_000_000
DOCUMENT = Path(__file__).parents[1] / "docs" / "guarantees.md"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    ready = runner(monkeypatch, capfd, tmp_path)
    monkeypatch.setenv("COLUMNS", "9999")
    return ready


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack(
    attack: Attack, run: Run, server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(good(), tmp_path / "source")
    command = attack.prepare(tmp_path)
    before = state(tmp_path)
    if attack.kind in (FILES, SIZE, RUN):
        done = server().run(*command, seconds=HANG, limits={"RLIMIT_AS": 2 * MEMORY}, environment={"COLUMNS": "9999"})
        assert done.seconds < SECONDS and done.grown < MEMORY, (done.seconds, done.grown)
    else:
        done = run(*command)
    assert_shown(done.out, done.err)
    assert len(done.out) + len(done.err) < 20_000
    if attack.writes is None:
        assert_refused(Result(done.code, done.out, done.err), attack.code, attack.says)
    else:
        assert done.code == 0, done.err
        assert re.search(attack.says, done.out), done.out
        assert (tmp_path / attack.writes).exists()
    line = row(attack, done.code, done.out if attack.writes else done.err, tmp_path)
    assert f"\n{line}\n" in DOCUMENT.read_text(), f"run `make guarantees`, then read the diff: {line}"
    after = state(tmp_path)
    written = set() if attack.writes is None else {name for name in after if name.startswith(attack.writes)}
    assert {name: digest for name, digest in after.items() if name not in written} == before


def test_the_document_lists_these_and_no_others() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    listed = DOCUMENT.read_text().partition("<!-- attacks -->")[2].partition("<!-- /attacks -->")[0]
    rows = [line for line in listed.splitlines() if line.startswith("| ") and not line.startswith("| attack")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows] == names
