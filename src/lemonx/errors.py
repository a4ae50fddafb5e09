"""Every error that lemonx raises on purpose: what was found, in which file, and what to do about it.

    LemonxError                 exit code
    ├── BadTarget               2   the sizes asked for make no sense
    ├── BadRecipe               2   a training recipe that cannot be followed
    ├── BadCheckpoint           3   the input is broken
    ├── BadData                 3   the data to train on is missing, broken, or does not fit the model
    ├── Refused                 4   it cannot be done losslessly; names the nearest sizes that work
    ├── UnknownArchitecture     4   no spec covers this checkpoint
    ├── BadOutput               5   the output exists, is the source, or cannot be written
    ├── Stopped               130   it was stopped from outside, and something is left to go on with
    └── NotVerified             1   the two models differ
        └── CannotVerify        6   whether they do cannot be found out here: too little memory, a missing instruction

Anything else that escapes (a ValueError, say) is a mistake in the calling code, not in its data.

>>> error = UnknownArchitecture("has model_type 'mamba', which lemonx does not know", "choose another model",
...                             file="config.json")
>>> print(error.in_folder("small"), error.exit_code)
'small/config.json' has model_type 'mamba', which lemonx does not know: choose another model 4
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Self


class LemonxError(Exception):
    """What lemonx raises on purpose; `exit_code` is what the command line then exits with.

    `found` says what is wrong and `remedy` what to do. With a `file` (or folder), that is the subject of `found`: a
    BadCheckpoint of "holds no tensors". `str` joins the three in one line; whoever needs a part reads its field.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, found: str, remedy: str = "", *, file: str | os.PathLike[str] | None = None) -> None:
        super().__init__(found, remedy)  # what pickle calls the class with; `file` follows with the other fields
        self.found = found
        self.remedy = remedy
        self.file = None if file is None else Path(file)

    def __str__(self) -> str:
        where = "" if self.file is None else f"{str(self.file)!r} "
        return f"{where}{self.found}{': ' if self.remedy else ''}{self.remedy}"

    def as_dict(self) -> dict[str, str | None]:
        """The three parts, for JSON."""
        return {"file": None if self.file is None else str(self.file), "found": self.found, "remedy": self.remedy}

    @classmethod
    def of(cls, error: LemonxError) -> Self:
        """The same complaint as an error of this class."""
        return cls(error.found, error.remedy, file=error.file)

    def about(self, subject: str) -> Self:
        """The same complaint about something that is no file, or no file of the user's: a module, an option.

        >>> str(Refused("heads cannot be split", "try 8").about("attention"))
        'attention: heads cannot be split: try 8'
        >>> str(BadCheckpoint("has no hidden_size", file="config.json").about("the target's config.json"))
        "the target's config.json has no hidden_size"
        """
        return type(self)(f"{subject}{' ' if self.file else ': '}{self.found}", self.remedy)

    def in_folder(self, folder: str | os.PathLike[str]) -> Self:
        """The same complaint about a file of this folder, or about the folder where it names no file."""
        if self.file is None:
            return self.about(repr(str(folder)))
        return type(self)(self.found, self.remedy, file=Path(folder) / self.file)


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


class Stopped(LemonxError):
    """The user stopped it (Ctrl-C), or the system did: says what is there by now, and how to go on."""

    exit_code: ClassVar[int] = 130


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
