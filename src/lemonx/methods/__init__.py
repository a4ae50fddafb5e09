"""Methods of growth. LEMON is here; other packages bring those that it is compared with, by the entry point
`lemonx.methods`. A method is one file, registered where it is defined.

A method is a growth policy for the same rows (planning/policy.py), so no method needs to know an architecture. Some
methods compute their tensors themselves: `make` takes the plan and returns the tensors.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadTarget, Refused
from lemonx.guards.limits import MOST_STEPS
from lemonx.options.declared import Growth
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Lessons:
    """What a method learns from: data as in a recipe (None: the built-in default) and a number of steps.

    `tell` gets the number of each step and its loss.
    """

    data: Mapping[str, Any] | None = None
    steps: int = 100
    batch_size: int = 16
    tell: Callable[[int, float], None] = field(default=lambda step, loss: None, compare=False)


# The tensors of the target by their names on disk.
Make = Callable[[Plan, Checkpoint, Lessons], "Mapping[str, torch.Tensor]"]


@dataclass(frozen=True)
class Method:
    """A way to grow a model: its paper, what it can grow, and how it reads the rows of a spec.

    `make`: it computes the tensors itself. `learns`: it learns from data how to grow (LiGO). `inherits`: its target is
    trained with a loss towards the source, "soft", "hard" or "early" (training/inheritance.py).
    """

    name: str
    paper: str
    grows: tuple[str, ...]
    policy: Callable[[Change, Free], GrowthPolicy]
    make: Make | None = None
    learns: bool = False
    inherits: str | None = None

    @property
    def data_free(self) -> bool:
        return not self.learns and self.inherits is None

    @property
    def title(self) -> str:
        """The first sentence of its docstring."""
        return (self.policy.__doc__ or "").strip().split("\n")[0].rstrip(".")

    def read(self, change: Change, free: Free) -> GrowthPolicy:
        """This method's growth policy for a change of sizes; Refused where the method is not defined."""
        for asked, what, other in ((change.widens, "width", "depth"), (change.deepens, "depth", "width")):
            if asked and what not in self.grows:
                raise Refused(
                    f"{self.name} only grows {other}, but these sizes grow {what}",
                    "keep that size, or use --method lemon",
                )
        return replace(self.policy(change, free), method=self.name)


METHODS: dict[str, Method] = {}
# Packages whose methods cannot be loaded, and why.
LEFT_OUT: dict[str, str] = {}


def method(
    name: str,
    *,
    paper: str,
    grows: tuple[str, ...] = ("width", "depth"),
    make: Make | None = None,
    learns: bool = False,
    inherits: str | None = None,
) -> Callable[[Callable[[Change, Free], GrowthPolicy]], Callable[[Change, Free], GrowthPolicy]]:
    """Register a policy under this name."""

    def register(policy: Callable[[Change, Free], GrowthPolicy]) -> Callable[[Change, Free], GrowthPolicy]:
        METHODS[name] = Method(name, paper, grows, policy, make, learns, inherits)
        return policy

    return register


def methods() -> Mapping[str, Method]:
    """Every method by name, those of other packages too."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for package in entry_points(group="lemonx.methods"):
        try:
            package.load()
        except Exception as error:  # whatever the code of others raises
            LEFT_OUT[package.value] = f"{type(error).__name__}: {error}"
    return METHODS


def chosen(growth: Growth) -> tuple[Method, Lessons]:
    """The method of a growth, and what it learns from; BadTarget where one of them makes no sense."""
    said = {"name": growth.method} if isinstance(growth.method, str) else dict(growth.method)
    method = find(str(said.pop("name", "lemon")))
    if said and not method.learns:
        raise BadTarget(
            f"{method.name} does not learn, so it takes no {', '.join(said)}", "use the method ligo for that"
        )
    data = said.pop("data", None)
    lessons = Lessons({"kind": data} if isinstance(data, str) else data)  # pyright: ignore[reportArgumentType]
    for key, value in said.items():
        if key == "tell" and callable(value):
            lessons = replace(lessons, tell=value)
            continue
        if key not in ("steps", "batch_size"):
            raise BadTarget(f"{key!r:.40} is not a key of a method", "choose from name, steps, batch_size, data")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_STEPS:
            raise BadTarget(f"{key} is {value!r:.40}", f"give a whole number from 1 to {MOST_STEPS}")
        lessons = replace(lessons, **{key: value})
    return method, lessons


def find(name: str) -> Method:
    """The method of this name; BadTarget if there is none."""
    importlib.import_module(f"{__name__}.lemon")
    known = METHODS if name in METHODS else methods()
    if name not in known:
        near = difflib.get_close_matches(name[:80], known, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(sorted(known))}"
        left_out = "; ".join(f"those of {package} cannot be loaded: {why}" for package, why in LEFT_OUT.items())
        raise BadTarget(f"there is no method {name!r}{left_out and f' ({left_out})'}", remedy)
    return known[name]
