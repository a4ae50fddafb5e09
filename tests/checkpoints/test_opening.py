"""Files of others are opened only if they are regular, small enough, and in their own folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.broken import assert_one_line, save_model
from lemonx.checkpoints import Checkpoint, opening
from lemonx.errors import BadCheckpoint


def test_a_file_that_the_user_named(tmp_path: Path) -> None:
    """Links are the user's own; what they lead to must be a regular file, and not too large to be read whole."""
    (tmp_path / "file").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("file")
    assert opening.read_file(tmp_path / "link", 10) == b"x" * 10
    with pytest.raises(OSError, match="over 9 bytes"):
        opening.read_file(tmp_path / "file", 9)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(OSError, match="not a regular file"):
            opening.open_file(tmp_path / name)
    with pytest.raises(IsADirectoryError, match="a folder, not a file"):
        opening.open_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        opening.open_file(tmp_path / "none")


def test_a_file_that_claims_no_size_is_still_limited() -> None:
    """The system's own files say that they are empty."""
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(OSError, match="over 100 bytes"):
        opening.read_file(Path("/proc/self/maps"), 100)


@pytest.mark.parametrize("what", ["a link", "a folder's link", "a pipe", "nothing"])
def test_what_is_not_opened(what: str, tmp_path: Path) -> None:
    private, folder = tmp_path / "private", tmp_path / "folder"
    (private / "sub").mkdir(parents=True)
    (private / "sub" / "file").write_text("secret")
    (folder / "sub").mkdir(parents=True)
    if what == "a folder's link":
        (folder / "sub").rmdir()
        (folder / "sub").symlink_to(private / "sub")
    elif what == "a link":
        (folder / "sub" / "file").symlink_to(private / "sub" / "file")
    elif what == "a pipe":
        os.mkfifo(folder / "sub" / "file")
    says = "a link out of its folder|not a regular file|does not exist"
    assert_one_line(BadCheckpoint, says, lambda: opening.read_inside(folder, "sub/file"))


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        opening.read_inside(tmp_path, "file")
        for name in ("pipe", "none"):
            with pytest.raises(BadCheckpoint):
                opening.open_inside(tmp_path, name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_json_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    os.truncate(folder / "config.json", opening.MAX_JSON + 1)
    assert_one_line(BadCheckpoint, "too many for a JSON file", lambda: Checkpoint.open(folder))


def test_optimizer_shards_that_lead_out(tmp_path: Path) -> None:
    from lemonx.optimizer_state.by_name import has_named_state

    (tmp_path / "elsewhere").mkdir()
    save_model(tmp_path / "elsewhere")
    (tmp_path / "source").mkdir()
    assert not has_named_state(tmp_path / "source")
    (tmp_path / "source" / "optimizer").symlink_to("../elsewhere")
    refused: Callable[[], Any] = lambda: has_named_state(tmp_path / "source")  # noqa: E731
    assert_one_line(BadCheckpoint, "a link out of its folder", refused)
