"""A plan is run block by block: the blocks fit together, bad numbers stop it, and jobs are made as they are done."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lemonx
import pico
from lemonx.algebra.expansions import expansion, identity
from lemonx.algebra.free_parameters import PRESETS
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT, Matrix
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint
from lemonx.execution import matrix, noise, row_readers, runner
from lemonx.execution.matrix import Reader
from lemonx.fsdp import bytes_read
from lemonx.options.declared import Growth
from lemonx.planning.plan import make_plan
from lemonx.planning.request import asked

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


# A Llama; weights that are kept transposed; a table with leading axes and mean rows; added blocks that cancel; experts
# that are kept as (experts, in, out), where blocks reach from one into the next.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama-tied", {"width": 72, "depth": 3}),
        ("gpt2-lm", {"width": 72, "depth": 3}),
        ("vit-cls", {"width": 72, "depth": 3, "free": {"depth_type": 2}}),
        ("gpt-oss", {"width": 72, "depth": 3}),
    ],
)
def test_many_small_blocks(name: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_readers, "BLOCK", 5000)
    monkeypatch.setattr(row_readers, "STRIP", 3000)
    source = pico.save(pico.PICO[name](), tmp_path / "source")
    lemonx.expand(source, tmp_path / "one", threads=1, **sizes)  # verified
    lemonx.expand(source, tmp_path / "three", threads=3, verify=False, **sizes)
    one, three = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "three"))
    assert one.keys() == three.keys()
    for key, tensor in one.items():
        assert tensor.numpy().tobytes() == three[key].numpy().tobytes(), key


def test_experts_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds one expert of a tensor (experts, in, out) makes that one, of the source's expert alone."""
    monkeypatch.setattr(row_readers, "BLOCK", 500)
    monkeypatch.setattr(row_readers, "SAMPLE", 1)  # and one expert tells the size of the noise
    source, read = pico.save(pico.PICO["gpt-oss"](), tmp_path / "source"), dict[str, int]()
    lemonx.expand(source, tmp_path / "whole", verify=False, width=72)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    with Checkpoint.open(source) as checkpoint:
        plan = make_plan(checkpoint, asked(Growth(width=72)))
        experts = [step for step in plan.steps if len(step.shape) == 3]
        assert {row_readers.tables(step.shape) for step in experts} == {4}
        original = Checkpoint.read

        def counted(self: Checkpoint, name: str, *where: Any, **options: Any) -> torch.Tensor:
            found = original(self, name, *where, **options)
            read[name] = read.get(name, 0) + found.nbytes
            return found

        monkeypatch.setattr(Checkpoint, "read", counted)
        held = dict[str, torch.Tensor]()
        runner.run_plan(
            replace(plan, steps=tuple(experts)), checkpoint, Kept(held), wanted=lambda step: range(2, 3), threads=1
        )
    for step in experts:
        assert held[step.name].numpy().tobytes() == whole[step.name][2:3].numpy().tobytes()
        assert read[step.source] == bytes_read(plan, step, range(2, 3)) < plan.tensors[step.source].nbytes


@dataclass
class Kept:
    """Keeps the one expert of each tensor that is written, strip after strip."""

    held: dict[str, torch.Tensor]

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        assert start == 2
        before = self.held.get(name, values[..., :0])
        assert before.shape[-1] == column
        self.held[name] = torch.cat([before, values], -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_are_found(dtype: torch.dtype) -> None:
    kind = torch.finfo(dtype)
    fine = torch.tensor([0.0, -0.0, kind.max, kind.min, kind.tiny, -kind.tiny, 1.0, -1.0] * 40, dtype=dtype)
    row_readers.check_finite(fine, "w")
    row_readers.check_finite(fine[:0], "w")
    for position in (0, 77, 319):
        for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
            broken = fine.clone()
            broken[position] = bad
            with pytest.raises(BadCheckpoint, match="w holds NaN or Inf"):
                row_readers.check_finite(broken.view(20, 16), "w")


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    model = pico.PICO["llama-tied"]()
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] = 1e6
    source = pico.save(model, tmp_path / "source")
    with pytest.raises(BadCheckpoint, match=r"embed_tokens.weight holds .* too large for torch.float16"):
        lemonx.expand(source, tmp_path / "out", width=72, dtype="float16", verify=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ends", [(200,), (180, 180, 200)])
def test_jobs_are_made_as_they_are_done(ends: tuple[int, ...]) -> None:
    """Also where one part is longer than the others, or empty: who has done his own helps."""
    made, done, lock = [], [], threading.Lock()

    def job(number: int) -> None:
        with lock:
            done.append((number, threading.get_ident()))
        threading.Event().wait(0.001)

    def jobs(start: int, stop: int) -> Iterator[runner.Job]:
        for number in range(start, stop):
            with lock:
                assert len(made) - len(done) <= len(ends)
                made.append(number)
            yield lambda number=number: job(number)

    runner.run_jobs([jobs(start, stop) for start, stop in pairwise((0, *ends))])
    assert sorted(number for number, _ in done) == list(range(200))
    assert len({thread for number, thread in done if number < 180}) == len(ends)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_job_that_fails_stops_the_others(workers: int) -> None:
    started = []

    def fail() -> None:
        raise BadCheckpoint("broken")

    def jobs(first: runner.Job) -> Iterator[runner.Job]:
        yield first
        for number in range(10**6):
            started.append(number)
            yield lambda: threading.Event().wait(0.001)

    with pytest.raises(BadCheckpoint, match="broken"):
        runner.run_jobs([jobs(fail), *(jobs(lambda: None) for _ in range(workers - 1))])
    assert len(started) < 1000


def test_each_thread_begins_where_the_others_do_not_write(tmp_path: Path) -> None:
    source = pico.save(pico.PICO["llama-tied"](), tmp_path / "source")
    with Checkpoint.open(source) as checkpoint:
        steps = make_plan(checkpoint, asked(Growth(depth=8))).steps
    sizes = [math.prod(step.shape) for step in steps]
    for count in (1, 2, 5, 1000):
        parts = runner.in_parts(steps, count)
        assert len(parts) == count
        assert [step for part in parts for step in part] == list(steps)
        for part in parts:
            assert sum(math.prod(step.shape) for step in part) <= sum(sizes) / count + max(sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [KEEP, SILENT, CANCEL])
@pytest.mark.parametrize("kinds", [("avg", "zero"), ("zero", "circ"), ("iso", "iso"), ("circ", None)])
def test_a_reused_buffer_changes_nothing(dtype: torch.dtype, mode: str, kinds: tuple[str, str | None]) -> None:
    """With `out`, whatever it held before, a block is the same as without; and the source is left alone."""
    weight = noise.normal(torch.empty(6, 8, dtype=dtype), 1.0, noise.generator(0, "w", 0))
    before = weight.clone()
    rows = expansion(kinds[0], 6, 15)
    columns = expansion(kinds[1], 8, 20) if kinds[1] else identity(8)
    how = Matrix(rows, columns, consumes=True, mode=mode, jitter=True)
    read = Reader(lambda start, stop: weight[start:stop], lambda: weight.double().mean(0).to(dtype))
    for part, run in matrix.blocks(rows, 4):
        used = torch.full((run.length, columns.target_size), torch.nan, dtype=dtype)
        fresh, reused = (
            matrix.expand_block(run, how, read, PRESETS["vision"], noise.generator(0, "w", part), out)
            for out in (None, used)
        )
        assert torch.equal(fresh, reused)
        assert torch.isfinite(fresh).all()
    assert torch.equal(weight, before)
