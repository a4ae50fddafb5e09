"""The writer: what it writes the library loads, and its output appears whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.broken import DTYPES, assert_one_line, save_model, tensors
from lemonx.checkpoints import Checkpoint, CheckpointWriter, destination
from lemonx.checkpoints.safetensors_file import dtype_name
from lemonx.errors import BadOutput

INDEX = "model.safetensors.index.json"


def entries(weights: Mapping[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in weights.items()]


def writer(output: Path, weights: Mapping[str, torch.Tensor], **options: Any) -> CheckpointWriter:
    return CheckpointWriter(output, entries(weights), **{"max_shard_size": 10**9, **options})


def write_all(output: Path, weights: Mapping[str, torch.Tensor], **options: Any) -> None:
    with writer(output, weights, **options) as target:
        target.add_text("config.json", "{}")
        for name, tensor in weights.items():
            target.write(name, 0, tensor)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded |= load_file(file)
    return loaded


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("max_shard_size", [10**9, 60, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_loads_what_was_written(dtype: torch.dtype, max_shard_size: int, tmp_path: Path) -> None:
    weights = tensors(dtype)
    write_all(tmp_path / "out", weights, max_shard_size=max_shard_size)
    assert_equal(load_folder(tmp_path / "out"), weights)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert_equal({name: checkpoint.read(name) for name in checkpoint.tensors}, weights)


def test_shards_and_index_are_as_transformers_names_them(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.ones(10) for i in range(5)}
    write_all(tmp_path / "out", weights, max_shard_size=80)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == {name: names[i // 2] for i, name in enumerate(weights)}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {*names, INDEX, "config.json"}


def test_mixed_dtypes_are_aligned_for_the_library(tmp_path: Path) -> None:
    """An odd number of bytes before a wider element would make the library fail to load it."""
    weights = {
        "flag": torch.ones(3, dtype=torch.bool),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "float": torch.ones(3),
        "count": torch.tensor(7),
        "empty": torch.ones(0, 4),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    write_all(tmp_path / "out", weights)
    assert_equal(load_folder(tmp_path / "out"), weights)


def test_rows_in_any_order_from_any_thread_give_the_same_bytes(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.randn(40, 30, dtype=torch.bfloat16) for i in range(6)}
    write_all(tmp_path / "a", weights, max_shard_size=5000)
    pieces = [(name, row) for name in weights for row in range(0, 40, 8)]
    random.Random(0).shuffle(pieces)
    with writer(tmp_path / "b", weights, max_shard_size=5000) as target, ThreadPoolExecutor(4) as pool:
        target.add_text("config.json", "{}")
        list(pool.map(lambda p: target.write(p[0], p[1], weights[p[0]][p[1] : p[1] + 8]), pieces))
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_strips_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    """A part of the last axis, of a matrix and of a table of several."""
    weights = {"w": torch.randn(7, 12), "t": torch.randn(3, 4, 10).half()}
    write_all(tmp_path / "a", weights)
    with writer(tmp_path / "b", weights) as target:
        target.add_text("config.json", "{}")
        for start in (5, 0):
            target.write("w", 0, weights["w"][:, start : start + 7 if start else 5], start)
        for table in (2, 0, 1):
            for start in (6, 0, 3):
                stop = {0: 3, 3: 6, 6: 10}[start]
                target.write("t", table, weights["t"][table : table + 1, :, start:stop], start)
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("strips", [[(0, 2)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 4), (0, 2)]])
def test_every_column_is_written_once_or_nothing_appears(strips: list[tuple[int, int]], tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="columns of tensor 'w'"),
        writer(tmp_path / "out", {"w": torch.ones(5, 4)}) as target,
    ):
        for start, stop in strips:
            target.write("w", 0, torch.ones(5, stop - start), start)
    assert os.listdir(tmp_path) == []


def test_a_strided_tensor_is_written_by_value(tmp_path: Path) -> None:
    weight = torch.randn(6, 4, requires_grad=True)
    write_all(tmp_path / "out", {"w": weight.T})
    assert torch.equal(load_folder(tmp_path / "out")["w"], weight.T)


def test_transformers_loads_a_sharded_copy(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path / "source")
    with Checkpoint.open(tmp_path / "source") as source:
        infos = [(t.name, t.dtype, t.shape) for t in source.tensors.values()]
        with CheckpointWriter(tmp_path / "out", infos, max_shard_size=2000, force=False, source=source.path) as target:
            target.add_text("config.json", json.dumps(source.config))
            for name in source.companions:
                with source.open_companion(name) as file:
                    target.add_file(file, name)
            for name in source.tensors:
                target.write(name, 0, source.read(name))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    copy, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_equal(copy.state_dict(), model.state_dict())


def test_files_follow_the_umask_and_are_no_links(tmp_path: Path) -> None:
    (tmp_path / "original").write_text("tokens")
    (tmp_path / "vocab.txt").symlink_to("original")
    before = os.umask(0o027)
    try:
        with writer(tmp_path / "out", {"w": torch.ones(2)}) as target:
            target.write("w", 0, torch.ones(2))
            target.add_text("config.json", '{"é": 1}\n')
            for name in ("vocab.txt", "1_Pooling/config.json"):
                with (tmp_path / "vocab.txt").open("rb") as file:
                    target.add_file(file, name)
    finally:
        os.umask(before)
    out = tmp_path / "out"
    assert out.stat().st_mode & 0o777 == 0o750
    for name in ("model.safetensors", "config.json", "vocab.txt", "1_Pooling/config.json"):
        assert (out / name).stat().st_mode & 0o777 == 0o640
        assert not (out / name).is_symlink()
    assert (out / "vocab.txt").read_text() == "tokens"
    assert (out / "config.json").read_bytes() == '{"é": 1}\n'.encode()


def test_all_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is synced, then renamed, then the rename itself is synced."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def note_sync(fd: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def note_rename(source: Path, target: Path) -> None:
        events.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    (tmp_path / "pooling").write_text("{}")
    with writer(tmp_path / "out", tensors(), max_shard_size=60) as target:
        target.add_text("config.json", "{}")
        with (tmp_path / "pooling").open("rb") as file:
            target.add_file(file, "1_Pooling/config.json")
        for name, tensor in tensors().items():
            target.write(name, 0, tensor)
        hidden = target.folder
    at = events.index(("rename", str(tmp_path / "out")))
    below = {str(hidden / path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert {path for what, path in events[:at] if what == "fsync"} == {*below, str(hidden)}
    assert events[at + 1 :] == [("fsync", str(tmp_path))]


def test_bad_places_are_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    weights = {"w": torch.ones(2)}
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    (save_model(tmp_path / "clone") / ".git").mkdir()
    before = content(tmp_path)
    for output, force, match in (
        ("source", False, "is the source"),
        ("source", True, "is the source"),
        ("link", True, "is the source"),
        ("source/out", False, "inside the source"),
        ("link/out", False, "inside the source"),
        (".", True, "contains the source"),
        ("precious", False, "exists"),
        ("precious", True, "not a checkpoint"),
        ("clone", True, r"holds more than a checkpoint \('.git/'\)"),
        ("file", False, "exists"),
        ("file", True, "not a folder"),
        ("file/out", False, "not a folder"),
    ):
        refused = lambda o=output, f=force: writer(tmp_path / o, weights, force=f, source=source)  # noqa: E731
        assert_one_line(BadOutput, match, refused)
    assert content(tmp_path) == before


def test_a_full_disk_shows_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = [("w", "F64", (10**15,))]
    assert_one_line(
        BadOutput,
        "needs 8000000.0 GB, but only",
        lambda: CheckpointWriter(tmp_path / "out", huge, max_shard_size=1, force=False, source=tmp_path / "x"),
    )

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert_one_line(BadOutput, "disk is full", lambda: write_all(tmp_path / "out", tensors()))
    assert os.listdir(tmp_path) == []


def test_too_many_open_files_name_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lemonx.checkpoints.writer.allow_files", lambda count: None)  # as at the hard limit
    files, many = resource.RLIMIT_NOFILE, {f"t{n}": torch.zeros(9) for n in range(40)}
    before = resource.getrlimit(files)
    resource.setrlimit(files, (len(os.listdir("/proc/self/fd")) + 10, before[1]))
    try:
        remedy = r"`ulimit -n` allows: raise that limit, or .* --shards"
        assert_one_line(BadOutput, remedy, writer(tmp_path / "out", many, max_shard_size=40).__enter__)
    finally:
        resource.setrlimit(files, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_parent_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert_one_line(BadOutput, "not writable", lambda: writer(tmp_path / "out", tensors()))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), writer(tmp_path / "out", tensors()) as target:
        target.write("bias", 0, tensors()["bias"])
        assert target.folder.is_dir() and not target.output.exists()
        raise error
    assert os.listdir(tmp_path) == []


def test_an_interrupted_replacement_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = save_model(tmp_path / "out")
    before = content(tmp_path)
    with pytest.raises(KeyboardInterrupt), writer(out, tensors(), force=True):
        raise KeyboardInterrupt
    assert content(tmp_path) == before
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if target == out and "-old-" not in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(destination, "_exchange", lambda a, b: False)  # a file system that cannot swap in one step
    monkeypatch.setattr(os, "rename", fail)
    assert_one_line(BadOutput, "cannot be written", lambda: write_all(out, tensors(), force=True))
    assert content(tmp_path) == before


def test_force_replaces_a_checkpoint(tmp_path: Path) -> None:
    out = save_model(tmp_path / "out")
    (out / "tokenizer.json").touch()
    write_all(out, {"w": torch.ones(3)}, force=True)
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    assert_equal(load_folder(out), {"w": torch.ones(3)})


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def run() -> None:
        with writer(tmp_path / "out", {"w": torch.ones(3)}) as target:
            target.write("w", 0, torch.ones(3))
            save_model(tmp_path / "out")

    assert_one_line(BadOutput, "was created by someone else meanwhile", run)
    assert os.listdir(tmp_path) == ["out"]
    assert_equal(load_folder(tmp_path / "out"), tensors())


@pytest.mark.parametrize("pieces", [[], [(0, 3)], [(0, 3), (2, 5)], [(0, 3), (4, 5)], [(0, 5), (0, 5)]])
def test_every_row_is_written_once_or_nothing_appears(pieces: list[tuple[int, int]], tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="tensor 'w'"),
        writer(tmp_path / "out", {"w": torch.ones(5)}) as target,
    ):
        for start, stop in pieces:
            target.write("w", start, torch.ones(stop - start))
    assert os.listdir(tmp_path) == []


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        writer(tmp_path / "out", {"w": torch.ones(5, 2), "s": torch.tensor(1)}) as target,
    ):
        for name, row, tensor in (
            ("w", 0, torch.ones(5, 2, dtype=torch.float64)),
            ("w", 0, torch.ones(5, 3)),
            ("w", 0, torch.ones(5)),
            ("w", 0, torch.tensor(1.0)),
            ("w", 1, torch.ones(5, 2)),
            ("w", -1, torch.ones(1, 2)),
            ("s", 0, torch.ones(1, dtype=torch.int64)),
            ("s", 1, torch.tensor(1)),
        ):
            with pytest.raises(ValueError):
                target.write(name, row, tensor)
        for column in (-1, 2):
            with pytest.raises(ValueError, match="columns"):
                target.write("w", 0, torch.ones(5, 1), column)
        for bad in ("../x", "/x", "", "model.safetensors", "a/../../x"):
            with pytest.raises(ValueError):
                target.add_text(bad, "x")
        target.add_text("x", "x")
        with pytest.raises(ValueError):
            target.add_file(io.BytesIO(), "x")
        raise RuntimeError
    with pytest.raises(ValueError):
        CheckpointWriter(tmp_path / "out", [("w", "F32", (1,))] * 2, max_shard_size=1)


def test_damage_on_the_disk_is_noticed(tmp_path: Path) -> None:
    def run() -> None:
        with writer(tmp_path / "out", {"w": torch.ones(3)}) as target:
            target.write("w", 0, torch.ones(3))
            os.truncate(target.folder / "model.safetensors", 50)

    assert_one_line(BadOutput, "cannot be read back .*truncated", run)
    assert os.listdir(tmp_path) == []


def test_a_killed_process_leaves_the_output_untouched(tmp_path: Path) -> None:
    out = save_model(tmp_path / "out")
    before = content(out)
    code = f"""
        import os, signal, torch
        from lemonx.checkpoints import CheckpointWriter
        with CheckpointWriter({str(out)!r}, [("w", "F32", (9,))], max_shard_size=9, force=True) as target:
            target.write("w", 0, torch.ones(5))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert content(out) == before
    assert len(destination.leftovers(out)) == 1
    write_all(out, {"w": torch.ones(3)}, force=True)
    assert os.listdir(tmp_path) == ["out"]


