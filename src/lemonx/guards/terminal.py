"""The one door to the terminal for plain text; tables and bars go through `show.console`, which stands on it.

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


def complain(message: object) -> None:
    """One line for people, where errors go."""
    _write(sys.stderr, f"lemonx: {shown(message)}\n")


def print_json(content: Any) -> None:
    """For programs: whole, and in ASCII, so that no character of it can do anything."""
    _write(sys.stdout, json.dumps(content, indent=2) + "\n")


def print_lines(text: str) -> None:
    """A text of several lines, each of them whole: to be read, or to be put into a file."""
    _write(sys.stdout, shown_lines(text))


def _write(stream: Any, text: str) -> None:
    if stream is None:  # without a terminal there may be none
        return
    try:
        bare(stream).write(text)
    except BrokenPipeError:  # before the parser of the command line sees it, which would exit with 1
        leave()


class _Guard:
    """A stream that shows what control characters there are instead of passing them on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(shown_lines(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def bare(stream: Any) -> Any:
    """The stream behind a guard: for text that is fit to be shown, with colours of our own."""
    return stream.stream if isinstance(stream, _Guard) else stream


def guard() -> None:
    """From now on whatever is written to the standard streams, by whomever, is fit to be shown."""
    for name in ("stdout", "stderr"):
        stream = bare(getattr(sys, name))
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a locale may not know all characters
        if stream is not None:
            setattr(sys, name, _Guard(stream))


@contextmanager
def guarded() -> Iterator[None]:
    """A context with guards; where nobody reads any more, the process ends without a word."""
    before = sys.stdout, sys.stderr
    guard()
    try:
        yield
    except BrokenPipeError:
        leave()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            leave()
        finally:
            sys.stdout, sys.stderr = before


def leave() -> NoReturn:
    """End the process, as nobody reads what it writes."""
    # The interpreter would write what is left once more, and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(NO_READER)
