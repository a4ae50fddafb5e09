"""Files of others, opened in one place: regular files only, each opened once, and looked at through what was opened.

A pipe would hang whoever opens it, a device would fill the memory, a link could lead to a private file of this
machine. Between a look at a name and its opening, another process may put something else there; so a file is opened
without following a link, without waiting, and what the open descriptor says of it is what counts.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from lemonx.errors import BadCheckpoint

MAX_JSON = 100_000_000
# A recipe or an experiment, written by hand.
MAX_TEXT = 1_000_000
_BLOCK = 1 << 20
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# O_PATH: a folder need not be readable for its files to be; not every system has it.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(path: Path) -> BinaryIO:
    """A file that the user named, where links are the user's own; an OSError if it is not a regular one."""
    real = path.resolve(strict=True)
    if not real.is_file():  # some devices do things when they are opened
        _not_regular(path, IsADirectoryError if real.is_dir() else OSError)
    return os.fdopen(_regular(os.open(real, _FILE), path), "rb")


def read_file(path: Path, limit: int) -> bytes:
    """The content of such a file, of at most `limit` bytes."""
    with open_file(path) as file:
        return read_open(file, limit)


def read_given(path: Path, name: str, limit: int) -> tuple[bytes, Path]:
    """The content of a file that the user named, or of the one called `name` in a folder that the user named."""
    if not path.is_dir():
        return read_file(path, limit), path
    with file_inside(path.resolve(), name) as file:
        return read_open(file, limit), path / name


def open_inside(folder: Path, name: str) -> int:
    """A descriptor of the file that `name` in the (resolved) `folder` stands for; links may lead where it allows."""
    real, path = real_file(folder, name), folder / name
    root = _root(folder, real)
    assert root is not None
    try:
        return _regular(_walk(root, real.relative_to(root).parts), path)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT, errno.EINVAL):
            raise changed(path) from None
        raise BadCheckpoint(f"{str(path)!r} cannot be opened ({error.strerror}): check its permissions") from None


def file_inside(folder: Path, name: str) -> BinaryIO:
    """The same as a file to read from."""
    return os.fdopen(open_inside(folder, name), "rb")


def name_of(fd: int) -> str:
    """A name of an open file, for libraries that take nothing else: it leads to that very file."""
    return f"/dev/fd/{fd}"


def read_inside(folder: Path, name: str) -> bytes:
    """The content of a small file in a folder."""
    with file_inside(folder, name) as file:
        return read_small(file, folder / name)


def read_small(file: BinaryIO, path: Path) -> bytes:
    """The content of a small file that is open; `path` only names it."""
    try:
        return read_open(file, MAX_JSON)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BadCheckpoint(
                f"{str(path)!r} has over {MAX_JSON} bytes, too many for a JSON file: replace it"
            ) from None
        raise BadCheckpoint(f"{str(path)!r} cannot be read ({error.strerror}): check its permissions") from None


def changed(path: Path) -> BadCheckpoint:
    """The error for a file that was written to, cut or replaced meanwhile."""
    return BadCheckpoint(f"{str(path)!r} changed while it was read: start again when nothing writes to it")


def identity(fd: int) -> tuple[int, ...]:
    """What tells an open file from another, and from itself after a change."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def real_file(folder: Path, name: str) -> Path:
    """The file that `name` in the (resolved) `folder` stands for, if it lies where it may.

    Links may stay inside the folder, or lead to the hub cache's own blobs; anything else could copy a
    private file of this machine into the output.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        if path.is_symlink():
            raise BadCheckpoint(
                f"{str(path)!r} is a link to nothing: download the file again, or remove the link"
            ) from None
        raise BadCheckpoint(f"{str(path)!r} does not exist: download or save the checkpoint again") from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise BadCheckpoint(f"{str(path)!r} cannot be followed ({error}): check it and its permissions") from None
    if _root(folder, real) is None:
        raise BadCheckpoint(f"{str(path)!r} is a link out of its folder, to {str(real)!r}: copy the file itself there")
    if not real.is_file():
        raise BadCheckpoint(f"{str(path)!r} is not a regular file: replace it by one")
    return real


def _root(folder: Path, real: Path) -> Path | None:
    """The folder that `real` may lie below: `folder` itself, or the hub cache whose snapshot that is; else None.

    <cache>/models--x/snapshots/<rev>/file -> <cache>/models--x/blobs/<hash>, which in newer caches may
    itself be a link to <cache>/blobs/<two digits>/<hash>, shared between repositories.
    """
    if real.is_relative_to(folder):
        return folder
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", real.name):
        return None
    if real.parent == repository / "blobs":
        return repository
    shared = real.parent.parent == repository.parent / "blobs" and real.parent.name == real.name[:2]
    return repository.parent if shared else None


def _walk(root: Path, parts: Sequence[str]) -> int:
    """The file at the end of these names, none of them a link."""
    here = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        return os.open(parts[-1], _FILE, dir_fd=here)
    finally:
        os.close(here)


def _regular(fd: int, path: Path) -> int:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    _not_regular(path)


def _not_regular(path: Path, error: type[OSError] = OSError) -> NoReturn:
    what = "a folder, not a file" if error is IsADirectoryError else "not a regular file"
    raise error(errno.EISDIR if error is IsADirectoryError else errno.EINVAL, what, str(path))


def read_open(file: BinaryIO, limit: int) -> bytes:
    """What is left to read of a file; an OSError where that is over `limit` bytes."""
    content = bytearray()
    while block := file.read(_BLOCK):  # whatever size it claims
        content += block
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"over {limit} bytes, too many for a file of this kind")
    return bytes(content)
