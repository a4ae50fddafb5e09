"""Errors of transformers and torch, which may be of any type and many lines, as one line of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lemonx.errors import BadCheckpoint, LemonxError

_LONGEST = 240
# These say in words what is wrong; the message of another type (a KeyError, say) is a fragment without its type.
_WORDED = (ValueError, OSError, RuntimeError, ImportError)


@contextmanager
def foreign(doing: str, remedy: str, error: type[LemonxError] = BadCheckpoint) -> Iterator[None]:
    """A context in which whatever transformers raises while `doing` ("load './small'") is an `error` in one line."""
    try:
        yield
    except (LemonxError, MemoryError):
        raise
    except Exception as raised:
        if is_out_of_memory(raised):
            raise MemoryError from raised
        raise error(f"transformers cannot {doing} ({reason(raised)}): {remedy}") from raised


def is_out_of_memory(raised: Exception) -> bool:
    """torch has no exception of its own for it on a CPU."""
    return isinstance(raised, RuntimeError) and ("allocate memory" in str(raised) or "out of memory" in str(raised))


def reason(raised: BaseException) -> str:
    """What an exception says, in one line.

    >>> reason(ValueError("a head\\n    is too wide."))
    'a head is too wide'
    >>> reason(KeyError("hidden"))
    "KeyError: 'hidden'"
    """
    # A config that is rejected names the validator that rejected it, and then the cause.
    if type(raised).__name__.startswith("StrictDataclass") and raised.__cause__ is not None:
        raised = raised.__cause__
    text = " ".join("".join(c if c.isprintable() else " " for c in str(raised)).split()).rstrip(".:")
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST].rstrip()}..."
    name = type(raised).__name__
    if not text:
        return name
    return text if isinstance(raised, _WORDED) else f"{name}: {text}"
