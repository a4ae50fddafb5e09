"""Opens all files that come from others: only regular files, each once, and checked through the open descriptor.

A pipe would hang the process that opens it, a device could fill the memory, and a link could lead to a private file of
this machine. Another process may replace a file between a check of its name and its opening. So a file is opened
without following links and without waiting, and only the open descriptor is checked.
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
    """Open a file that the user named, through links if need be; an OSError if it is not a regular file."""
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
    """A descriptor of the file `name` in the (resolved) `folder`; links may lead only where `real_file` allows."""
    real, path = real_file(folder, name), folder / name
    root = _root(folder, real)
    assert root is not None
    try:
        return _regular(_walk(root, real.relative_to(root).parts), path)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT, errno.EINVAL):
            raise changed(path) from None
        remedy = "allow more of them with ulimit -n" if error.errno == errno.EMFILE else "check its permissions"
        raise BadCheckpoint(f"cannot be opened ({error.strerror})", remedy, file=path) from None


def file_inside(folder: Path, name: str) -> BinaryIO:
    """The same as a file to read from."""
    return os.fdopen(open_inside(folder, name), "rb")


def name_of(fd: int) -> str:
    """A path that leads to this open file, for libraries that take only paths."""
    return f"/dev/fd/{fd}"


def read_inside(folder: Path, name: str) -> bytes:
    """The content of a small file in a folder."""
    with file_inside(folder, name) as file:
        return read_small(file, folder / name)


def read_small(file: BinaryIO, path: Path) -> bytes:
    """The content of a small open file; `path` is for messages."""
    try:
        return read_open(file, MAX_JSON)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BadCheckpoint(
                f"has over {MAX_JSON} bytes, too many for a JSON file", "save it again", file=path
            ) from None
        raise BadCheckpoint(f"cannot be read ({error.strerror})", "check its permissions", file=path) from None


def changed(path: Path) -> BadCheckpoint:
    """The error for a file that was changed, truncated or replaced while it was in use."""
    return BadCheckpoint("changed while it was read", "start again when nothing writes to it", file=path)


def identity(fd: int) -> tuple[int, ...]:
    """What identifies an open file, and changes when the file is written to."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def real_file(folder: Path, name: str) -> Path:
    """The real path of `name` in the (resolved) `folder`, if it lies where it may.

    Links may stay inside the folder or lead to the hub cache's own blobs. Any other link could copy a
    private file of this machine into the output.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        if path.is_symlink():
            raise BadCheckpoint(
                "is a link to nothing", "download the file again, or remove the link", file=path
            ) from None
        raise BadCheckpoint("does not exist", "download or save the checkpoint again", file=path) from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise BadCheckpoint(f"cannot be followed ({error})", "check it and its permissions", file=path) from None
    if _root(folder, real) is None:
        raise BadCheckpoint(
            f"is a link out of its folder, to {str(real)!r}", "replace the link with a copy of the file", file=path
        )
    if not real.is_file():
        raise BadCheckpoint("is not a regular file", "replace it with a regular file", file=path)
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
    """The rest of an open file; an OSError if that is more than `limit` bytes."""
    content = bytearray()
    while block := file.read(_BLOCK):  # whatever size it claims
        content += block
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"over {limit} bytes, too many for a file of this kind")
    return bytes(content)
