"""Measures one model type: builds a tiny model, saves it, has it grown as a user would, and judges what was written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lemonx import errors
from lemonx.checkpoints.temporary import Temporary
from lemonx.inference.tiny_sizes import BASES, Sizes
from lemonx.models.foreign import reason
from lemonx.verification.finding import Outputs, find_inputs, outputs
from lemonx.verification.float64 import Float64
from lemonx.verification.media import Batch
from lemonx_lab.survey import classes
from lemonx_lab.survey.randomise import randomise
from lemonx_lab.survey.rows import (
    COLUMNS,
    ENOUGH,
    EXACT,
    FAILED,
    NOT_COMPARED,
    NOT_VERIFIED,
    REFUSED,
    UP_TO_EPS,
    WRONG,
    Cell,
    Row,
)
from lemonx_lab.survey.running import Read, learned, read_by

# The largest difference of an output, relative to the largest output, that rounding in float64 accounts for.
LARGEST = 1e-10
_IN_LAYER = re.compile(r"\.\d+\.")
# Of a model that has a part which its task does not read.
_MORE_LAYERS = (6, 16)
# The exit codes of a growth that was accepted, written, and then not verified.
_UNVERIFIED = (errors.NotVerified.exit_code, errors.CannotVerify.exit_code)
_REFUSED = (errors.Refused.exit_code, errors.BadTarget.exit_code, errors.BadCheckpoint.exit_code)


@dataclass(frozen=True)
class Grown:
    """What `lemonx expand` said: its exit code, the error if there was one, and what eps may change of the outputs."""

    code: int
    why: str = ""
    loss: float = 0.0


# Grows a folder into another folder with options of `lemonx expand`.
Grow = Callable[[Path, Path, Sequence[str]], Grown]


@dataclass(frozen=True)
class Subject:
    """A tiny model that runs, with inputs for it."""

    make: Callable[[Sizes], Any]
    model: Any
    sizes: Sizes
    batch: Batch
    # The outputs that depend on parameters: an input that a model hands back shows nothing.
    learned: frozenset[str]
    lacks: dict[str, str]


def measure(model_type: str, task: str, grow: Grow) -> Row:
    """Measure one row; no exception of transformers' code escapes."""
    model_class = classes.class_for(model_type, task)
    row = Row(model_type, task, model_class.__name__)
    found = _subject(partial(classes.build, model_class, model_type))
    if not isinstance(found, Subject):
        return replace(row, built=found[0], why=found[1])
    found = _deep_enough(found)
    row = replace(row, built=True, lacks=found.lacks)
    with Temporary() as parent:
        source, model = parent / "source", found.model
        try:
            model.save_pretrained(source)
            small = _loaded(model_class, source)
            outputs(small, found.batch)
        except Exception as error:
            return replace(row, why=f"cannot be saved and loaded: {reason(error)}")
        judge = _Judge(small, found)
        cells = dict[str, Cell]()
        for column, options in COLUMNS.items():
            target = parent / f"target {column}"
            cells[column] = judge.cell(grow(source, target, options), partial(_loaded, model_class, target))
    names = judge.compared or found.learned
    read = read_by(small, found.batch, names)
    return replace(
        row,
        inputs=tuple(found.batch),
        outputs=tuple(sorted(names)),
        share=read.share,
        unread=read.silent[:20],
        cells=cells,
    )


def _loaded(model_class: Any, folder: Path) -> Any:
    with Float64():  # what a model computes for itself, such as angles, is then in float64 too
        return model_class.from_pretrained(folder, dtype=torch.float64).eval()


class _Judge:
    """Compares the small model with larger ones; `compared` are the names of all outputs that could be compared."""

    def __init__(self, small: Any, subject: Subject) -> None:
        self.small, self.learned = small, subject.learned
        self.batch = find_inputs(small, seed=100)[0]
        self.compared = frozenset[str]()

    def cell(self, grown: Grown, load: Callable[[], Any]) -> Cell:
        """Judge one growth by what was said and by what was written."""
        if grown.code:
            kind = REFUSED if grown.code in _REFUSED else NOT_VERIFIED if grown.code in _UNVERIFIED else FAILED
            return Cell(kind, why=grown.why)
        try:
            large = load()
            given = outputs(self.small, self.batch), outputs(large, self.batch)
        except Exception as error:
            return Cell(WRONG, why=f"what was written does not run: {reason(error)}")
        names = same_size(*given) & self.learned
        found = judged(self.small, large, self.batch, names or larger(*given) & self.learned, grown.loss)
        if not names and found.kind == WRONG:  # a wider hidden state may have another basis
            return Cell(NOT_COMPARED, why="only hidden states leave the model, and they are larger")
        self.compared |= names or larger(*given) & self.learned
        return found


