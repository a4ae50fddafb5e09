"""Broken checkpoints: one line that names the file and the remedy, an exit code by kind, nothing written, nothing lost.

The table of faults is faults.py. What needs more than a broken folder stands below it; a full disk, kills and fuzzing
have files of their own (test_faults_*.py).
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import faults
import lemonx
import pico
from commands import BAD_CHECKPOINT, BAD_OUTPUT, CANNOT_VERIFY, Result, Run, assert_refused, runner, state
from faults import FAULTS, Fault
from forkserver import Server
from lemonx.errors import BadCheckpoint

GROW = ("--depth", 4, "--no-verify")
# Enough to expand a model and to map a shard of it, not enough to hold its 92 MB of source in float64.
MEMORY = 90_000_000


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return runner(monkeypatch, capfd, tmp_path)


def test_the_list_is_complete() -> None:
    """Every number has a row in the table, or a test of its own that says so by its name."""
    assert {fault.number for fault in FAULTS} | set(faults.OWN) == set(faults.TITLES)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for place in (place for places in faults.OWN.values() for place in places):
        file, _, test = place.partition("::")
        assert f"def {test or 'test_'}" in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number}-{fault.name}")
def test_a_broken_folder(fault: Fault, run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(good(fault.model), source)
    fault.damage(source)
    before = state(tmp_path)
    says = f"(?=.*{re.escape(fault.file)})(?=.*: ).*(?:{fault.says})"  # names the file, and gives advice
    if fault.values:
        assert run("plan", source, "--depth", 4).code == 0
    else:
        assert_refused(run("plan", source, "--depth", 4, *fault.options), fault.code, says)
    result = run("expand", source, tmp_path / "out", *GROW, *fault.options)
    assert_refused(result, fault.code, says)
    assert str(source) in result.err  # which of several folders it is
    # No output, no temporary folder, the source as it was, and no pickle was run.
    assert state(tmp_path) == before and "ran" not in before


def test_pickles_beside_safetensors_are_neither_read_nor_copied(
    run: Run, good: Callable[..., Path], tmp_path: Path
) -> None:
    """What training leaves in a folder: any of it could run code in a tool that loads it."""
    source = tmp_path / "source"
    shutil.copytree(good(), source)
    names = ["pytorch_model.bin", "optimizer.pt", "rng_state.pth", "training_args.bin", ".metadata", "__0_0.distcp"]
    for name in names:
        faults.evil(source / name)
    assert run("expand", source, tmp_path / "out", "--depth", 3).code == 0
    assert run("verify", source, tmp_path / "out", "--allow-pickle").code == 0
    assert not (tmp_path / "ran").exists()
    assert not set(names) & set(os.listdir(tmp_path / "out"))
    # The canary works: a loader that trusts the file runs the command.
    torch.load(source / "optimizer.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
def test_pickled_weights_are_read_if_asked(
    sharded: bool, run: Run, good: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same result as from safetensors, the certificate's source name too, and the pickles are left alone."""
    source = tmp_path / "pickled" / "source"
    temporary = tmp_path / "temporary"  # others leave things in the common one
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    shutil.copytree(good(), source)
    faults.as_pickles(source, sharded=sharded)
    before = state(source)
    assert run("plan", source, "--width", 72, "--allow-pickle", "--json").code == 0
    assert run("expand", good(), "expected", "--width", 72, "--no-verify").code == 0
    assert run("expand", source, "out", "--width", 72, "--allow-pickle").code == 0
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "out"))
    assert expected.keys() == found.keys() and all(expected[key].equal(found[key]) for key in expected)
    assert '"name": "source"' in (tmp_path / "out" / "lemonx.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert run("verify", source, "out", "--allow-pickle").code == 0
    assert_refused(run("verify", source, "out"), BAD_CHECKPOINT, "--allow-pickle")
    # The converted copy is not the source: an output in its place is refused all the same.
    assert_refused(run("expand", source, source, *GROW, "--allow-pickle", "--force"), BAD_OUTPUT, "source itself")
    assert state(source) == before
    assert not list(temporary.glob("lemonx-*"))


def test_older_and_odd_pickles(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    """The format before torch 1.6, tensors that share memory, and those that no file of weights should hold."""
    source = tmp_path / "source"
    shutil.copytree(good(), source)
    faults.as_pickles(source)
    weights = torch.load(source / "pytorch_model.bin", weights_only=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert run("expand", source, "out", *GROW, "--allow-pickle").code == 0
    for odd, says in (
        ({"w": torch.ones(2).to_sparse()}, "sparse or quantised tensor 'w'"),
        ({"w": 3}, "a int under 'w', not a tensor"),
        ({"a\nb": torch.ones(2)}, "impossible name"),
        ({7: torch.ones(2)}, "impossible name '7'"),
        ({}, "holds a dict, not tensors by name"),
    ):
        torch.save(odd, source / "pytorch_model.bin")
        result = run("plan", source, "--depth", 4, "--allow-pickle")
        assert_refused(result, BAD_CHECKPOINT, f"pytorch_model.bin' .*{says}")


def test_links_of_the_hub_cache_work(run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(good(), snapshot)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, snapshot))
    assert run("expand", snapshot, "out", "--depth", 3).code == 0
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert run("fsck", snapshot).code == 0


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("taken", "exists: choose another"),
        ("source", "is the source itself"),
        ("link", "is the source itself|exists"),
        ("source/inside", "lies inside the source"),
        (".", "contains the source"),
    ],
)
def test_bad_outputs(place: str, says: str, run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(good(), tmp_path / "source")
    shutil.copytree(good(), tmp_path / "taken")
    (tmp_path / "link").symlink_to("source")
    before = state(tmp_path)
    assert_refused(run("expand", "source", place, *GROW), BAD_OUTPUT, says)
    assert state(tmp_path) == before


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_outputs_follow_the_umask(mask: int, run: Run, good: Callable[..., Path], tmp_path: Path) -> None:
    """All of them, though safetensors' own writer makes files that only their owner may read."""
    before = os.umask(mask)
    try:
        assert run("expand", good(), "out", *GROW, "--shards", "100KB").code == 0
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*")}
    assert modes == {0o666 & ~mask} and (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize("way", ["truncated", "rewritten", "touched", "grown"])
def test_a_source_that_changes_while_it_is_read(way: str, good: Callable[..., Path], tmp_path: Path) -> None:
    """Something else writes to the source in the middle of a run."""
    source = tmp_path / "source"
    shutil.copytree(good(), source)
    files = [source / name for name in faults.shards(source)]
    told: list[int] = []

    def change(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            for file in files:
                if way == "truncated":
                    os.truncate(file, 400)
                elif way == "rewritten":
                    file.write_bytes(file.read_bytes())
                elif way == "touched":
                    os.utime(file)
                else:
                    file.open("ab").write(b"more")

    with pytest.raises(
        BadCheckpoint, match=r"model-0000\d-of-00004.safetensors' changed while it was read: start again"
    ):
        lemonx.expand(source, tmp_path / "out", depth=4, verify=False, progress=change)
    assert len(told) >= 3 and os.listdir(tmp_path) == ["source"]


@pytest.fixture
def as_nobody(run: Run, good: Callable[..., Path], tmp_path: Path) -> Iterator[Path]:
    """A folder, and the rights of a user who may not read everything."""
    # What a command imports, it imports while it still may.
    assert run("expand", good(), tmp_path / "warm", *GROW).code == run("fsck", good()).code == 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o777)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("name", ["config.json", faults.INDEX, faults.FIRST, "tokenizer.json"])
def test_an_unreadable_file(name: str, run: Run, good: Callable[..., Path], as_nobody: Path) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())  # the good one is root's
    source = as_nobody / "source"
    shutil.copytree(good(), source)
    source.chmod(0o755)
    for path in source.iterdir():
        path.chmod(0 if path.name == name else 0o644)
    os.seteuid(user)
    result = run("expand", source, as_nobody / "out", *GROW)
    assert_refused(result, BAD_CHECKPOINT, rf"{re.escape(name)}' cannot be (read|opened) \(Permission denied\): check")
    os.seteuid(os.getuid())
    assert os.listdir(as_nobody) == ["source"]


def test_an_unreadable_folder_and_an_unwritable_output(run: Run, good: Callable[..., Path], as_nobody: Path) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())
    source = as_nobody / "source"
    shutil.copytree(good(), source)
    source.chmod(0o700)
    (as_nobody / "theirs").mkdir(mode=0o755)
    os.seteuid(user)
    if os.getuid() == 0:
        assert_refused(run("plan", source, "--depth", 4), BAD_CHECKPOINT, "cannot be .*Permission denied.*: check")
        assert_refused(run("fsck", source), BAD_CHECKPOINT, "Permission denied.: check")
    os.seteuid(os.getuid())
    source.chmod(0o755)
    for path in source.iterdir():
        path.chmod(0o644)
    os.seteuid(user)
    if os.getuid() == 0:
        result = run("expand", source, as_nobody / "theirs" / "out", *GROW)
        assert_refused(result, BAD_OUTPUT, "theirs.*(not writable|Permission denied).*: choose another output")


