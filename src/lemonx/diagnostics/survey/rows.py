"""What is found out about a model type: one row for each of its tasks, with a cell for every growth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

from lemonx.diagnostics.survey.sizes import Sizes

EXACT, UP_TO_EPS, REFUSED, WRONG, FAILED = "exact", "to eps", "refused", "wrong", "failed"
# The larger model does not run; nothing that it computes has a fixed size; there is nothing to grow.
NOT_RUN, NOT_COMPARED, NONE = "not run", "not compared", "-"
# How a growth came to be exact, where the plain one is so up to the eps of norms in added Post-LN blocks.
SMALL_GAINS = "small gains"

# An exact growth counts if the outputs that are compared read at least this share of the parameters.
ENOUGH = 0.98

_TWICE, _HALF_MORE = Fraction(2), Fraction(3, 2)
_double = partial(replace, wider=_TWICE, more_heads=_TWICE, more_ffn=_TWICE)
COLUMNS: dict[str, Callable[[Sizes], Sizes]] = {
    "width x2": _double,
    # Tiny MLPs are narrow: to carry a Post-LN stream, they need as many new neurons as those of a real model get.
    "width x1.5": partial(replace, wider=_HALF_MORE, more_heads=_HALF_MORE, more_ffn=Fraction(5, 2)),
    "depth": partial(replace, deeper=2),
    "ffn": partial(replace, more_ffn=_TWICE),
    "heads": partial(replace, more_heads=_TWICE),
}
# One tower of a model of texts and pictures: its width x2, and the other stays as it is.
TOWERS: dict[str, Callable[[Sizes], Sizes]] = {
    "vision alone": partial(_double, only="vision_config"),
    "text alone": partial(_double, only="text_config"),
}


@dataclass(frozen=True)
class Cell:
    """What one growth came to; `difference`: of the outputs, relative to the largest; `why`: if not plainly exact."""

    kind: str
    difference: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One model type in one task: whether its tiny model runs, what its inputs read, and what each growth came to.

    `share` and `unread`: of the parameters, what the outputs of a fixed size depend on. `cells`: how it was grown
    ("inferred", "table") -> column -> what it came to.
    """

    model_type: str
    task: str
    model_class: str = ""
    built: bool = False
    why: str = ""
    share: float | None = None
    unread: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        return bool(self.inputs)