def _deep_enough(subject: Subject) -> Subject:
    """Return the model, or one of more layers where too little is read only because the model is tiny.

    A task may leave one part of a model unread, such as a pooler: that is little of a real one, and much of two layers.
    """

    def read(one: Subject) -> Read:
        return read_by(one.model, one.batch, one.learned)

    first = read(subject)
    if first.share >= ENOUGH or any(_IN_LAYER.search(name) for name in first.silent):
        return subject
    for layers in _MORE_LAYERS:
        deeper = _subject(subject.make, (replace(subject.sizes, layers=layers),))
        if isinstance(deeper, Subject) and read(deeper).share >= ENOUGH:
            return deeper
    return subject


def _subject(make: Callable[[Sizes], Any], bases: tuple[Sizes, ...] = BASES) -> Subject | tuple[bool, str]:
    """The first of the sizes in which the model is built and runs; else whether it was built, and the first reason."""
    built, reasons = False, []
    for sizes in bases:
        model = None
        try:
            model = make(sizes)
            randomise(model, 0)
            batch, failed = find_inputs(model)
            lacks = {kind: reason(error) for kind, error in failed.items()}
            return Subject(make, model, sizes, batch, learned(model, batch), lacks)
        except Exception as error:
            built = built or model is not None
            said = f"cannot be built: {reason(error)}" if model is None else f"does not run: {reason(error)}"
            reasons.append(said)
            if isinstance(error, ImportError):  # of a library: no other sizes help
                break
    return built, next((r for r in reasons if r.startswith("does")), reasons[0])


def same_size(small: Outputs, large: Outputs) -> frozenset[str]:
    """The outputs of two models that have one size."""
    return frozenset(name for name, x in small.items() if name in large and x.shape == large[name].shape)


def larger(small: Outputs, large: Outputs) -> frozenset[str]:
    """The outputs of two models that are larger in the second, such as hidden states of a wider one."""
    return frozenset(name for name, x in small.items() if name in large and _holds(large[name].shape, x.shape))


def _holds(large: Sequence[int], small: Sequence[int]) -> bool:
    return len(large) == len(small) and all(a >= b for a, b in zip(large, small, strict=True)) and large != small


def judged(small: Any, large: Any, batch: Batch, names: frozenset[str], loss: float = 0.0) -> Cell:
    """Judge whether two models compute the same, on inputs that neither was grown with.

    `names`: the outputs that are compared; of one that is larger, the entries that it begins with. `loss`: a difference
    that was announced, because norms are applied once more and have an eps.
    """
    one, other = outputs(small, batch), outputs(large, batch)
    if missing := one.keys() - other.keys():
        return Cell(WRONG, why=f"outputs are missing: {sorted(missing)}")
    worst = max((difference(one[name], _first(other[name], one[name])) for name in names), default=float("inf"))
    worst = float(f"{worst:.1e}")
    if worst <= LARGEST:
        return Cell(EXACT, worst)
    why = f"outputs differ by {worst:.1e} of the largest"
    if worst <= loss:
        return Cell(UP_TO_EPS, worst, f"{why}, as the eps of norms in added Post-LN blocks makes them")
    return Cell(WRONG, worst, why)


def _first(large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """As many first entries of each axis as another tensor has."""
    return large[tuple(slice(size) for size in small.shape)]


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference of two outputs of one size, relative to the largest entry."""
    finite = torch.isfinite(x)
    if not x.numel() or not torch.equal(finite, torch.isfinite(y)) or not torch.equal(x[~finite], y[~finite]):
        return 0.0 if not x.numel() else float("inf")
    x, y = x[finite], y[finite]
    return float((x - y).abs().max() / (x.abs().max() or 1.0)) if x.numel() else 0.0


def told(code: int, said: Mapping[str, Any]) -> Grown:
    """Read what `lemonx expand --json` printed."""
    if code:
        error = said.get("error", {})
        return Grown(code, ": ".join(filter(None, (error.get("found"), error.get("remedy")))))
    return Grown(0, loss=(said.get("expected_loss") or {}).get("of_stream", 0.0))
