"""What a growth comes to for one model type: exact, refused and why, or not run and why; column by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from lemonx.diagnostics.survey import classes
from lemonx.diagnostics.survey.fields import BASES, Sizes
from lemonx.diagnostics.survey.inputs import Batch
from lemonx.diagnostics.survey.randomise import randomise
from lemonx.diagnostics.survey.running import find_inputs, outputs, unread
from lemonx.errors import LemonxError
from lemonx.models.foreign import reason

# Fills the larger model with the function of the smaller one, or returns a model of its own that was read from disk, or
# raises a LemonxError that says why it does neither.
Grow = Callable[[Any, Any, Batch], object]

EXACT, REFUSED, WRONG, FAILED, NOT_RUN, NONE = "exact", "refused", "wrong", "failed", "not run", "-"
# The largest difference of an output, relative to the largest output, that rounding in float64 accounts for.
LARGEST = 1e-10
_TWICE, _HALF_MORE = Fraction(2), Fraction(3, 2)
COLUMNS: dict[str, Callable[[Sizes], Sizes]] = {
    "width x2": partial(replace, wider=_TWICE, more_heads=_TWICE, more_ffn=_TWICE),
    "width x1.5": partial(replace, wider=_HALF_MORE, more_heads=_HALF_MORE, more_ffn=_HALF_MORE),
    "depth": partial(replace, deeper=2),
    "ffn": partial(replace, more_ffn=_TWICE),
    "heads": partial(replace, more_heads=_TWICE),
}


@dataclass(frozen=True)
class Cell:
    """What one growth came to; `difference`: of the outputs, relative to the largest; `why`: one line, if not exact."""

    kind: str
    difference: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One model type in one task: whether its tiny model runs, what its inputs read, and what each growth came to.

    `cells`: how it was grown ("inferred", "table") -> column -> what it came to.
    """

    model_type: str
    task: str
    model_class: str = ""
    built: bool = False
    why: str = ""
    share: float | None = None
    unread: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        return bool(self.inputs)


@dataclass(frozen=True)
class Subject:
    """A tiny model that runs, with inputs for it, and others of the same kinds to judge a growth by."""

    model: Any
    sizes: Sizes
    batch: Batch
    other: Batch
    lacks: dict[str, str]


def measure(model_type: str, task: str, ways: Mapping[str, Grow]) -> Row:
    """One row; nothing that transformers' code raises escapes."""
    model_class = classes.class_for(model_type, task)
    row = Row(model_type, task, model_class.__name__)
    found = _subject(model_class, model_type)
    if not isinstance(found, Subject):
        return replace(row, built=found[0], why=found[1])
    names = tuple(found.batch)
    try:
        share, silent = unread(found.model, found.batch)
    except Exception:  # it has no gradient
        share, silent = None, []
    row = replace(row, built=True, share=share, unread=tuple(silent[:20]), inputs=names, lacks=found.lacks)
    cells = {
        way: {
            column: _cell(found, model_class, model_type, sizes(found.sizes), grow) for column, sizes in COLUMNS.items()
        }
        for way, grow in ways.items()
    }
    return replace(row, cells=cells)


def _subject(model_class: Any, model_type: str) -> Subject | tuple[bool, str]:
    """The first of the sizes in which the model is built and runs; else whether it was built, and the first reason."""
    built, reasons = False, []
    for sizes in BASES:
        model = None
        try:
            model = classes.build(model_class, model_type, sizes)
            randomise(model, 0)
            batch, failed = find_inputs(model)
            lacks = {kind: reason(error) for kind, error in failed.items()}
            return Subject(model, sizes, batch, find_inputs(model, seed=100)[0], lacks)
        except Exception as error:
            built = built or model is not None
            said = f"cannot be built: {reason(error)}" if model is None else f"does not run: {reason(error)}"
            if said in reasons or isinstance(error, ImportError):
                return built, next((r for r in reasons if r.startswith("does")), said)
            reasons.append(said)
    return built, next((r for r in reasons if r.startswith("does")), reasons[0])


def _cell(subject: Subject, model_class: Any, model_type: str, sizes: Sizes, grow: Grow) -> Cell:
    make = partial(classes.build, model_class, model_type, sizes)
    try:
        large = make()
    except Exception as error:
        return Cell(NOT_RUN, why=f"the larger one cannot be built: {reason(error)}")
    before, after = (sum(p.numel() for p in model.parameters()) for model in (subject.model, large))
    if after <= before:
        return Cell(NONE)
    randomise(large, 7)
    try:
        outputs(large, subject.batch)
    except Exception as error:
        return Cell(NOT_RUN, why=f"the larger one does not run: {reason(error)}")
    try:
        found = grow(subject.model, large, subject.batch)
    except LemonxError as refusal:
        return Cell(REFUSED, why=str(refusal))
    except Exception as error:
        return Cell(FAILED, why=reason(error))
    if isinstance(found, torch.nn.Module):
        return judged(subject.model, found, subject.other)
    filled = judged(subject.model, large, subject.other)
    if filled.kind != EXACT:
        return filled
    again = make()
    again.load_state_dict(large.state_dict())
    reloaded = judged(subject.model, again, subject.other)
    return (
        reloaded
        if reloaded.kind == EXACT
        else replace(reloaded, why=f"{reloaded.why}, after its weights were read again")
    )


def judged(small: Any, large: Any, batch: Batch) -> Cell:
    """Whether two models compute the same, measured on inputs that neither was grown with."""
    one, other = outputs(small, batch), outputs(large, batch)
    if len(one) != len(other):
        return Cell(WRONG, why=f"{len(one)} outputs became {len(other)}")
    worst = max((difference(x, y) for x, y in zip(one, other, strict=True)), default=float("inf"))
    why = "" if worst <= LARGEST else f"outputs differ by {worst:.1e} of the largest"
    return Cell(EXACT if worst <= LARGEST else WRONG, worst, why)


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference relative to the largest entry; a wider output is compared by its first units."""
    if x.ndim != y.ndim or any(n > m for n, m in zip(x.shape, y.shape, strict=True)):
        return float("inf")
    y = y[tuple(slice(n) for n in x.shape)]
    finite = torch.isfinite(x)
    if not x.numel() or not torch.equal(finite, torch.isfinite(y)):
        return 0.0 if not x.numel() else float("inf")
    x, y = x[finite], y[finite]
    return float((x - y).abs().max() / (x.abs().max() or 1.0)) if x.numel() else 0.0
