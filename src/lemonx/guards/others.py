"""Keeps the warnings of other libraries off the terminal: what matters is said by lemonx, in its own words.

LEMONX_DEBUG=1 shows them.
"""

from __future__ import annotations

import logging
import os
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
