"""A full disk: nothing at OUTPUT, one line that says so, exit code 5; whenever it fills up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import BAD_OUTPUT, Result, assert_refused, state
from forkserver import Server

GROW = ("--width", 72, "--depth", 3, "--ffn", 2000)


@pytest.fixture(scope="module")
def needed(server: Callable[[], Server], good: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> int:
    """The bytes of the files that an expansion writes, as a disk counts them."""
    whole = tmp_path_factory.mktemp("disk") / "whole"
    assert server().run("expand", good(), whole, *GROW).code == 0
    total = sum(path.stat().st_blocks * 512 for path in whole.iterdir())
    shutil.rmtree(whole)
    return total


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes, if this user may."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "lemonx", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        return place

    yield mount
    if os.path.ismount(place):
        subprocess.run(["umount", str(place)], check=True)


# Before anything is written; when the certificate is; when the very last file is; and just enough.
@pytest.mark.parametrize(
    ("room", "says"),
    [
        (lambda total: total // 2, "needs .* MB, but only .* are free: free some space"),
        (lambda total: total - 16_000, "the disk is full: free some space"),
        (lambda total: total - 8_000, "the disk is full: free some space"),
        (lambda total: total + 65_536, None),
    ],
    ids=["half", "certificate", "last-file", "enough"],
)
def test_a_full_disk(
    room: Callable[[int], int],
    says: str | None,
    needed: int,
    small_disk: Callable[[int], Path],
    server: Callable[[], Server],
    good: Callable[..., Path],
) -> None:
    source = good()
    before = state(source)
    place = small_disk(room(needed))
    done = server().run("expand", source, place / "out", *GROW)
    if says is None:
        assert done.code == 0 and (place / "out" / "lemonx.json").exists(), done.err
    else:
        assert_refused(Result(done.code, done.out, done.err), BAD_OUTPUT, says)
        assert os.listdir(place) == []
    assert state(source) == before


def test_a_full_disk_leaves_what_was_to_be_replaced(
    needed: int, small_disk: Callable[[int], Path], server: Callable[[], Server], good: Callable[..., Path]
) -> None:
    """There must be room for both; if there is not, the old output stays."""
    place = small_disk(needed + needed // 2)
    assert server().run("expand", good(), place / "out", *GROW).code == 0
    before = state(place)
    done = server().run("expand", good(), place / "out", *GROW, "--force", "--seed", 1)
    assert_refused(Result(done.code, done.out, done.err), BAD_OUTPUT, "free some space")
    assert state(place) == before


@pytest.mark.parametrize("limit", [10_000, 1_000_000])
def test_files_that_may_not_grow(
    limit: int, server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path
) -> None:
    """RLIMIT_FSIZE, which needs no rights to set: no file may be larger."""
    done = server().run("expand", good(), tmp_path / "out", *GROW, limits={"RLIMIT_FSIZE": limit})
    assert_refused(Result(done.code, done.out, done.err), BAD_OUTPUT, "larger than .* allows: raise that limit, or")
    assert os.listdir(tmp_path) == []


def test_smaller_shards_fit_under_a_limit(
    server: Callable[[], Server], good: Callable[..., Path], tmp_path: Path
) -> None:
    """The advice that the error gives, followed."""
    limit = {"RLIMIT_FSIZE": 1_300_000}
    arguments = ("expand", good(), tmp_path / "out", *GROW, "--shards", "1MB", "--no-verify")
    done = server().run(*arguments, limits=limit)
    assert done.code == 0, done.err
    assert max(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 1_300_000


def test_no_room_for_temporary_files(
    small_disk: Callable[[int], Path],
    server: Callable[[], Server],
    good: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Verification keeps streams in the system's temporary folder: that one full is one line too."""
    assert server().run("expand", good(), tmp_path / "out", *GROW).code == 0
    place = small_disk(4096 * 8)
    done = server().run("verify", good(), tmp_path / "out", "--layerwise", environment={"TMPDIR": str(place)})
    assert done.code == BAD_OUTPUT and "No space left" in done.err and "Traceback" not in done.err
    assert os.listdir(place) == []
