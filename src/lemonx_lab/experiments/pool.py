"""Runs the pieces of an experiment in several processes, each after what it needs, and reports progress."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from lemonx.errors import LemonxError, Stopped
from lemonx.guards.others import silenced
from lemonx.guards.terminal import guard
from lemonx.guards.workers import end_with_parent
from lemonx_lab.experiments.nodes import TRAINED, Node, run_node


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
    nodes = _with_needs(wanted)
    todo = {key: node for key, node in nodes.items() if not node.done(cache)}
    if not todo:
        return
    cache.mkdir(parents=True, exist_ok=True)
    _Pool(todo, len(nodes), cache, jobs, tell or (lambda progress: None)).run()


def _with_needs(wanted: Iterable[Node]) -> dict[str, Node]:
    """Every node by key, after what it needs."""
    found: dict[str, Node] = {}

    def visit(node: Node) -> None:
        if node.key not in found:
            for other in node.after:
                visit(other)
            found[node.key] = node

    for node in wanted:
        visit(node)
    return found


class _Pool:
    def __init__(self, todo: dict[str, Node], total: int, cache: Path, jobs: int, tell: Tell) -> None:
        self.todo, self.total, self.cache, self.jobs, self.tell = todo, total, cache, jobs, tell
        self.began = monotonic()
        self.work_done = 0.0
        self.work = sum(map(_work, todo.values()))

    def run(self) -> None:
        # Spawned, not forked: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.jobs, mp_context=context, initializer=_begin) as pool:
            running: dict[Future[None], Node] = {}
            try:
                while self.todo or running:
                    self._submit(pool, running)
                    finished, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        node = running.pop(future)
                        _raise_named(future, node)
                        self._tell(node, len(running))
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

    def _submit(self, pool: ProcessPoolExecutor, running: dict[Future[None], Node]) -> None:
        ready = [n for n in self.todo.values() if all(other.done(self.cache) for other in n.after)]
        for node in ready[: max(0, self.jobs - len(running))]:
            del self.todo[node.key]
            running[pool.submit(run_node, node, self.cache)] = node

    def _tell(self, node: Node, running: int) -> None:
        self.work_done += _work(node)
        rate = self.work_done / (monotonic() - self.began)
        done = self.total - len(self.todo) - running
        self.tell(Progress(done, self.total, (self.work - self.work_done) / rate if rate else None, node.label))


def _raise_named(future: Future[None], node: Node) -> None:
    """What stopped a piece of work, if anything did; where it names no file, it names which of the many it was."""
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
    """What each worker does first: it is quiet, takes one core, and ends when the process that started it does."""
    _silence.enter_context(silenced())
    import torch
    from transformers.utils import logging

    end_with_parent()
    guard()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
