"""Files of others: regular ones only, opened once, and nothing that is put in their place meanwhile gets through."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lemonx
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
def test_what_is_swapped_between_the_look_and_the_opening(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is looked at, then something else is put there, then it is opened."""
    private, folder = tmp_path / "private", tmp_path / "folder"
    (private / "sub").mkdir(parents=True)
    (private / "sub" / "file").write_text("secret")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("public")
    look = opening.real_file

    def look_then_swap(inside: Path, name: str) -> Path:
        found = look(inside, name)
        if what == "a folder's link":
            shutil.rmtree(folder / "sub")
            (folder / "sub").symlink_to(private / "sub")
            return found
        (folder / "sub" / "file").unlink()
        if what == "a link":
            (folder / "sub" / "file").symlink_to(private / "sub" / "file")
        elif what == "a pipe":
            os.mkfifo(folder / "sub" / "file")
        return found

    assert opening.read_inside(folder, "sub/file") == b"public"
    monkeypatch.setattr(opening, "real_file", look_then_swap)
    assert_one_line(BadCheckpoint, "changed while it was read", lambda: opening.read_inside(folder, "sub/file"))


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


def _link(path: Path, private: Path) -> None:
    path.unlink()
    path.symlink_to(private)


def _another(path: Path, private: Path) -> None:
    path.unlink()
    path.write_text("other")


def _rewritten(path: Path, private: Path) -> None:
    path.write_text("other words")


@pytest.mark.parametrize("swap", [_link, _another, _rewritten], ids=["link", "another", "rewritten"])
@pytest.mark.parametrize("name", ["tokenizer.json", "USE_POLICY.md", "1_Pooling/config.json"])
def test_a_companion_that_is_swapped_before_it_is_copied(
    swap: Callable[[Path, Path], None], name: str, good: Callable[..., Path], tmp_path: Path
) -> None:
    """What was looked at is what is copied, or nothing is written: a link would take a private file along."""
    source, private = tmp_path / "source", tmp_path / "private"
    shutil.copytree(good(), source)
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text("{}")
    private.write_text("secret")
    says = re.escape(name) + "' (changed while it was read|is a link out of its folder)"
    with pytest.raises(BadCheckpoint, match=says):
        # `planned` is called after the source was looked at, and before anything is written.
        lemonx.expand(source, tmp_path / "out", depth=3, verify=False, planned=lambda _: swap(source / name, private))
    assert sorted(os.listdir(tmp_path)) == ["private", "source"]


def test_weights_that_are_swapped_are_those_that_were_opened(tmp_path: Path) -> None:
    save_model(tmp_path / "a", {"w": torch.ones(3)})
    save_model(tmp_path / "b", {"w": torch.zeros(3)})
    with Checkpoint.open(tmp_path / "a") as checkpoint:
        os.replace(tmp_path / "b" / "model.safetensors", tmp_path / "a" / "model.safetensors")
        assert torch.equal(checkpoint.read("w"), torch.ones(3))


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
