"""Is there memory enough to run two models? Asked before, and said in one line where it runs out all the same."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lemonx.checkpoints import Checkpoint
from lemonx.errors import CannotVerify
from lemonx.models.foreign import is_out_of_memory

# Bytes of weights in float64 up to which a model runs whole: a block at a time needs less memory, and more reading.
WHOLE = 1 << 30


@contextmanager
def within_memory(advice: str) -> Iterator[None]:
    """A context in which running out of memory is an error in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise CannotVerify("memory ran out during verification", advice) from None


@contextmanager
def freed() -> Iterator[None]:
    """A context behind which whatever it made, and nobody holds, is gone: models hold themselves, in cycles.

    What was there before is not looked through: torch and transformers alone take a third of a second each time.
    """
    kept = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not kept:
            gc.unfreeze()


def runs_whole(source: Checkpoint, target: Checkpoint) -> bool:
    """Whether both models are small enough that running them whole costs less than block by block."""
    return 8 * max(sum(i.numel for i in c.tensors.values()) for c in (source, target)) <= WHOLE


def memory_short(source: Checkpoint, target: Checkpoint) -> str | None:
    """Why a comparison cannot run here, if it cannot: one model in float64 at a time must fit in memory."""
    numbers = max(sum(i.numel for i in c.tensors.values()) for c in (source, target))
    return short_of(8 * numbers, "verification in float64")


def short_of(weights: int, what: str) -> str | None:
    """Why there is not enough memory for so many bytes of weights, and for what is computed with them."""
    needed = 1.3 * weights
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable")), None)
    if free is None or needed <= free:
        return None
    return f"{what} needs {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
