"""Temporary folders that never pile up: a process that needs one first removes those of killed processes.

As with outputs, a folder is locked, and the lock dies with its process. SIGTERM and SIGHUP are not caught: they end a
process at once, as kill -9 does.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import weakref
from functools import partial
from pathlib import Path
from types import TracebackType

from lemonx.checkpoints.destination import abandoned, make_and_hold, make_folder
from lemonx.guards.interrupts import uninterrupted

_PREFIX = "lemonx-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{16}}")


class Temporary:
    """A new private folder in `parent`, or where the system has such; `close` removes it, or the end of its process."""

    path: Path

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        parent = Path(parent or tempfile.gettempdir()).resolve()
        clear(parent)
        private = partial(make_folder, mode=0o700)
        with uninterrupted():
            self.path, held = make_and_hold(lambda: parent / f"{_PREFIX}{secrets.token_hex(8)}", private)
            self.close = weakref.finalize(self, _remove, self.path, held)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove(path: Path, held: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(held)


def clear(parent: Path) -> None:
    """Remove the folders that dead processes of this user left, and nothing else."""
    for left in abandoned(parent, _NAME):
        shutil.rmtree(left, ignore_errors=True)
