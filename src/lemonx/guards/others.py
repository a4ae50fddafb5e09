"""Keeps the warnings of other libraries off the terminal: what matters is said by lemonx, in its own words.

LEMONX_DEBUG=1 shows them. Libraries that others would import for nothing are kept out of a command too.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Read by the libraries when they are imported, here or in a child process.
_SETTINGS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


@contextmanager
def silenced() -> Iterator[None]:
    """A context in which other libraries neither warn nor log to the terminal; what a user has set is kept."""
    if os.environ.get("LEMONX_DEBUG"):
        yield
        return
    new = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(new)
    # Without any handler, logging prints warnings itself.
    root, nowhere = logging.getLogger(), logging.NullHandler()
    root.addHandler(nowhere)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(nowhere)
        for name in new:
            os.environ.pop(name, None)


_not_needed: list[str] = []


@contextmanager
def doing_without(*packages: str) -> Iterator[None]:
    """A context, for a command as a whole, in which whatever is imported `without_extras` finds none of these."""
    _not_needed.extend(packages)
    try:
        yield
    finally:
        _not_needed.clear()


@contextmanager
def without_extras() -> Iterator[None]:
    """A context in which packages that this command does without count as not installed, unless they are imported."""
    hidden = [package for package in _not_needed if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]
