"""Prints plain text to the terminal; tables and progress bars go through the console of `cli/render`, built on this.

Nothing else in the package prints. What other libraries write to the standard streams passes through here too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lemonx.guards.shown import shown, shown_lines

# What a shell says of a process that wrote to a pipe without a reader.
NO_READER = 141


_quiet = [False]


def be_quiet(quiet: bool) -> None:
    """From now on print results for people or not; errors, and JSON that was asked for, are printed in any case."""
    _quiet[0] = quiet


def is_quiet() -> bool:
    return _quiet[0]


class NotPrinted(OSError):
    """What was printed cannot be written: the disk that it goes to is full, say."""


def complain(message: object) -> None:
    """One line for people, where errors go; if it cannot be written, there is nobody to tell."""
    try:
        _write(sys.stderr, f"lemonx: {shown(message)}\n")
    except NotPrinted:
        _to_nowhere(2)


def print_json(content: Any) -> None:
    """Print JSON for programs: uncut, and in ASCII, so that no character can affect a terminal."""
    _write(sys.stdout, json.dumps(content, indent=2) + "\n")


def print_lines(text: str) -> None:
    """Print a text of several lines, uncut: for reading, or for redirection to a file."""
    _write(sys.stdout, shown_lines(text))


def _write(stream: Any, text: str) -> None:
    if stream is None:  # without a terminal there may be none
        return
    try:
        _put(bare(stream), text)
    except BrokenPipeError:  # before the parser of the command line sees it, which would exit with 1
        leave()


def _put(stream: Any, text: str) -> None:
    try:
        stream.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NotPrinted(error.errno, error.strerror) from None


class _Guard:
    """A stream that escapes control characters instead of passing them on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        _put(self.stream, shown_lines(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def bare(stream: Any) -> Any:
    """The stream behind a guard: for text that is already safe, with our own colours."""
    return stream.stream if isinstance(stream, _Guard) else stream


def guard() -> None:
    """From now on, escape everything that anyone writes to the standard streams."""
    for name in ("stdout", "stderr"):
        stream = bare(getattr(sys, name))
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a locale may not know all characters
        if stream is not None:
            setattr(sys, name, _Guard(stream))


@contextmanager
def guarded(unwritable: int) -> Iterator[None]:
    """A context with guarded streams; if the reader of a pipe has gone, the process ends silently.

    Where what was printed cannot be written, on a full disk say, it ends with the exit code `unwritable`.
    """
    before = sys.stdout, sys.stderr
    guard()
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        leave()
    except OSError as error:
        complain(f"what was printed cannot be written ({error.strerror}): check where it goes")
        leave(unwritable)
    finally:
        sys.stdout, sys.stderr = before


def leave(code: int = NO_READER) -> NoReturn:
    """End the process, as nobody can read what it writes."""
    # The interpreter would write what is left once more, and complain.
    _to_nowhere(sys.stdout.fileno())
    raise SystemExit(code)


def silence() -> None:
    """From now on nothing of what this process writes to the standard streams is seen."""
    for stream in (1, 2):
        _to_nowhere(stream)


def _to_nowhere(stream: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
