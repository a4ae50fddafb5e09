"""The folder of a run: whose it is, where the run stopped, and files that appear whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemonx.certificate import versions
from lemonx.checkpoints.destination import beside, check_apart
from lemonx.checkpoints.folder import parse_object, read_bytes
from lemonx.checkpoints.plain import parse_json
from lemonx.errors import BadCheckpoint, BadOutput
from lemonx.training.recipe import Recipe

RUN, CURVE, PICTURE = "run.json", "curve.csv", "curve.png"
_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the run itself: the weights at `step`, for the stage with this number."""

    path: Path
    step: int
    stage: int

    @property
    def history(self) -> list[dict[str, Any]]:
        """What had been logged when it was saved."""
        file = self.path / _STATE
        lines = parse_object(read_bytes(file), file).get("log_history")
        if not isinstance(lines, list) or not all(isinstance(line, dict) and "seconds" in line for line in lines):
            raise BadOutput(f"{str(file)!r} is not the log of a run: remove {self.path.name} to start again")
        return lines


@contextmanager
def claimed(output: Path, recipe: Recipe, *, resume: bool, force: bool) -> Iterator[None]:
    """`output` as the folder of a run of this recipe, new or unfinished; anything else is a BadOutput.

    A run that fails before its first checkpoint leaves things as they were.
    """
    for read in (recipe.source, recipe.inheritance and recipe.inheritance.teacher):
        if read is not None:
            check_apart(output, Path(read))
    content = _run_of(output)
    old = None
    if content is not None and force:
        # Renamed first: a run that is half removed must not look like an unfinished one.
        old = beside(output, "old-")
        os.rename(output, old)
        content = None
    if content is None:
        _create(output, recipe)
    else:
        _check_resumable(output, content, recipe, resume)
    try:
        yield
    except BaseException as error:
        if not any(output.glob("checkpoint-*")) and not any(output.glob("stage-*")):
            shutil.rmtree(output)
            if old is not None:
                os.rename(old, output)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadOutput(f"{str(output)!r}: no room is left: make some, and the same command goes on") from None
        raise
    finally:
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)


def _check_resumable(output: Path, content: Mapping[str, Any], recipe: Recipe, resume: bool) -> None:
    if content.get("finished"):
        raise BadOutput(f"{str(output)!r} holds a finished run: choose another output, or --force its replacement")
    if content.get("recipe") != recipe.as_dict():
        raise BadOutput(
            f"{str(output)!r} holds an unfinished run of another recipe: give that recipe to go on with it, "
            "choose another output, or --force its replacement"
        )
    if not resume:
        raise BadOutput(f"{str(output)!r} holds an unfinished run: resume it, or --force its replacement")


def _run_of(output: Path) -> dict[str, Any] | None:
    """The content of run.json; None if there is nothing yet. A folder of something else is a BadOutput."""
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None
    if not output.is_dir():
        raise BadOutput(f"{str(output)!r} is not a folder: choose another output")
    try:
        content = parse_json(read_bytes(output / RUN))
    except (BadCheckpoint, ValueError):
        content = None
    if not isinstance(content, dict) or "lemonx" not in content:
        raise BadOutput(f"{str(output)!r} exists and is not the folder of a run (no {RUN}): choose another output")
    return content


def _create(output: Path, recipe: Recipe) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        begun = {"lemonx": versions()["lemonx"], "finished": False, "recipe": recipe.as_dict()}
        write_text(output / RUN, json.dumps(begun))
    except OSError as error:
        raise BadOutput(f"{str(output)!r} cannot be written ({error.strerror}): choose another output") from None


def write_text(path: Path, text: str) -> None:
    """The whole text, or what was there before."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def last_saved(output: Path, ends: Mapping[int, int]) -> Saved | None:
    """The checkpoint to go on from; `ends` maps the number of a stage to its last step."""
    found = []
    for path in output.iterdir():
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / _STATE).is_file():
            step = int(match[1])
            stages = [stage for stage, end in ends.items() if step <= end]
            found += [Saved(path, step, min(stages))] if stages else []  # no checkpoint of this run has more steps
        elif (match := re.fullmatch(r"stage-(\d+)", path.name)) and (path / _STATE).is_file():
            stage = int(match[1])
            found += [Saved(path, ends[stage - 1], stage)] if stage - 1 in ends else []
    return max(found, key=lambda saved: (saved.step, saved.stage), default=None)
