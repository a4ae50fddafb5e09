"""Two workers share tests as tests/sharing.py says; a release of pytest or xdist that ignores it would only be slow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFTEST = """
import os
from pathlib import Path

import pytest

import sharing


def pytest_xdist_make_scheduler(config, log):
    return sharing.Together(config, log)


@pytest.fixture(autouse=True)
def noted(request):
    with Path(request.config.rootpath, os.environ["PYTEST_XDIST_WORKER"]).open("a") as file:
        print(request.node.nodeid, file=file)
"""
FIXTURE = """
import time

import pytest


@pytest.fixture(scope="module")
def made():
    return 1


@pytest.mark.parametrize("i", range(20))
def test_it(i, made):
    time.sleep(0.01)
"""
MODELS = """
import time

import pytest


@pytest.mark.parametrize("name", [f"m{i // 5}-lm:width-{i}" for i in range(20)])
def test_it(name):
    time.sleep(0.01)
"""


def test_what_is_shared_is_made_in_one_worker(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "tests" / "test_fixture.py").write_text(FIXTURE)
    (tmp_path / "tests" / "test_families.py").write_text(MODELS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**kept, "PYTHONPATH": str(HERE)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "40 passed" in done.stdout, done.stdout
    workers = defaultdict[str, set[str]](set)
    for worker in ("gw0", "gw1"):
        for nodeid in (tmp_path / worker).read_text().split():
            name = nodeid.partition("[")[2].partition(":")[0] if "families" in nodeid else "fixture"
            workers[name].add(worker)
    assert workers.keys() == {"fixture", "m0-lm", "m1-lm", "m2-lm", "m3-lm"}
    assert all(len(found) == 1 for found in workers.values()), workers
