"""Processes that work for another one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Tell = Callable[[int], None]
Part = Callable[[Tell], Result]


def cores() -> int:
    """How many workers to use: as many as this process has cores, up to 8."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


class Setting(Generic[Result]):
    """A setting of the whole process while any thread is inside: the last one to leave puts back what was before."""

    def __init__(self, value: Result) -> None:
        self._value, self._inside, self._lock = value, 0, Lock()
        self._before: Result | None = None

    def enter(self, read: Callable[[], Result], write: Callable[[Result], object]) -> None:
        """Change the setting, unless a thread has done so."""
        with self._lock:
            if not self._inside:
                self._before = read()
            self._inside += 1
            write(self._value)

    def leave(self, write: Callable[[Result], object]) -> None:
        """Put back the setting, unless another thread is still inside."""
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before is not None:
                write(self._before)


_THREADS = Setting(1)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """A context in which every operation of torch uses one thread.

    torch divides an operation among its threads, which then wait for one another in a loop. Beside other busy processes
    they wait longer than they compute. So lemonx divides the work itself, among threads that sleep when they have none.
    """
    import torch

    _THREADS.enter(torch.get_num_threads, torch.set_num_threads)
    try:
        yield
    finally:
        _THREADS.leave(torch.set_num_threads)


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does.

    A signal that ends that one at once, such as SIGTERM, leaves it no time to end its workers.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    connection.wait([parent.sentinel])
    os._exit(1)


class NoWorker(OSError):
    """A process could not be started."""


def can_fork() -> bool:
    """Whether this process may start copies of itself that work for it: on Linux, unless it is itself one of them."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def in_processes(parts: Sequence[Part[Result]], tell: Tell) -> list[Result]:
    """Run each part in a copy of this process, and return what the parts return; `tell` gets all that they tell.

    Threads wait for one another at the interpreter's lock, processes do not. A copy begins at once, with all that is
    imported here, and shares the memory that neither changes. The threads of this process are not copied, torch's among
    them: set torch to one thread before. All copies end with this process, and at the first error of any. Raises
    NoWorker if not all could be started, and ChildProcessError if one died.
    """
    context, running, results = multiprocessing.get_context("fork"), {}, dict[int, Result]()
    try:
        for number, part in enumerate(parts):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(part, sender), daemon=True)
            with warnings.catch_warnings():  # Python warns of forks beside threads: what these may hold is not used
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    process.start()
                except OSError as error:  # too many processes or open files, no memory, output that nobody reads
                    raise NoWorker(error.errno, error.strerror) from None
            sender.close()
            running[receiver] = number, process
        while running:
            for receiver in connection.wait(list(running)):
                assert isinstance(receiver, connection.Connection)
                number, process = running[receiver]
                what, value = _received(receiver, process)
                if what == _TOLD:
                    tell(value)
                elif what == _FAILED:
                    raise value
                else:
                    results[number] = value
                    del running[receiver]
                    process.join()
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [results[number] for number in range(len(parts))]


_TOLD, _FAILED, _DONE = "told", "failed", "done"


def _received(receiver: connection.Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise ChildProcessError(f"a worker ended without a result (exit code {process.exitcode})") from None


def _work(part: Part[Result], sender: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is sent to all processes of a terminal, and one answer is enough
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    try:
        sender.send((_DONE, part(lambda count: sender.send((_TOLD, count)))))
    except BaseException as error:
        sender.send((_FAILED, error))
