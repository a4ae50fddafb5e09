"""The folder of a run: whose it is, where the run stopped, and files that appear whole."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemonx.checkpoints.creating import own_folder, remove, write_whole
from lemonx.checkpoints.destination import OLD, beside, check_apart, clear_leftovers, hold, leftovers
from lemonx.checkpoints.folder import parse_object
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.replaceable import check_holds, is_of_a_model, is_of_a_run
from lemonx.errors import BadCheckpoint, BadOutput
from lemonx.execution.sidecar_files import Carried
from lemonx.training.recipe import Recipe
from lemonx.verification.certificate import versions

RUN, CURVE, PICTURE = "run.json", "curve.csv", "curve.png"
_STATE = "trainer_state.json"
_SAVED = re.compile(r"(checkpoint|stage)-[0-9]+")
# What is there while something is written: hidden names of this package alone.
_HIDDEN = re.compile(r"\.partial|\.model|\.expanded|\.stage-[0-9]+|\..+\.lemonx-(old-)?[0-9a-f]{8}")
_LOGS = "runs"  # tensorboard's


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
        lines = parse_object(read_inside(self.path.resolve(), _STATE), file).get("log_history")
        if not isinstance(lines, list) or not all(isinstance(line, dict) and "seconds" in line for line in lines):
            raise BadOutput(f"{str(file)!r} is not the log of a run: remove {self.path.name} to start again")
        return lines


@contextmanager
def claimed(output: Path, recipe: Recipe, *, resume: bool, force: bool) -> Iterator[None]:
    """`output` as the folder of a run of this recipe, new or unfinished; anything else is a BadOutput.

    A run that fails before its first checkpoint leaves things as they were; one that was killed, once it is started
    again.
    """
    for read in (recipe.source, recipe.inheritance and recipe.inheritance.teacher):
        if read is not None:
            check_apart(output, Path(read))
    output = Path(os.path.abspath(output))
    old = _put_aside(output)
    content = _run_of(output)
    if content is not None and force:
        check_holds(output, "a run", _may_hold(content))
        # Renamed first: a run that is half removed must not look like an unfinished one.
        old = old or beside(output, OLD)
        remove(output) if old.exists() else os.rename(output, old)
        content = None
    if content is None:
        _create(output, recipe)
    else:
        _check_resumable(output, content, recipe, resume)
    held = old and hold(old)
    try:
        yield
    except BaseException as error:
        if not saved_folders(output):
            _undo(output, old)
        elif old:
            remove(old)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadOutput(
                f"{str(output)!r}: disk full: free some space and run the same command again to resume"
            ) from None
        raise
    else:
        if old:
            remove(old)
    finally:
        if held is not None:
            os.close(held)


def _put_aside(output: Path) -> Path | None:
    """The run that a killed one was about to replace, if that one has saved nothing yet; else such are cleared."""
    if not output.parent.is_dir():
        return None
    aside = [path for path in leftovers(output) if OLD in path.name.removeprefix(f".{output.name}")]
    if aside and os.path.lexists(output) and not (_run_of(output) or {}).get("finished") and not saved_folders(output):
        return aside[-1]
    clear_leftovers(output)
    return None


def _undo(output: Path, old: Path | None) -> None:
    """Remove a run that has saved nothing, and put back what it was to replace; what others put there stays."""
    try:
        check_holds(output, "a run", _may_hold(_run_of(output) or {}))
    except BadOutput:
        return
    remove(output)
    if old is not None:
        os.rename(old, output)


def _may_hold(content: Mapping[str, Any]) -> Callable[[str], bool]:
    """Which names the folder of a run may have: its figures, its model, its checkpoints, and what it brought along."""
    listed = content.get("files")
    brought = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()

    def allowed(name: str) -> bool:
        first, slash, below = name.partition("/")
        if slash and _SAVED.fullmatch(first):
            return not below or is_of_a_run(below)
        if slash and first == _LOGS:
            return name.endswith("/") or ".tfevents." in name
        ours = name in (RUN, CURVE, PICTURE) or _HIDDEN.fullmatch(first) is not None
        return ours or name in brought or is_of_a_model(name)

    return allowed


def saved_folders(output: Path) -> list[Path]:
    """The checkpoints in the folder of a run, by their exact names: a copy that somebody keeps has another."""
    found = [entry for entry in os.scandir(output) if _SAVED.fullmatch(entry.name)] if output.is_dir() else []
    return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]


def bring_along(output: Path, files: Mapping[str, Carried]) -> None:
    """Put files beside a run's model, and write down that they are the run's."""
    content = _run_of(output) or {}
    write_whole(output / RUN, json.dumps({**content, "files": sorted(files)}))
    for name, source in files.items():
        own_folder((output / name).parent)
        if isinstance(source, str):
            write_whole(output / name, source)
        else:
            with source() as file:
                write_whole(output / name, file)


def brought_along(output: Path) -> list[str]:
    """The names of these files."""
    return (_run_of(output) or {}).get("files", [])


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
        content = parse_object(read_inside(output.resolve(), RUN), output / RUN)
    except BadCheckpoint:
        content = {}
    if "lemonx" not in content:
        raise BadOutput(f"{str(output)!r} exists and is not the folder of a run (no {RUN}): choose another output")
    return content


def _create(output: Path, recipe: Recipe) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        begun = {"lemonx": versions()["lemonx"], "finished": False, "recipe": recipe.as_dict()}
        write_whole(output / RUN, json.dumps(begun))
    except OSError as error:
        raise BadOutput(f"{str(output)!r} cannot be written ({error.strerror}): choose another output") from None


def last_saved(output: Path, ends: Mapping[int, int]) -> Saved | None:
    """The checkpoint to go on from; `ends` maps the number of a stage to its last step."""
    found = []
    for path in saved_folders(output):
        kind, _, number = path.name.partition("-")
        if not (path / _STATE).is_file():
            continue
        if kind == "checkpoint":
            step = int(number)
            stages = [stage for stage, end in ends.items() if step <= end]
            found += [Saved(path, step, min(stages))] if stages else []  # no checkpoint of this run has more steps
        else:
            stage = int(number)
            found += [Saved(path, ends[stage - 1], stage)] if stage - 1 in ends else []
    return max(found, key=lambda saved: (saved.step, saved.stage), default=None)
