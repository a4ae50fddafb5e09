"""compare: run an experiment and answer its question."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lemonx.checkpoints.plain import parse_json
from lemonx.errors import BadRecipe
from lemonx.experiments import result as results
from lemonx.experiments.nodes import cells
from lemonx.experiments.pool import Tell, run_all
from lemonx.experiments.spec import FILE, Experiment, read

CACHE = Path(".lemonx")


def shipped() -> Path:
    """The folder of the experiments that come along: inside an installed package, or at the root of the repository."""
    installed = Path(__file__).parent / "shipped"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "experiments"


def names() -> list[str]:
    return sorted(path.parent.name for path in shipped().glob(f"*/{FILE}"))


def find(name: str) -> Experiment:
    """An experiment by its name, or in a folder of one's own."""
    here = Path(name)
    if here.exists():
        return read(here)
    if name not in names():
        raise BadRecipe(f"no experiment is called {name!r}: give a folder with {FILE}, or one of {', '.join(names())}")
    return read(shipped() / name)


def compare(
    experiment: Experiment,
    output: Path,
    *,
    quick: bool = False,
    seeds: int | None = None,
    cache: Path = CACHE,
    jobs: int | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Run what is missing, and write OUTPUT/result.json; returns its content."""
    asked = experiment.shortened() if quick else experiment
    if seeds is not None:
        asked = asked.model_copy(update={"seeds": tuple(range(seeds))})
    wanted = [node for cell in cells(asked) for node in (cell.trained, *cell.downstream.values())]
    run_all(wanted, cache, jobs=jobs or min(2, os.cpu_count() or 1), tell=tell)
    text = json.dumps(results.result(asked, cache, quick=quick), indent=1) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    partial = output / f".{results.FILE}"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, output / results.FILE)
    return parse_json(text)
