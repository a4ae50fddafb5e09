"""Where everything is printed, and a word while something takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False)


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[None]:
    if quiet:
        yield
    else:
        with console(stderr=True).status(what):
            yield
