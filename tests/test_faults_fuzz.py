"""The readers, and the commands, under structured damage: one line or an answer, no hang, no memory blow-up."""

from __future__ import annotations

import collections
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import fuzzing
import fuzzing_cases
import fuzzing_folders
from forkserver import Done
from fuzzing_folders import Arena, Case

# Of each reader, and of the commands together; `make fuzz` takes as many as it is told.
RUNS, FOLDERS = 100, 120
# A file of a few hundred bytes needs no more than this, whatever it claims.
MEMORY = 5_000_000


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_damage_is_refused_or_read(name: str, tmp_path: Path) -> None:
    target, seen = fuzzing.TARGETS[name], collections.Counter[bool]()
    good = target.prepare(tmp_path / "model")
    assert fuzzing.run(target, tmp_path / "model", good) == "read"

    @settings(max_examples=RUNS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(raw=fuzzing.damaged(target, good))
    def fuzz(raw: bytes) -> None:
        seen[fuzzing.run(target, tmp_path / "model", raw, memory=MEMORY) == "read"] += 1

    fuzz()
    # The draws are damage, and not so wild that nothing gets past the first check.
    assert seen[False] > RUNS / 2 and sum(seen.values()) >= RUNS


def test_folders(tmp_path: Path) -> None:
    """A share of `make fuzz` for every kind of file, through the command line, each run watched from outside."""
    arena, codes = Arena(tmp_path / "arena"), collections.Counter[int]()
    server = arena.serve()
    for target, share in fuzzing_cases.SHARES.items():

        @settings(
            max_examples=share.runs * FOLDERS // 100,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=fuzzing_cases.cases(arena, target))
        def fuzz(case: Case) -> None:
            ended = arena.run(server, case, kept=True)
            assert not ended.problems, (ended.problems, ended.done, case.as_json()[:5000])
            codes[ended.done.code] += 1

        fuzz()
    server.close()
    assert not arena.changed()
    # Some get past every check, and the others are refused for more than one reason.
    assert codes[0] > FOLDERS / 20 and codes[2] > FOLDERS / 20 and codes[3] > FOLDERS / 20, codes


def test_what_a_run_may_not_do_is_seen(tmp_path: Path) -> None:
    """The watch is awake: a traceback, two lines, an exit code, a control character, a file, memory and time."""
    case = Case("config", ("expand", "models/x/source", "out/x"))
    good = Done(3, "", "lemonx: no\n")
    bad = [
        replace(good, err="Traceback (most recent call last):\n"),
        replace(good, err="lemonx: a\nlemonx: b\n"),
        replace(good, code=70),
        replace(good, code=-9),
        replace(good, err="lemonx: \x1b[31m\n"),
        replace(good, seconds=fuzzing_folders.SECONDS + 1),
        replace(good, grown=fuzzing_folders.MEMORY + 1),
    ]
    assert not list(fuzzing_folders._misbehaved(case, good))
    assert all(list(fuzzing_folders._misbehaved(case, done)) for done in bad)
    (tmp_path / "out").mkdir()
    before = fuzzing_folders._listing(tmp_path)
    for name in ("a", "out/a", "out/x"):
        (tmp_path / name).write_text("")
        touched = list(fuzzing_folders._touched(before, fuzzing_folders._listing(tmp_path), case, good))
        assert touched == [f"touched {name}"]
        (tmp_path / name).unlink()
    (tmp_path / "out" / "x").write_text("")
    assert not list(fuzzing_folders._touched(before, fuzzing_folders._listing(tmp_path), case, replace(good, code=0)))
