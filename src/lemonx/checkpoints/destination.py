"""Where an output may be written, and how the finished folder is moved there.

While it is written, an output is a hidden folder beside its final place, locked by the process that writes it. The lock
dies with the process, so the next run can distinguish leftovers of a killed run from a folder that is being written.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from lemonx.checkpoints.replaceable import check_replaceable
from lemonx.errors import BadOutput

OLD = "old-"  # the mark of what was put aside to be replaced
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def check_destination(output: Path, *, source: Path | None, needed: int, force: bool) -> Path:
    """The absolute path of `output`, after a check that `needed` bytes can and may go there.

    It also removes what killed runs left beside it.
    """
    given = Path(os.path.abspath(output))
    try:
        parent = given.parent.resolve(strict=True)
        if not parent.is_dir():
            raise NotADirectoryError
        output = parent / given.name
        if source is not None:
            check_apart(output, source)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise BadOutput("is not writable", "choose another output, or change its permissions", file=parent)
        clear_leftovers(output)
        if os.path.lexists(output):
            if not force:
                raise BadOutput("exists", "choose another output, or replace it with --force", file=output)
            check_replaceable(output)
        free = shutil.disk_usage(parent).free
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        raise BadOutput("is not a folder", "choose another output", file=given.parent) from None
    except OSError as error:
        raise BadOutput(f"cannot be written ({error.strerror})", "choose another output", file=given) from None
    if free < needed:
        raise BadOutput(
            f"needs {size_text(needed)}, but only {size_text(free)} are free",
            "free some space, or choose an output on another disk",
            file=output,
        )
    return output


def check_writable(output: Path, *, source: Path | None, needed: int, force: bool) -> None:
    """BadOutput where `needed` bytes could not be written; nothing is left of the attempt."""
    made = make_parents(output, source)
    try:
        check_destination(output, source=source, needed=needed, force=force)
    finally:
        unmake(made)


def make_parents(output: Path, source: Path | None) -> list[Path]:
    """Create the folders above `output` that are missing; these, the innermost first."""
    output = Path(os.path.abspath(output))
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    if missing and source is not None:
        check_apart(output, source)
    made: list[Path] = []
    for parent in reversed(missing):
        try:
            os.mkdir(parent)
        except FileExistsError:
            continue  # someone else was faster
        except OSError as error:
            unmake(made)
            raise BadOutput(f"cannot be created ({error.strerror})", "choose another output", file=parent) from None
        made.insert(0, parent)
    return made


def unmake(folders: list[Path]) -> None:
    """Remove folders that were made for an output which did not appear, as far as they are empty."""
    for folder in folders:
        with suppress(OSError):
            os.rmdir(folder)


def size_text(count: int) -> str:
    """A number of bytes in readable units.

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
        raise BadOutput("is the source itself", "choose another output", file=output)
    if target.is_relative_to(source):
        raise BadOutput("lies inside the source", "choose an output beside it", file=output)
    if source.is_relative_to(target):
        raise BadOutput("contains the source", "choose an output beside it", file=output)


def beside(output: Path, role: str = "") -> Path:
    """A new name beside `output`, on the same file system, so that one rename can move it there."""
    return output.with_name(f".{output.name}.lemonx-{role}{secrets.token_hex(4)}")


def claim(output: Path) -> tuple[Path, int]:
    """A new hidden folder beside `output`, and a descriptor that keeps it locked until it is closed."""
    return make_and_hold(lambda: beside(output), make_folder)


def make_and_hold(new_name: Callable[[], Path], make: Callable[[Path], int]) -> tuple[Path, int]:
    """A new file or folder under a free name, and a descriptor that keeps it locked until it is closed."""
    while True:
        path = new_name()
        fd = make(path)
        # Before it is locked another start could take it for a leftover.
        if _lock(fd) is not False and path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
            return path, fd
        os.close(fd)


def make_folder(path: Path, mode: int = 0o777) -> int:
    """A descriptor of a new folder."""
    while True:
        os.mkdir(path, mode)
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another start took it for a leftover before it could be locked


def hold(path: Path) -> int | None:
    """A locked descriptor of what a dead process of this user left; None if it lives, is another user's, or a link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # a link, someone else's, or gone by now
    status = os.fstat(fd)
    plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    if plain and status.st_uid == os.geteuid() and _lock(fd):
        return fd
    os.close(fd)
    return None


def _lock(fd: int) -> bool | None:
    """Whether this process now holds the folder; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def leftovers(output: Path) -> list[Path]:
    """The hidden folders beside `output` that runs made for it, dead or alive."""
    pattern = _pattern(output)
    found = (output.with_name(name) for name in sorted(os.listdir(output.parent)) if pattern.fullmatch(name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _pattern(output: Path) -> re.Pattern[str]:
    return re.compile(rf"\.{re.escape(output.name)}\.lemonx-({OLD})?[0-9a-f]{{8}}")


def abandoned(parent: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """Yield what dead processes of this user left under such names, each held while it is dealt with."""
    for name in sorted(os.listdir(parent)):
        if pattern.fullmatch(name) and (held := hold(parent / name)) is not None:
            try:
                yield parent / name
            finally:
                os.close(held)


def clear_leftovers(output: Path) -> None:
    """Remove what killed runs left beside `output`; put back an output that one of them was about to replace."""
    for path in abandoned(output.parent, _pattern(output)):
        if not path.is_dir():
            continue
        if f"-{OLD}" in path.name.removeprefix(f".{output.name}") and not os.path.lexists(output):
            os.rename(path, output)
        else:
            shutil.rmtree(path, ignore_errors=True)


def move_in(finished: Path, output: Path, *, force: bool) -> None:
    """Rename `finished` to `output`; with `force`, what was there is removed once the new one is in place."""
    old = None
    if force and os.path.lexists(output):
        check_replaceable(output)  # once more: hours may have passed
        old = finished if _exchange(finished, output) else _step_aside(finished, output)
    else:
        os.rename(finished, output)
    sync_folder(output.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step, so that `output` always exists; False where the system cannot do that."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _step_aside(finished: Path, output: Path) -> Path:
    """The swap in two steps. If the process is killed between them, the next run puts the old folder back."""
    old = beside(output, OLD)
    os.rename(output, old)
    try:
        os.rename(finished, output)
    except BaseException:
        if not os.path.lexists(output):
            os.rename(old, output)
        raise
    return old


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
