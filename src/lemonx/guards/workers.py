"""Processes that work for another one."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from threading import Thread


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
