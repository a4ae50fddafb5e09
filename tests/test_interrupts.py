"""Ctrl-C between the moment that something is made and the moment that it is noted leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lemonx.checkpoints import creating, destination, temporary
from lemonx.checkpoints.creating import write_whole
from lemonx.checkpoints.temporary import Temporary
from lemonx.checkpoints.writer import CheckpointWriter
from lemonx.guards.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Python's own handler: a worker of the test runner may have another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _checkpoint(folder: Path) -> None:
    with CheckpointWriter(folder / "out", [("a", "F32", (1,))], max_shard_size=100):
        raise AssertionError("it was not stopped")


def _temporary(folder: Path) -> None:
    Temporary(folder)
    raise AssertionError("it was not stopped")


def _file(folder: Path) -> None:
    write_whole(folder / "out", "text")
    raise AssertionError("it was not stopped")


@pytest.mark.parametrize(
    ("module", "name", "act"),
    [
        (destination, "make_folder", _checkpoint),
        (temporary, "make_folder", _temporary),
        (creating, "_create", _file),
    ],
    ids=["checkpoint", "temporary", "file"],
)
def test_what_was_just_made_is_removed(
    module: object, name: str, act: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = getattr(module, name), list[Path]()

    def make_and_stop(path: Path, **options: int) -> int:
        fd = make(path, **options)
        made.append(path)
        signal.raise_signal(signal.SIGINT)
        return fd

    monkeypatch.setattr(module, name, make_and_stop)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        act(tmp_path)
    assert made and os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_it_waits_for_the_end_and_the_handler_is_back() -> None:
    steps = list[str]()
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        steps.append("went on")
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_within_is_seen() -> None:
    with pytest.raises(ValueError, match="within"), uninterrupted():
        raise ValueError("within")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_does_not_handle_it_nothing_changes(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_is_left_alone() -> None:
    seen = list[object]()

    def look() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
