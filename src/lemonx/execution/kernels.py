"""Whether the compiled inner loops are used: where numba is installed, and the output is large enough to gain by it."""

from __future__ import annotations

from importlib.util import find_spec
from inspect import isfunction
from types import ModuleType

# Loading them takes about as long as they save on so many bytes of output.
WORTH_IT = 1 << 32

_loaded: ModuleType | None = None


def prepare(written: int) -> None:
    """Load the compiled loops if that many bytes are worth it. What is written does not depend on it."""
    global _loaded
    if _loaded is None and written >= WORTH_IT and find_spec("numba"):
        try:
            from lemonx.execution import compiled
        except Exception:  # numba for another numpy, no folder to keep what it compiles, an unknown processor, ...
            return
        # With NUMBA_DISABLE_JIT they are plain functions, and would take minutes.
        _loaded = None if isfunction(compiled.look_up) else compiled


def loaded() -> ModuleType | None:
    """The module `compiled`, if it is in use."""
    return _loaded
