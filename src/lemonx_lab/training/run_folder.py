"""The folder of a run: which run it belongs to, where the run stopped, and files that appear complete or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lemonx.checkpoints.creating import own_folder, remove, write_whole
from lemonx.checkpoints.destination import OLD, beside, check_apart, clear_leftovers, hold, leftovers
from lemonx.checkpoints.folder import RUN, parse_object
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.replaceable import check_holds, is_of_a_model, is_of_a_run
from lemonx.errors import BadCheckpoint, BadOutput
from lemonx.execution.sidecar_files import Carried
from lemonx.training.curve import CurveRow
from lemonx.verification.certificate import versions
from lemonx_lab.training.recipe import Recipe

CURVE, PICTURE = "curve.csv", "curve.png"
_STATE = "trainer_state.json"
_SAVED = re.compile(r"(checkpoint|stage)-[0-9]+")
# Names that exist while a file is written: hidden names of this package alone.
_HIDDEN = re.compile(
    r"\.partial|\.model|\.expanded|\.stage-[0-9]+|\.ramp-[0-9]+\.safetensors|\..+\.lemonx-(old-)?[0-9a-f]{8}"
)
_LOGS = "runs"  # tensorboard's


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the run: the weights at `step`, for the stage with this number."""

    path: Path
    step: int
    stage: int

    @property
    def history(self) -> list[CurveRow]:
        """The log at the time it was saved."""
        file = self.path / _STATE
        lines = parse_object(read_inside(self.path.resolve(), _STATE), file).get("log_history")
        rows = [_row(line) for line in lines] if isinstance(lines, list) else []
        if not isinstance(lines, list) or not all("seconds" in row for row in rows):
            raise BadOutput("is not the log of a run", f"remove {self.path.name} to start again", file=file)
        return rows


def _row(line: JsonValue) -> CurveRow:
    """The figures of a line of Trainer's log."""
    pairs = line.items() if isinstance(line, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, int | float)}


@contextmanager
def claimed(output: Path, recipe: Recipe, *, resume: bool, force: bool) -> Iterator[None]:
    """Claim `output` as the folder of a new or unfinished run of this recipe; BadOutput if it is anything else.

    A run that fails before its first checkpoint leaves everything as it was; after a killed run, the next one restores
    it.
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
            remedy = "free some space and run the same command again to resume"
            raise BadOutput("cannot be written (disk full)", remedy, file=output) from None
        raise
    else:
        if old:
            remove(old)
    finally:
        if held is not None:
            os.close(held)


def _put_aside(output: Path) -> Path | None:
    """The old run that a killed one was about to replace, if the killed one saved nothing; otherwise it is removed."""
    if not output.parent.is_dir():
        return None
    aside = [path for path in leftovers(output) if OLD in path.name.removeprefix(f".{output.name}")]
    if aside and os.path.lexists(output) and not (_run_of(output) or {}).get("finished") and not saved_folders(output):
        return aside[-1]
    clear_leftovers(output)
    return None


def _undo(output: Path, old: Path | None) -> None:
    """Remove a run that has saved nothing, and put back the run it was to replace; keep files that others put there."""
    try:
        check_holds(output, "a run", _may_hold(_run_of(output) or {}))
    except BadOutput:
        return
    remove(output)
    if old is not None:
        os.rename(old, output)


def _may_hold(content: Mapping[str, JsonValue]) -> Callable[[str], bool]:
    """A test of the names that the folder of a run may hold: figures, model, checkpoints, and copied files."""
    brought = set(_files(content))

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
    """The checkpoints in the folder of a run, by their exact names; a copy that somebody keeps has another name."""
    found = [entry for entry in os.scandir(output) if _SAVED.fullmatch(entry.name)] if output.is_dir() else []
    return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]


def bring_along(output: Path, files: Mapping[str, Carried]) -> None:
    """Copy files next to a run's model, and record that they belong to the run."""
    content = _run_of(output) or {}
    write_whole(output / RUN, json.dumps({**content, "files": sorted(files)}))
    for name, source in files.items():
        own_folder((output / name).parent)
        if isinstance(source, str):
            write_whole(output / name, source)
        else:
            with source() as file:
                write_whole(output / name, file)


def remember(output: Path, key: str, value: JsonValue) -> None:
    """Add something to the account of an unfinished run."""
    write_whole(output / RUN, json.dumps({**(_run_of(output) or {}), key: value}))


def remembered(output: Path, key: str) -> JsonValue:
    return (_run_of(output) or {}).get(key)


def brought_along(output: Path) -> list[str]:
    """The names of the files that `bring_along` recorded."""
    return _files(_run_of(output) or {})


def _files(content: Mapping[str, JsonValue]) -> list[str]:
    listed = content.get("files")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _check_resumable(output: Path, content: Mapping[str, JsonValue], recipe: Recipe, resume: bool) -> None:
    if content.get("finished"):
        raise BadOutput("holds a finished run", "choose another output, or replace it with --force", file=output)
    if content.get("recipe") != recipe.as_dict():
        raise BadOutput(
            "holds an unfinished run of another recipe",
            "continue it with that recipe, choose another output, or replace it with --force",
            file=output,
        )
    if not resume:
        raise BadOutput("holds an unfinished run", "resume it, or replace it with --force", file=output)


def _run_of(output: Path) -> dict[str, JsonValue] | None:
    """The content of run.json; a new or empty folder has None. BadOutput if it holds something else."""
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None
    if not output.is_dir():
        raise BadOutput("is not a folder", "choose another output", file=output)
    try:
        content = parse_object(read_inside(output.resolve(), RUN), output / RUN)
    except BadCheckpoint:
        content = {}
    if "lemonx" not in content:
        raise BadOutput(f"exists and is not the folder of a run (no {RUN})", "choose another output", file=output)
    return content


def _create(output: Path, recipe: Recipe) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        begun = {"lemonx": versions()["lemonx"], "finished": False, "recipe": recipe.as_dict()}
        write_whole(output / RUN, json.dumps(begun))
    except OSError as error:
        raise BadOutput(f"cannot be written ({error.strerror})", "choose another output", file=output) from None


def last_saved(output: Path, ends: Mapping[int, int]) -> Saved | None:
    """The checkpoint to continue from; `ends` maps the number of a stage to its last step."""
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
