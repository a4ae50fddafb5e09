"""Files and folders of ours, in places where others have been before us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from lemonx.checkpoints import creating, destination, temporary
from lemonx.checkpoints.temporary import Temporary

SOURCE = str(Path(__file__).parents[2] / "src")


def test_a_file_is_replaced_and_never_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "page").symlink_to("secret")
    creating.write_whole(tmp_path / "page", "new")
    assert (tmp_path / "secret").read_text() == "mine"
    assert not (tmp_path / "page").is_symlink() and (tmp_path / "page").read_text() == "new"
    creating.write_whole(tmp_path / "page", b"newer")
    with (tmp_path / "secret").open("rb") as file:
        creating.write_whole(tmp_path / "copy", file)
    assert (tmp_path / "page").read_bytes() == b"newer" and (tmp_path / "copy").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["copy", "page", "secret"]


def test_a_new_file_takes_nothing_over(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "link").symlink_to("secret")
    (tmp_path / "nowhere").symlink_to("made")
    for name in ("secret", "link", "nowhere"):
        with pytest.raises(FileExistsError):
            creating.write_new(tmp_path / name, b"new")
    assert (tmp_path / "secret").read_text() == "mine" and not (tmp_path / "made").exists()


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    class Broken:
        def read(self, size: int) -> bytes:
            raise OSError("broken")

    (tmp_path / "page").write_text("old")
    with pytest.raises(OSError, match="broken"):
        creating.write_whole(tmp_path / "page", Broken())  # type: ignore[arg-type]
    assert (tmp_path / "page").read_text() == "old" and os.listdir(tmp_path) == ["page"]


def test_a_folder_is_made_where_a_link_was(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("mine")
    (tmp_path / "link").symlink_to("precious")
    creating.new_folder(tmp_path / "link")
    (tmp_path / "other").symlink_to("precious")
    creating.own_folder(tmp_path / "other")
    creating.own_folder(tmp_path / "precious")
    creating.remove(tmp_path / "none")
    for name in ("link", "other"):
        assert not (tmp_path / name).is_symlink() and os.listdir(tmp_path / name) == []
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "mine"


def killed(code: str, number: signal.Signals, **environment: str) -> None:
    """Run code in a process, which then kills itself by a signal."""
    # What started the tests may have it ignored, as nohup does.
    usual = "" if number == signal.SIGKILL else f"signal.signal({int(number)}, signal.SIG_DFL)"
    code = f"import os, signal\n{usual}\n{textwrap.dedent(code)}\nos.kill(os.getpid(), {int(number)})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": SOURCE, **environment}, capture_output=True)
    assert done.returncode == -number, done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_what_a_killed_process_left_is_cleared(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ended it: a temporary folder, and a file that was to become another."""
    code = f"""
        from lemonx.checkpoints import creating, destination
        from lemonx.checkpoints.temporary import Temporary
        kept = Temporary()
        (kept.path / "weights").write_text("x")
        from pathlib import Path
        destination.make_and_hold(lambda: destination.beside(Path({str(tmp_path / "page")!r})), creating._create)
    """
    killed(code, number, TMPDIR=str(tmp_path))
    assert len(os.listdir(tmp_path)) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Temporary() as alive:
        creating.write_whole(tmp_path / "page", "whole")
        with Temporary() as another:
            assert sorted(os.listdir(tmp_path)) == sorted(["page", alive.name, another.name])
    assert os.listdir(tmp_path) == ["page"]


def test_what_is_not_ours_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a name that is nearly one of ours, and what belongs to another user."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("mine")
    out = tmp_path / "out"
    link = f"lemonx-{'0' * 16}"
    (tmp_path / link).symlink_to("precious")
    (tmp_path / ".out.lemonx-00000000").symlink_to("precious")
    (tmp_path / ".out.lemonx-old-00000000").symlink_to("precious")
    kept = {link, ".out.lemonx-00000000", ".out.lemonx-old-00000000", "precious"}
    for name in ("lemonx-demo", f"lemonx-{'g' * 16}", ".out.lemonx-notes", ".out.lemonx-0000000"):
        (tmp_path / name).mkdir()
        kept.add(name)
    if os.geteuid() == 0:
        for name in (f"lemonx-{'1' * 16}", ".out.lemonx-11111111", ".out.lemonx-old-11111111"):
            (tmp_path / name).mkdir()
            os.chown(tmp_path / name, 65534, 65534)
            kept.add(name)
    temporary.clear(tmp_path)
    destination.clear_leftovers(out)
    creating.clear_partial(out)
    assert set(os.listdir(tmp_path)) == kept
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "mine" and not out.exists()


def test_a_temporary_folder_is_for_its_user_alone_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Temporary() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "x").touch()
    assert os.listdir(tmp_path) == []
    forgotten = Temporary()
    assert forgotten.path.is_dir()
    del forgotten
    assert os.listdir(tmp_path) == []
