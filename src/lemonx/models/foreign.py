"""Calls transformers and torch silently, offline and without prompts, and turns their errors into one line of ours.

A config.json decides what their code does, so whatever that code raises is reported as a fault of the checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lemonx.errors import BadCheckpoint, LemonxError, Refused
from lemonx.guards.releases import too_old
from lemonx.guards.shown import one_line

# How much of a message is looked at: some repeat all of a config, or a list of a million ids.
_READ = 10_000
# These say in words what is wrong; the message of another type (a KeyError, say) is a fragment without its type.
_WORDED = (ValueError, OSError, RuntimeError, ImportError)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Whoever stops the program is heard.
_PASS = (LemonxError, MemoryError, KeyboardInterrupt, GeneratorExit)


@contextmanager
def foreign(
    doing: str, remedy: str, error: type[LemonxError] = BadCheckpoint, *, who: str = "transformers"
) -> Iterator[None]:
    """A context in which transformers is silent and offline, and whatever it raises becomes a one-line `error`."""
    with in_one_line(doing, remedy, error, who=who), quiet(), _alone():
        yield


@contextmanager
def in_one_line(
    doing: str,
    remedy: str,
    error: type[LemonxError] = BadCheckpoint,
    *,
    who: str = "transformers",
    but: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """A context in which whatever is raised while `doing` ("load './small'") becomes a one-line `error`.

    This includes BaseExceptions: tokenizers panic with one, and code may try to exit. `but`: exceptions to let pass.
    """
    try:
        yield
    except (*_PASS, *but):
        raise
    except BaseException as raised:
        if isinstance(raised, OSError) and is_out_of_room(raised):  # the machine's trouble, not the checkpoint's
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from raised
        if is_out_of_memory(raised):
            raise MemoryError from raised
        raise error(f"{who} cannot {doing} ({reason(raised)})", remedy) from raised


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings and progress bars, and Python's warnings, even where they are set to be errors.

    Every use of transformers passes here, so this is where an old release is refused.
    """
    if old := too_old("transformers"):
        raise Refused(*old)
    from transformers.utils import logging as theirs

    shown, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    # Setting a level, even the same one, walks through every logger of the process.
    if shown != logging.ERROR:
        theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if theirs.get_verbosity() != shown:
            theirs.set_verbosity(shown)
        if bars:
            theirs.enable_progress_bar()


@contextmanager
def _alone() -> Iterator[None]:
    """Fetch nothing from the hub, and never ask whether a checkpoint's own code may run: it may not.

    Some models load parts of themselves (a backbone by its name) in ways that none of our arguments reaches.
    """
    from huggingface_hub import constants
    from transformers import dynamic_module_utils

    with _set(constants, "HF_HUB_OFFLINE", True), _set(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0):
        yield


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def is_out_of_room(raised: OSError) -> bool:
    """Whether the disk is full; numpy says so only in its message."""
    return raised.errno in _NO_ROOM or (raised.errno is None and "requested and" in str(raised))


def is_out_of_memory(raised: BaseException) -> bool:
    """Whether memory ran out: torch has no exception of its own for it on a CPU, nor has Python's compiler."""
    said = str(raised)
    if isinstance(raised, ValueError):  # of a node that the compiler could not allocate
        return re.fullmatch(r"field '\w+' is required for \w+", said) is not None
    return isinstance(raised, RuntimeError) and ("allocate memory" in said or "out of memory" in said)


def reason(raised: BaseException) -> str:
    """What an exception says, in one line.

    >>> reason(ValueError("a head\\n    is too wide."))
    'a head is too wide'
    >>> reason(KeyError("hidden"))
    "KeyError: 'hidden'"
    """
    # A config that is rejected names the validator that rejected it, and then the cause.
    if type(raised).__name__.startswith("StrictDataclass") and raised.__cause__ is not None:
        raised = raised.__cause__
    text = one_line("".join(c if c.isprintable() else " " for c in str(raised)[:_READ]))
    name = type(raised).__name__
    if not text:
        return name
    return text if isinstance(raised, _WORDED) else f"{name}: {text}"
