"""Errors about a checkpoint name the folder that was asked for, wherever it was read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.reader import Checkpoint
from lemonx.errors import BadCheckpoint, UnknownArchitecture

_P = ParamSpec("_P")
_R = TypeVar("_R")


def names_its_folder(function: Callable[Concatenate[Checkpoint, _P], _R]) -> Callable[Concatenate[Checkpoint, _P], _R]:
    """Decorate a function so that its errors about the checkpoint it is given name the folder."""

    @functools.wraps(function)
    def wrapped(checkpoint: Checkpoint, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(checkpoint, *args, **kwargs)
        except (BadCheckpoint, UnknownArchitecture) as error:
            if error.file == Path(CONFIG):
                raise type(error)(error.found, error.remedy, file=checkpoint.config_file) from error
            raise error.in_folder(checkpoint.origin) from error

    return wrapped