def test_only_dead_leftovers_are_cleared(tmp_path: Path) -> None:
    """A second writer to the same place leaves the first one's folder alone, and takes away what a dead one left."""
    out = tmp_path / "out"
    dead = destination.beside(out)
    dead.mkdir()
    (dead / "model.safetensors").touch()
    (tmp_path / ".other.lemonx-01234567").mkdir()
    (tmp_path / ".out.lemonx-notes").mkdir()
    with writer(out, {"w": torch.ones(3)}) as alive:
        assert destination.leftovers(out) == [alive.folder]
        write_all(out, {"w": torch.ones(3)})
        assert alive.folder.is_dir() and out.is_dir()
        alive.write("w", 0, torch.zeros(3))
        shutil.rmtree(out)
    assert sorted(os.listdir(tmp_path)) == [".other.lemonx-01234567", ".out.lemonx-notes", "out"]
    assert_equal(load_folder(out), {"w": torch.zeros(3)})


def test_what_was_to_be_replaced_is_put_back(tmp_path: Path) -> None:
    """Killed between the two renames of a file system that cannot swap: the old output is back at the next start."""
    out = save_model(tmp_path / "out")
    before = content(out)
    out.rename(destination.beside(out, "old-"))
    assert_one_line(BadOutput, "exists", lambda: writer(out, tensors()))
    assert content(out) == before and os.listdir(tmp_path) == ["out"]
    shutil.copytree(out, destination.beside(out, "old-"))
    write_all(out, {"w": torch.ones(3)}, force=True)
    assert os.listdir(tmp_path) == ["out"]


def test_a_replacement_has_no_moment_without_either(tmp_path: Path) -> None:
    a, b = save_model(tmp_path / "a"), save_model(tmp_path / "b", {"w": torch.ones(3)})
    before = content(a), content(b)
    if not destination._exchange(a, b):
        pytest.skip("this file system cannot swap two folders in one step")
    assert (content(b), content(a)) == before
    assert not destination._exchange(a, tmp_path / "nowhere")
