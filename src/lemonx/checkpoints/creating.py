"""Files and folders of ours, made where others can write too: new names only, and nothing is written through a link."""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from lemonx.checkpoints.destination import beside, hold, make_and_hold

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 1 << 20


def new_file(path: Path) -> BinaryIO:
    """A file that was not there before, to write to; an OSError if anything has its name."""
    return os.fdopen(_create(path), "wb")


def write_new(path: Path, content: bytes | BinaryIO) -> None:
    """Such a file with this content, or with what is left to read of another."""
    with new_file(path) as file:
        _fill(file, content)


def write_whole(path: Path, content: str | bytes | BinaryIO) -> None:
    """The file with this content, or what was there before. What has the name is replaced, and never followed."""
    clear_partial(path)
    partial, held = make_and_hold(lambda: beside(path), _create)
    try:
        with os.fdopen(held, "wb", closefd=False) as file:
            _fill(file, content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    finally:
        os.close(held)


def clear_partial(path: Path) -> None:
    """Remove what killed processes left of files that were to become `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.lemonx-[0-9a-f]{{8}}")
    for name in os.listdir(path.parent):
        left = path.with_name(name)
        if pattern.fullmatch(name) and (held := hold(left)) is not None:
            with suppress(OSError):  # a folder of this name is an output's, and cleared with it
                os.unlink(left)
            os.close(held)


def remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a folder with all that is in it; nothing is no error."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def new_folder(path: Path) -> Path:
    """The folder, empty, whatever had its name."""
    remove(path)
    os.mkdir(path)
    return path


def own_folder(path: Path) -> None:
    """The folder, as it is or new; what has its name and is none is taken away."""
    if path.is_symlink() or not path.is_dir():
        new_folder(path)


def _create(path: Path) -> int:
    return os.open(path, _NEW, 0o666)  # less the umask


def _fill(file: BinaryIO, content: bytes | BinaryIO) -> None:
    if isinstance(content, bytes):
        file.write(content)
    else:
        shutil.copyfileobj(content, file, _BLOCK)
