"""Large expansions run in several processes: the same bytes, the same errors, and nothing is left when one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lemonx
import pico
from forkserver import alive
from lemonx.checkpoints.destination import leftovers
from lemonx.errors import BadCheckpoint, BadOutput
from lemonx.execution import compiled, kernels, runner
from lemonx.guards import workers
from lemonx.guards.workers import in_processes


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every expansion runs in processes; filled with how many there were."""
    found: list[int] = []

    def counted(parts, tell):
        found.append(len(parts))
        return in_processes(parts, tell)

    monkeypatch.setattr(runner, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(runner, "in_processes", counted)
    return found


@pytest.mark.parametrize("name", ["llama-tied", "gpt2-lm", "vit-cls", "mixtral"])
def test_processes_write_what_threads_write(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked) -> None:
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    told: list[int] = []
    grow = partial(lemonx.expand, source, width="1.5x", depth="+1", verify=False, shards="100000B")
    grow(tmp_path / "processes", threads=3, progress=told.append)
    monkeypatch.setattr(runner, "WORTH_PROCESSES", 1 << 60)
    grow(tmp_path / "threads", threads=3)
    assert forked == [3]
    files = sorted(path.name for path in (tmp_path / "threads").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "processes" / file).read_bytes() == (tmp_path / "threads" / file).read_bytes()
    assert sum(told) == sum(t.nbytes for file in files for t in load_file(tmp_path / "threads" / file).values())


def test_compiled_loops_write_what_plain_ones_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = pico.save(pico.PICO["llama-tied"](), tmp_path / "source", dtype=torch.bfloat16), []
    for number, loops in enumerate((None, compiled)):
        monkeypatch.setattr(kernels, "_loaded", loops)
        out = tmp_path / str(number)
        lemonx.expand(source, out, width="1.5x", heads="2x", kv_heads="2x", ffn="2x", verify=False)
        made.append((out / "model.safetensors").read_bytes())
    assert made[0] == made[1]


def test_large_expansions_load_the_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_loaded", None)
    kernels.prepare(kernels.WORTH_IT - 1)
    assert kernels.loaded() is None
    kernels.prepare(kernels.WORTH_IT)
    assert kernels.loaded() is compiled


def test_an_error_in_a_process_is_that_of_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    said = []
    for limit in (0, 1 << 60):
        monkeypatch.setattr(runner, "WORTH_PROCESSES", limit)
        with pytest.raises(BadCheckpoint, match="NaN or Inf") as error:
            lemonx.expand(source, tmp_path / "out", width="2x", threads=2, verify=False)
        said.append(str(error.value))
    assert said[0] == said[1] and forked == [2]
    assert not (tmp_path / "out").exists() and not leftovers(tmp_path / "out")


def test_a_killed_worker_is_an_error_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked) -> None:
    source, run = pico.save(pico.PICO["llama-tied"](), tmp_path / "source"), runner._Task.run_alone

    def killed(self, steps, writer, tell):
        if any("layers.1" in step.name for step in steps):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, steps, writer, tell)

    monkeypatch.setattr(runner._Task, "run_alone", killed)
    with pytest.raises(BadOutput, match="--threads 1"):
        lemonx.expand(source, tmp_path / "out", width="2x", threads=2, verify=False)
    assert forked == [2] and not (tmp_path / "out").exists() and not leftovers(tmp_path / "out")


def test_threads_work_where_no_process_is_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked) -> None:
    source, fork, forks = pico.save(pico.PICO["llama-tied"](), tmp_path / "source"), os.fork, []

    def once() -> int:
        forks.append(1)
        if len(forks) > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", once)
    assert lemonx.expand(source, tmp_path / "out", width="2x", threads=2).verified.proven
    assert forked == [2] and len(forks) == 2


def endless(folder: Path, tell: workers.Tell) -> None:
    (folder / str(os.getpid())).touch()
    while True:
        time.sleep(0.01)


def begun(folder: Path, count: int) -> list[int]:
    """The numbers of the workers, once all have begun."""
    limit = time.monotonic() + 60
    while len(found := [int(path.name) for path in folder.iterdir()]) < count:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def assert_ended(pids: list[int]) -> None:
    limit = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parts = [partial(endless, tmp_path)] * 3
    parent = multiprocessing.get_context("fork").Process(target=in_processes, args=(parts, print))
    parent.start()
    pids = begun(tmp_path, 3)
    parent.kill()
    parent.join()
    assert_ended(pids)


def test_the_first_error_ends_all_workers(tmp_path: Path) -> None:
    def fails(tell: workers.Tell) -> None:
        begun(tmp_path, 2)
        raise BadCheckpoint("is broken", "mend it", file="a.safetensors")

    with pytest.raises(BadCheckpoint, match=r"'a.safetensors' is broken: mend it"):
        in_processes([partial(endless, tmp_path), fails, partial(endless, tmp_path)], print)
    assert_ended(begun(tmp_path, 2))


def test_results_are_in_the_order_of_the_parts() -> None:
    told: list[int] = []

    def part(number: int, tell: workers.Tell) -> tuple[int, int]:
        time.sleep(0.05 * (3 - number))
        tell(number)
        return number, os.getpid()

    found = in_processes([partial(part, number) for number in range(3)], told.append)
    assert [number for number, _ in found] == [0, 1, 2] and sorted(told) == [0, 1, 2]
    assert len({pid for _, pid in found} | {os.getpid()}) == 4


def test_a_worker_has_no_workers_of_its_own() -> None:
    assert in_processes([lambda tell: workers.can_fork()], print) == [False]
    assert workers.can_fork()
