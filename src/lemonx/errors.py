"""Every error that lemonx raises on purpose; each message is one line: what was found, and what to do.

    LemonxError                 exit code
    ├── BadTarget               2   the sizes asked for make no sense
    ├── BadRecipe               2   a training recipe that cannot be followed
    ├── BadCheckpoint           3   the input is broken
    ├── BadData                 3   the data to train on is missing, broken, or does not fit the model
    ├── Refused                 4   it cannot be done losslessly; names the nearest sizes that work
    ├── UnknownArchitecture     4   no spec covers this checkpoint
    ├── BadOutput               5   the output exists, is the source, or cannot be written
    └── NotVerified             1   the two models differ
        └── CannotVerify        6   whether they do cannot be found out here: too little memory, a missing instruction

Anything else that escapes (a ValueError, say) is a mistake in the calling code, not in its data.

>>> UnknownArchitecture("'mamba' has no spec").exit_code
4
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class LemonxError(Exception):
    """What lemonx raises on purpose; `exit_code` is what the command line then exits with."""

    exit_code: ClassVar[int] = 2


class BadTarget(LemonxError):
    """The sizes asked for make no sense: smaller than the source, not an integer, unknown."""

    exit_code: ClassVar[int] = 2


class BadRecipe(LemonxError):
    """A training recipe that cannot be followed: an unknown key, a wrong value, settings that contradict each other."""

    exit_code: ClassVar[int] = 2


class BadCheckpoint(LemonxError):
    """The input is broken, incomplete, or not safe to read."""

    exit_code: ClassVar[int] = 3


class BadData(LemonxError):
    """The data to train on is missing, broken, or does not fit the task or the model."""

    exit_code: ClassVar[int] = 3


class Refused(LemonxError):
    """The expansion is impossible, or not supported, without changing the function."""

    exit_code: ClassVar[int] = 4


class UnknownArchitecture(LemonxError):
    """No spec covers this checkpoint."""

    exit_code: ClassVar[int] = 4


class BadOutput(LemonxError):
    """The output exists, is or touches the source, or cannot be written."""

    exit_code: ClassVar[int] = 5


class NotVerified(LemonxError):
    """The source and the target do not compute the same function."""

    exit_code: ClassVar[int] = 1


class CannotVerify(NotVerified):
    """Whether the two compute the same function cannot be found out on this machine."""

    exit_code: ClassVar[int] = 6


def raise_first(problems: Iterable[LemonxError]) -> None:
    """Raise the first of these, if there is one: a check that can also list all it finds."""
    for problem in problems:
        raise problem
