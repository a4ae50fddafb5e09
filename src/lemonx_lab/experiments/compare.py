"""compare: run an experiment and answer its question."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lemonx.checkpoints.creating import write_whole
from lemonx.errors import BadOutput, BadRecipe
from lemonx_lab.experiments import report, result_file
from lemonx_lab.experiments.nodes import cells, check
from lemonx_lab.experiments.pool import Tell, run_all
from lemonx_lab.experiments.result import result
from lemonx_lab.experiments.result_file import Result
from lemonx_lab.experiments.spec import Experiment, read

CACHE = Path(".lemonx")


def shipped() -> Path:
    """The folder of the experiments that ship: inside an installed package, or at the root of the repository."""
    installed = Path(__file__).parent / "shipped"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "experiments"


def names() -> list[str]:
    return sorted(path.stem for path in shipped().glob("*.toml"))


def find(name: str) -> Experiment:
    """Return an experiment by its name, or from the user's own file."""
    here = Path(name)
    if here.exists():
        return read(here)
    if name not in names():
        raise BadRecipe(f"no experiment is called {name!r}", f"give a TOML file, or one of {', '.join(names())}")
    return read(shipped() / f"{name}.toml")


def compare(
    experiment: Experiment,
    output: Path,
    *,
    quick: bool = False,
    seeds: int | None = None,
    cache: Path = CACHE,
    jobs: int | None = None,
    tell: Tell | None = None,
) -> Result:
    """Run what is missing, and write OUTPUT/result.json; returns its content."""
    _check_result(output / result_file.FILE)
    cache = cache.resolve()  # an unfinished run is known by where its source lies
    asked = experiment.shortened() if quick else experiment
    if seeds is not None:
        asked = asked.model_copy(update={"seeds": tuple(range(seeds))})
    wanted = [node for cell in cells(asked) for node in (cell.trained, *cell.downstream.values())]
    check(wanted)
    run_all(wanted, cache, jobs=jobs or min(2, os.cpu_count() or 1), tell=tell)
    found = result(asked, cache, quick=quick)
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / result_file.FILE, json.dumps(found.as_json(), indent=1) + "\n")
    return found


def _check_result(path: Path) -> None:
    """BadOutput, before hours are spent, if this name is taken by anything other than an older result."""
    try:
        ours = not os.path.lexists(path) or (not path.is_symlink() and bool(report.read(path).versions))
    except BadRecipe:
        ours = False
    if not ours:
        raise BadOutput("exists and is not a result of lemonx's", "choose another --output", file=path)
