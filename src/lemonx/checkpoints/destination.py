"""Where an output may go, and how a finished folder takes its place there."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from lemonx.errors import BadOutput


def check_destination(output: Path, *, source: Path | None, needed: int, force: bool) -> Path:
    """The absolute path of `output`, after a check that `needed` bytes can and may go there."""
    given = Path(os.path.abspath(output))
    try:
        parent = given.parent.resolve(strict=True)
        if not parent.is_dir():
            raise NotADirectoryError
        output = parent / given.name
        if source is not None:
            check_apart(output, source)
        if os.path.lexists(output):
            _check_replaceable(output, force)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise BadOutput(f"{str(parent)!r} is not writable: choose another output, or change its permissions")
        free = shutil.disk_usage(parent).free
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        raise BadOutput(f"{str(given.parent)!r} is not a folder: create it first, or choose another output") from None
    except OSError as error:
        raise BadOutput(f"{str(given)!r} cannot be written ({error.strerror}): choose another output") from None
    if free < needed:
        raise BadOutput(f"{str(output)!r} needs {size_text(needed)}, but only {size_text(free)} are free: make room")
    return output


def size_text(count: int) -> str:
    """A number of bytes for people.

    >>> size_text(950), size_text(90_868_376)
    ('950 bytes', '90.9 MB')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def check_apart(output: Path, source: Path) -> None:
    """BadOutput if writing to `output` could change `source`."""
    source = source.resolve()
    target = output.resolve()
    if target == source or (target.exists() and source.exists() and target.samefile(source)):
        raise BadOutput(f"{str(output)!r} is the source itself: choose another output")
    if target.is_relative_to(source):
        raise BadOutput(f"{str(output)!r} lies inside the source: choose an output beside it")
    if source.is_relative_to(target):
        raise BadOutput(f"{str(output)!r} contains the source: choose an output beside it")


def _check_replaceable(output: Path, force: bool) -> None:
    """`force` replaces a checkpoint, and nothing that could be something else."""
    if not force:
        raise BadOutput(f"{str(output)!r} exists: choose another output, or force its replacement")
    if output.is_symlink() or not output.is_dir():
        raise BadOutput(f"{str(output)!r} is not a folder, so it is not replaced: choose another output")
    names = set(os.listdir(output))
    if names and (".git" in names or "config.json" not in names):
        kind = "a git repository" if ".git" in names else "not a checkpoint (no config.json)"
        raise BadOutput(f"{str(output)!r} is {kind}, so it is not replaced: choose another output")


def beside(output: Path, role: str = "") -> Path:
    """A new name beside `output`, on the same file system, so that a rename is enough to move in."""
    return output.with_name(f".{output.name}.lemonx-{role}{secrets.token_hex(4)}")


def move_in(finished: Path, output: Path, *, force: bool) -> None:
    """Rename `finished` to `output`; with `force`, what was there is removed once the new one is in place."""
    old = beside(output, "old-")
    replaced = force and os.path.lexists(output)
    if replaced:
        os.rename(output, old)
    try:
        os.rename(finished, output)
    except BaseException:
        if replaced and not os.path.lexists(output):
            os.rename(old, output)
        raise
    sync_folder(output.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
