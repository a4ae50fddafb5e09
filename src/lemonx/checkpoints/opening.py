"""Opens all files that come from others: only regular files, and never through a link out of their folder.

A pipe would hang the process that opens it, a device could fill the memory, and a link could lead to a private file of
this machine. Files are hostile by what they hold, not by what another process does with them meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import BinaryIO, NoReturn

from lemonx.errors import BadCheckpoint

MAX_JSON = 100_000_000
# A recipe or an experiment, written by hand.
MAX_TEXT = 1_000_000
_BLOCK = 1 << 20


def open_file(path: Path) -> BinaryIO:
    """Open a file that the user named, through links if need be; an OSError if it is not a regular file."""
    real = path.resolve(strict=True)
    if not real.is_file():  # some devices do things when they are opened
        _not_regular(path, IsADirectoryError if real.is_dir() else OSError)
    return open(real, "rb")


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
    """Return a descriptor of the file `name` in the (resolved) `folder`; links lead only where `real_file` allows."""
    try:
        return os.open(real_file(folder, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        remedy = "allow more of them with ulimit -n" if error.errno == errno.EMFILE else "check its permissions"
        found = f"cannot be opened ({error.strerror})"
        raise BadCheckpoint(found, remedy, file=folder / name) from None


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
    if not _may_lead_to(folder, real):
        raise BadCheckpoint(
            f"is a link out of its folder, to {str(real)!r}", "replace the link with a copy of the file", file=path
        )
    if not real.is_file():
        raise BadCheckpoint("is not a regular file", "replace it with a regular file", file=path)
    return real


def _may_lead_to(folder: Path, real: Path) -> bool:
    """Whether a file lies in the folder itself, or among the blobs of the hub cache whose snapshot the folder is.

    <cache>/models--x/snapshots/<rev>/file -> <cache>/models--x/blobs/<hash>, which in newer caches may
    itself be a link to <cache>/blobs/<two digits>/<hash>, shared between repositories.
    """
    if real.is_relative_to(folder):
        return True
    if folder.parent.name != "snapshots" or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", real.name):
        return False
    repository = folder.parent.parent
    shared = repository.parent / "blobs" / real.name[:2]
    return real.parent in (repository / "blobs", shared)


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
