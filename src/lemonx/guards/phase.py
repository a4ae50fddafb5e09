"""What the program is doing just now, in a few words, for whoever shows it: a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


def now(what: str) -> None:
    """Say what begins now.

    >>> said = []
    >>> with told(said.append):
    ...     now("checking every tensor")
    >>> now("nobody listens")
    >>> said
    ['checking every tensor']
    """
    for listener in _listeners:
        listener(what)


@contextmanager
def told(listener: Callable[[str], None]) -> Iterator[None]:
    """A context in which `listener` hears of every phase."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
