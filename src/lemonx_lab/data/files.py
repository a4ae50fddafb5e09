"""Opens the user's data files, or refuses them in one line."""

from __future__ import annotations

import errno
import importlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator

from lemonx.checkpoints.opening import open_file, read_open
from lemonx.errors import BadData
from lemonx.models.foreign import in_one_line

# The most that is read of a file at once; token ids and images are not read whole.
MAX_WHOLE = 4 * 10**9

# A path of the data section; `~` is the user's home.
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]


def require(module: str, what: str) -> None:
    """Raise if a package that `what` needs is not installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise BadData(f"{what} needs {module.split('.')[0]}", "pip install lemonx[lab]") from None


def reading(path: Path | str, remedy: str) -> AbstractContextManager[None]:
    """A context in which whatever a library raises becomes one line about this file."""
    return in_one_line(f"read {str(path)!r}", remedy, BadData, who="lemonx")


def open_data(path: Path) -> BinaryIO:
    """Open a regular file of the user's."""
    try:
        if not path.exists():
            raise BadData("does not exist", "check the path", file=path)
        return open_file(path)
    except OSError as error:
        is_other = error.errno in (errno.EINVAL, errno.EISDIR)
        found = f"is {error.strerror}" if is_other else f"cannot be opened ({error.strerror})"
        raise BadData(found, "check the path", file=path) from None


def read_bytes(path: Path) -> bytes:
    """The bytes of a file."""
    with open_data(path) as file, reading(path, "check the disk, or split the file"):
        return read_open(file, MAX_WHOLE)


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a UTF-8 file; bytes that are not UTF-8 are an error, or each becomes U+FFFD with `replace`."""
    data = read_bytes(path)
    with reading(path, "convert it to UTF-8, or leave it out"):
        return data.decode("utf-8-sig", errors=errors)


def require_folder(path: Path) -> Path:
    """The path, if it is a folder."""
    if not path.is_dir():
        raise BadData("is not a folder" if path.exists() else "does not exist", "check the path", file=path)
    return path


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """The files under a folder, in the order of their relative paths, without hidden ones."""
    found = {path.relative_to(folder): path for path in require_folder(folder).rglob(pattern) if path.is_file()}
    kept = [name for name in found if not any(part.startswith(".") for part in name.parts)]
    return [found[name] for name in sorted(kept, key=Path.as_posix)]
