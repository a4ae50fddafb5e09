"""The readers under structured damage: no exception but LemonxError in one line, no hang, no memory blow-up."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import fuzzing

RUNS = 150  # of each reader; `make fuzz` takes as many as it is told
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
