"""Runs the pieces of an experiment in several processes, each after what it needs, and reports progress."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from lemonx.errors import LemonxError, Stopped
from lemonx.guards.others import silenced
from lemonx.guards.terminal import guard
from lemonx.guards.workers import end_with_parent
from lemonx_lab.experiments.nodes import TRAINED, Node, run_node, with_needs


@dataclass(frozen=True)
class Progress:
    """Pieces done and in total, and an estimate of the seconds left once there is one."""

    done: int
    total: int
    left: float | None
    label: str


Tell = Callable[[Progress], None]


def run_all(wanted: Iterable[Node], cache: Path, *, jobs: int = 2, tell: Tell | None = None) -> None:
    """Run all pieces that the cache does not hold; an interrupted run continues where it stopped."""
    nodes = with_needs(wanted)
    todo = {key: node for key, node in nodes.items() if not node.done(cache)}
    if not todo:
        return
    cache.mkdir(parents=True, exist_ok=True)
    began, work_done, work = monotonic(), 0.0, sum(map(_work, todo.values()))
    running: dict[Future[None], Node] = {}
    with _workers(jobs) as pool:
        while todo or running:
            ready = [node for node in todo.values() if all(other.done(cache) for other in node.after)]
            for node in ready[: max(0, jobs - len(running))]:
                running[pool.submit(run_node, todo.pop(node.key), cache)] = node
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                node = running.pop(future)
                _raise_named(future, node)
                work_done += _work(node)
                left = (work - work_done) * (monotonic() - began) / work_done
                if tell is not None:
                    tell(Progress(len(nodes) - len(todo) - len(running), len(nodes), left, node.label))


@contextmanager
def _workers(jobs: int) -> Generator[ProcessPoolExecutor]:
    """A pool of processes, which end at once if an error ends the work."""
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin) as pool:
        try:
            yield pool
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise Stopped(
                    "a run was killed, perhaps because memory ran out",
                    "run the same again, with one job if memory is short; finished runs are kept",
                ) from None
            raise


def _raise_named(future: Future[None], node: Node) -> None:
    """Raise the error that stopped a piece of work, if any; an error without a file names the piece."""
    try:
        future.result()
    except LemonxError as error:
        raise error if error.file else error.about(node.label) from None


def _work(node: Node) -> float:
    """Relative cost: a step of the target is about four of the source, and a growth is a few seconds."""
    return 50.0 if not node.steps else node.steps * (1.0 if node.kind == TRAINED else 0.25)


# Kept for as long as a worker lives.
_silence = ExitStack()


def _begin() -> None:
    """Prepare a worker: it is quiet, takes one core, and ends when the process that started it does."""
    _silence.enter_context(silenced())
    import torch
    from transformers.utils import logging

    end_with_parent()
    guard()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
