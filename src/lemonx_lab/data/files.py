"""Finds and decodes the user's data files, or refuses them in one line."""

from __future__ import annotations

import errno
import os
import tokenize
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator

from lemonx.checkpoints.opening import open_file, read_open
from lemonx.errors import BadData

# The most that is read of a file at once; token ids and images are not read whole.
MAX_WHOLE = 4 * 10**9

# A path of the data section; `~` is the user's home.
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]

# What numpy raises over an array that is broken: it reads the header of one as a text of Python.
UNREADABLE_ARRAY = (
    *(OSError, OverflowError, ValueError, EOFError, MemoryError, RecursionError),
    *(SyntaxError, tokenize.TokenError),
)


def reason(error: Exception) -> str:
    """The message of another library's error, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def open_data(path: Path) -> BinaryIO:
    """Open a regular file of the user's."""
    try:
        return open_file(path)
    except FileNotFoundError:
        raise BadData("does not exist", "check the path", file=path) from None
    except RuntimeError:
        raise BadData("is a link to itself", "check the path", file=path) from None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EISDIR):
            raise BadData(f"is {error.strerror}", "check the path", file=path) from None
        raise BadData(f"cannot be read ({error.strerror})", "check its permissions", file=path) from None


def require_folder(path: Path) -> Path:
    """The path, if it is a folder."""
    if not path.is_dir():
        raise BadData("is a file, not a folder" if path.is_file() else "does not exist", "check the path", file=path)
    return path


def require_regular(folder: Path) -> Path:
    """The folder, if it contains no pipe or device, which would hang a library that opens every file."""
    for root, _, names in os.walk(require_folder(folder)):
        for path in (Path(root, name) for name in names):
            if path.exists() and not path.is_file():
                raise BadData("is not a regular file", "remove it", file=path)
    return folder


def read_bytes(path: Path) -> bytes:
    """The bytes of a file."""
    with open_data(path) as file:
        try:
            return read_open(file, MAX_WHOLE)
        except OSError as error:
            raise BadData(
                f"cannot be read ({error.strerror})", "check the disk, or split the file", file=path
            ) from None


def read_text(path: Path, *, replace: bool = False) -> str:
    """The text of a UTF-8 file; bytes that are not UTF-8 are an error, or each becomes U+FFFD with `replace`."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig", errors="replace" if replace else "strict")
    except UnicodeDecodeError as error:
        raise BadData(
            f"is not UTF-8 (byte 0x{data[error.start]:02x} at {error.start})", "convert it, or leave it out", file=path
        ) from None


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """The files under a folder, in the order of their relative paths, without hidden ones."""
    found = [path for path in require_folder(folder).rglob(pattern) if path.is_file()]
    kept = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return sorted(kept, key=lambda path: path.relative_to(folder).as_posix())
