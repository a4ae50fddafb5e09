"""Creates files and folders where others may write too: always under new names, and never through a link."""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from lemonx.checkpoints.destination import abandoned, beside, make_and_hold
from lemonx.guards.interrupts import uninterrupted

_BLOCK = 1 << 20


def new_file(path: Path) -> BinaryIO:
    """Create a file and open it for writing; an OSError if the name is taken."""
    return open(path, "xb")


def write_new(path: Path, content: bytes | BinaryIO) -> None:
    """Create a file with this content, or with the rest of an open file."""
    with new_file(path) as file:
        _fill(file, content)


def write_whole(path: Path, content: str | bytes | BinaryIO) -> None:
    """Write a file completely or leave it as it was. Whatever has the name is replaced; a link is never followed."""
    clear_partial(path)
    with ExitStack() as undo:
        with uninterrupted():
            partial, held = make_and_hold(lambda: beside(path), _create)
            undo.callback(os.close, held)
            undo.callback(_unlink, partial)
        with os.fdopen(held, "wb", closefd=False) as file:
            _fill(file, content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)


def clear_partial(path: Path) -> None:
    """Remove the unfinished files that killed processes left while they wrote `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.lemonx-[0-9a-f]{{8}}")
    for left in abandoned(path.parent, pattern):
        _unlink(left)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder with its content; it is no error if there is none."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def new_folder(path: Path) -> Path:
    """An empty folder of this name; whatever had the name is removed."""
    remove(path)
    os.mkdir(path)
    return path


def own_folder(path: Path) -> None:
    """The folder, created if need be; anything else that has its name is removed."""
    if path.is_symlink() or not path.is_dir():
        new_folder(path)


def _unlink(path: Path) -> None:
    """Remove an unfinished file, unless it has become the finished one; a folder of its name is an output's."""
    with suppress(OSError):
        os.unlink(path)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # less the umask


def _fill(file: BinaryIO, content: bytes | BinaryIO) -> None:
    if isinstance(content, bytes):
        file.write(content)
    else:
        shutil.copyfileobj(content, file, _BLOCK)
