"""Runs the survey of all model types by the command that a user types: `lemonx expand FOLDER OUTPUT`."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

from lemonx.errors import BadData, BadTarget
from lemonx_lab.survey import pool
from lemonx_lab.survey.measuring import Grown, told
from lemonx_lab.survey.rows import Record


def survey(only: list[str] | None, kept: Path | None, jobs: int, tell: Callable[[int, int, str], None]) -> Record:
    """A row for every model type and task, or for some types; those in the file `kept` are not measured again.

    The file is written after every row, so that whoever stops the survey can go on with it later.
    """
    if unknown := sorted(set(only or []) - {model_type for model_type, _ in pool.all_jobs()}):
        raise BadTarget(f"transformers has no model type {unknown[0]!r} with a model class", "give another --type")
    before = Record.read(kept)
    known = {(row.model_type, row.task): row for row in before.rows}
    wanted = [job for job in pool.all_jobs() if not only or job[0] in only]
    todo = [job for job in wanted if job not in known]
    random.Random(0).shuffle(todo)  # a part of a survey is then a fair sample
    for done, row in enumerate(pool.survey(todo, (__name__, expand.__name__), at_once=jobs), start=1):
        known[row.model_type, row.task] = row
        tell(done, len(todo), row.model_type)
        if kept:
            Record(before.transformers, list(known.values())).write(kept)
    return Record(before.transformers, [known[job] for job in wanted])


def recorded(only: list[str] | None, kept: Path) -> Record:
    """The rows of a file, and nothing else."""
    if not kept.exists():
        raise BadData("is not there", "measure it: --record", file=kept)
    found = Record.read(kept)
    rows = sorted(found.rows, key=lambda row: (row.model_type, row.task))
    return Record(found.transformers, [row for row in rows if not only or row.model_type in only])


def expand(source: Path, output: Path, options: Sequence[str]) -> Grown:
    """Run `lemonx expand` in a fork of this process, and return what it said.

    A fork has all imports done, and whatever the command does to its process ends with it.
    """
    with TemporaryFile() as printed:
        if not (child := os.fork()):
            os.dup2(printed.fileno(), 1)
            _end_with(["expand", str(source), str(output), *options, "--json"])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        try:
            said = json.loads(printed.read())
        except ValueError:
            said = {"error": {"found": f"it ended by itself ({code})"}}
    return told(code, said)


def _end_with(words: Sequence[str]) -> NoReturn:
    """Run a command of lemonx, and end this process with its exit code."""
    from lemonx.cli import main

    code: object = 1
    try:
        sys.argv = ["lemonx", *words]
        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        os._exit(code if isinstance(code, int) else 0)
