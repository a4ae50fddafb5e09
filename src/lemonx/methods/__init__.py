"""LEMON and the methods it is compared with: one file each, registered where it is defined.

A method is a reading of the same rows (reading.py), so none of them knows an architecture.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lemonx.errors import BadTarget, Refused
from lemonx.free import Free
from lemonx.reading import Change, Reading


@dataclass(frozen=True)
class Method:
    """A way to grow a model: its paper, what it can grow, and how it reads the rows of a spec."""

    name: str
    paper: str
    grows: tuple[str, ...]
    reading: Callable[[Change, Free], Reading]

    @property
    def title(self) -> str:
        """The first sentence of its docstring."""
        return (self.reading.__doc__ or "").strip().split("\n")[0].rstrip(".")

    def read(self, change: Change, free: Free) -> Reading:
        """How this method reads the rows; Refused where it is not defined."""
        for asked, what, other in ((change.widens, "width", "depth"), (change.deepens, "depth", "width")):
            if asked and what not in self.grows:
                raise Refused(
                    f"{self.name} grows {other} only, and this target grows {what}: keep it, or use --method lemon"
                )
        return replace(self.reading(change, free), method=self.name)


METHODS: dict[str, Method] = {}


def method(
    name: str, *, paper: str, grows: tuple[str, ...] = ("width", "depth")
) -> Callable[[Callable[[Change, Free], Reading]], Callable[[Change, Free], Reading]]:
    """Register a reading under this name."""

    def register(reading: Callable[[Change, Free], Reading]) -> Callable[[Change, Free], Reading]:
        METHODS[name] = Method(name, paper, grows, reading)
        return reading

    return register


def methods() -> Mapping[str, Method]:
    """Every method by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return METHODS


def find(name: str) -> Method:
    known = methods()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise BadTarget(
            f"no method is called {name!r}: {f'did you mean {near[0]!r}?' if near else ', '.join(sorted(known))}"
        )
    return known[name]
