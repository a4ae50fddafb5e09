"""Surveys many model types, each in a process of its own with limits on time and memory."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from lemonx.guards.terminal import silence
from lemonx.models.foreign import foreign
from lemonx_lab.survey import classes
from lemonx_lab.survey.measuring import measure
from lemonx_lab.survey.rows import Row

# For one model type in one task, all its columns.
SECONDS, MEMORY = 600.0, 8 * 2**30
Job = tuple[str, str]
# The module and the name of the function that grows a folder, which each process imports itself.
Where = tuple[str, str]


@dataclass(frozen=True)
class _Running:
    process: Any
    job: Job
    until: float


def all_jobs() -> list[Job]:
    """Every model type with every task that it is surveyed in."""
    return [(model_type, task) for model_type in classes.types() for task in classes.tasks(model_type)]


def survey(jobs: Sequence[Job], grow: Where, *, at_once: int = 1, seconds: float = SECONDS) -> Iterator[Row]:
    """Yield a row for every job, as they are done.

    The processes are forks of one that has imported what all need; in each nothing is fetched, and nothing is printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lemonx_lab.survey.preload"])
    waiting, running = list(jobs)[::-1], dict[Connection, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(theirs, job, grow), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Running(process, job, monotonic() + seconds)
            soonest = min(one.until for one in running.values())
            for ready in wait(list(running), timeout=max(0.0, soonest - monotonic())):
                assert isinstance(ready, Connection)
                yield _received(ready, running.pop(ready))
            for late in [end for end, one in running.items() if one.until <= monotonic()]:
                one = running.pop(late)
                _end(one.process)
                late.close()
                yield Row(*one.job, why=f"stopped after {seconds:.0f} seconds")
    finally:
        for one in running.values():
            _end(one.process)


def _received(end: Connection, one: _Running) -> Row:
    try:
        return end.recv()
    except EOFError:  # killed by the system, or out of memory
        one.process.join()
        return Row(*one.job, why=f"the process ended by itself ({one.process.exitcode})")
    finally:
        end.close()
        _end(one.process)


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _work(end: Connection, job: Job, grow: Where) -> None:
    """One job, in its own process."""
    silence()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        module, name = grow
        function = getattr(import_module(module), name)
        with foreign("survey this model type", "leave it out"):
            end.send(measure(*job, function))
    except MemoryError:
        end.send(Row(*job, why=f"takes more than {MEMORY // 2**30} GiB"))
    except Exception as error:
        end.send(Row(*job, why=str(error)))
