"""The processes that torchrun started for one command: each writes its own files of an output."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from lemonx.errors import BadOutput, LemonxError

_T = TypeVar("_T")


class Ranks:
    """Processes that do one thing together: the `rank` of this one, and their `count`."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def of_torchrun(cls) -> Ranks:
        """Join the processes that torchrun started; one process where it started none.

        A program that has joined them itself may call lemonx in one of them, which then works alone.
        """
        started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
        if not started or not dist.is_available() or dist.is_initialized():
            return cls()
        dist.init_process_group("gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            dist.barrier()  # pyright: ignore[reportUnknownMemberType]

    def part(self) -> None:
        """Leave the others, once all is done."""
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process does what only one may do."""
        return self.rank == 0

    def together(self, work: Callable[[], _T]) -> _T:
        """Run in every process, and return what it returns here; an error in one process ends all."""
        made, failed = self._attempt(work)
        others: list[Any] = [None] * self.count
        if self.count > 1:
            dist.all_gather_object(others, failed and str(failed))  # pyright: ignore[reportUnknownMemberType]
        if failed:
            raise failed
        if said := next((str(other) for other in others if other), None):
            raise BadOutput(f"was not written, because another process failed ({said})", "see what that one said")
        assert made is not None
        return made[0]

    def at_first(self, work: Callable[[], _T]) -> _T:
        """Run in the first process alone, and return in all what it returns there."""
        made, failed = self._attempt(work) if self.first else (None, None)
        told: list[Any] = [made, failed and str(failed)]
        if self.count > 1:
            dist.broadcast_object_list(told, src=0)
        if failed:
            raise failed
        if told[1]:
            raise BadOutput(f"was not written, because the first process failed ({told[1]})", "see what it said")
        return told[0][0]

    def _attempt(self, work: Callable[[], _T]) -> tuple[tuple[_T] | None, LemonxError | OSError | ValueError | None]:
        try:
            return (work(),), None
        except (LemonxError, OSError, ValueError) as error:
            if self.count == 1:
                raise
            return None, error
