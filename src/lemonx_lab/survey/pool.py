"""Surveys many model types, each in a process of its own with limits on time and memory."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from multiprocessing.connection import Connection
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
# Every surveyed model needs them: imported once, in the process that the others are forks of.
_PRELOADED = [
    "lemonx_lab.survey.measuring",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
]


def all_jobs() -> list[Job]:
    """Every model type with every task that it is surveyed in."""
    return [(model_type, task) for model_type in classes.types() for task in classes.tasks(model_type)]


def survey(jobs: Sequence[Job], grow: Where, *, at_once: int = 1, seconds: float = SECONDS) -> Iterator[Row]:
    """Yield a row for every job, as they are done.

    The processes are forks of one that has imported what all need; in each nothing is fetched, and nothing is printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    running: set[Any] = set()
    with ThreadPoolExecutor(at_once) as threads:
        try:
            results = [threads.submit(_row, context, job, grow, seconds, running) for job in jobs]
            for result in as_completed(results):
                yield result.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.kill()


def _row(context: Any, job: Job, grow: Where, seconds: float, running: set[Any]) -> Row:
    """The result of one process, which is in `running` while it runs."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, job, grow), daemon=True)
    process.start()
    running.add(process)
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else Row(*job, why=f"stopped after {seconds:.0f} seconds")
    except EOFError:  # killed by the system, or out of memory
        process.join()
        return Row(*job, why=f"the process ended by itself ({process.exitcode})")
    finally:
        running.discard(process)
        process.kill()
        process.join()
        ours.close()


def _work(end: Connection, job: Job, grow: Where) -> None:
    """One job, in its own process."""
    import torch

    silence()
    torch.set_num_threads(1)  # threads would not survive the fork that grows
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    module, name = grow
    try:
        with foreign("survey this model type", "leave it out"):
            end.send(measure(*job, getattr(import_module(module), name)))
    except MemoryError:
        end.send(Row(*job, why=f"takes more than {MEMORY // 2**30} GiB"))
    except Exception as error:
        end.send(Row(*job, why=str(error)))