def test_memory_that_runs_out_during_verification(server: Callable[[], Server], tmp_path: Path) -> None:
    """Processes that may have only so much memory: one line, exit code 6, nothing written."""
    sizes = {**pico._LLAMA, "intermediate_size": 40000}
    source = pico.save(pico._build(LlamaForCausalLM, LlamaConfig, sizes), tmp_path / "source", torch.float32)
    grow = ("expand", source, tmp_path / "out", "--depth", 3, "--threads", 1, "--shards", "20MB")
    limits = {"RLIMIT_AS": MEMORY}
    assert server().run(*grow, "--no-verify", limits=limits).code == 0
    shutil.rmtree(tmp_path / "out")
    done = server().run(*grow, limits=limits)
    said = Result(done.code, done.out, done.err)
    assert_refused(said, CANNOT_VERIFY, "memory ran out during verification: verify with")
    assert os.listdir(tmp_path) == ["source"]


def test_the_document_lists_what_is_said(good: Callable[..., Path], making: Callable[[str], ModuleType]) -> None:
    """docs/guarantees.md is written from the table, and says what the commands say now."""
    table = making("guarantees").table()
    document = (Path(__file__).parents[1] / "docs" / "guarantees.md").read_text()
    assert f"<!-- faults -->\n{table}\n<!-- /faults -->" in document, "run `make guarantees`, then read the diff"
