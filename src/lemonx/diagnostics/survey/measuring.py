"""What a growth comes to for one model type: exact, refused and why, or not run and why; column by column."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lemonx.diagnostics.survey import classes
from lemonx.diagnostics.survey.randomise import randomise
from lemonx.diagnostics.survey.rows import (
    COLUMNS,
    ENOUGH,
    EXACT,
    FAILED,
    NONE,
    NOT_COMPARED,
    NOT_RUN,
    REFUSED,
    SMALL_GAINS,
    TOWERS,
    UP_TO_EPS,
    WRONG,
    Cell,
    Row,
)
from lemonx.diagnostics.survey.running import Read, learned, read_by
from lemonx.diagnostics.survey.sizes import BASES, Sizes
from lemonx.errors import LemonxError
from lemonx.models.foreign import reason
from lemonx.verification.finding import Outputs, find_inputs, outputs
from lemonx.verification.media import Batch

# The largest difference of an output, relative to the largest output, that rounding in float64 accounts for.
LARGEST = 1e-10
_IN_LAYER = re.compile(r"\.\d+\.")
# Of a model that has a part which its task does not read.
_MORE_LAYERS = (6, 16)


@dataclass(frozen=True)
class Claim:
    """What a growth says that it did: filled the larger model, or made `model`, which was read from disk.

    `loss`: by how much the eps of norms is said to change the outputs, relative to the largest. `begins`: an output
    that is larger begins with the numbers that it had. `small_gains`: of norms in added Post-LN blocks, without which
    eps would change more.
    """

    model: torch.nn.Module | None = None
    loss: float = 0.0
    begins: bool = False
    small_gains: bool = False


# From a smaller model, a larger one, inputs, and the names of the outputs that have the same size in both, or if none
# has, of those that are larger; raises a LemonxError that says why it does nothing.
Grow = Callable[[Any, Any, Batch, frozenset[str]], Claim]


@dataclass(frozen=True)
class Subject:
    """A tiny model that runs, with inputs for it, and others of the same kinds to judge a growth by."""

    make: Callable[[Sizes], Any]
    model: Any
    sizes: Sizes
    batch: Batch
    other: Batch
    # The outputs that depend on parameters: what a model hands back as it got it shows nothing.
    learned: frozenset[str]
    lacks: dict[str, str]

    @property
    def compared(self) -> frozenset[str]:
        """The outputs that keep their size when all widths double, such as logits; all of them, if none does."""
        try:
            large = outputs(self.make(COLUMNS["width x2"](self.sizes)), self.batch)
        except Exception:  # that column says why
            return self.learned
        return same_size(outputs(self.model, self.batch), large) & self.learned or self.learned


def measure(model_type: str, task: str, ways: Mapping[str, Grow]) -> Row:
    """One row; nothing that transformers' code raises escapes."""
    model_class = classes.class_for(model_type, task)
    row = Row(model_type, task, model_class.__name__)
    found = _subject(partial(classes.build, model_class, model_type))
    if not isinstance(found, Subject):
        return replace(row, built=found[0], why=found[1])
    found, compared, read = _deep_enough(found)
    row = replace(row, built=True, inputs=tuple(found.batch), outputs=tuple(sorted(compared)), lacks=found.lacks)
    row = replace(row, share=read.share, unread=read.silent[:20])
    towers = TOWERS if task == "IMAGE_TEXT_TO_TEXT" and has_towers(found.model.config) else {}
    columns = {**COLUMNS, **towers}
    cells = {
        way: {name: _cell(found, column(found.sizes), grow) for name, column in columns.items()}
        for way, grow in ways.items()
    }
    return replace(row, cells=cells)


def has_towers(config: Any) -> bool:
    """Whether a model has a part for pictures and one for texts that can grow one at a time."""
    return all(getattr(config, name, None) is not None for name in ("vision_config", "text_config"))


def _deep_enough(subject: Subject) -> tuple[Subject, frozenset[str], Read]:
    """A model with what its outputs read; of more layers, if too little only because the model is tiny.

    A task may leave one part of a model unread, such as a pooler: that is little of a real one, and much of two layers.
    """
    compared = subject.compared
    read = read_by(subject.model, subject.batch, compared)
    if read.share >= ENOUGH or any(_IN_LAYER.search(name) for name in read.silent):
        return subject, compared, read
    for layers in _MORE_LAYERS:
        deeper = _subject(subject.make, (replace(subject.sizes, layers=layers),))
        if isinstance(deeper, Subject):
            again = read_by(deeper.model, deeper.batch, compared)
            if again.share >= ENOUGH:
                return deeper, compared, again
    return subject, compared, read


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
            return Subject(make, model, sizes, batch, find_inputs(model, seed=100)[0], learned(model, batch), lacks)
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


def _cell(subject: Subject, sizes: Sizes, grow: Grow) -> Cell:
    try:
        large = subject.make(sizes)
    except Exception as error:
        return Cell(NOT_RUN, why=f"the larger one cannot be built: {reason(error)}")
    before, after = (sum(p.numel() for p in model.parameters()) for model in (subject.model, large))
    if after <= before:
        return Cell(NONE)
    randomise(large, 7)
    try:
        given = outputs(subject.model, subject.batch), outputs(large, subject.batch)
    except Exception as error:
        return Cell(NOT_RUN, why=f"the larger one does not run: {reason(error)}")
    answers = same_size(*given) & subject.learned
    names = same_size(*given) if answers else larger(*given) & subject.learned
    if not names or given[0].keys() != given[1].keys():  # an output per block, say, whatever the weights are
        return Cell(NOT_COMPARED, why="the larger one gives other outputs")
    try:
        claim = grow(subject.model, large, subject.batch, names)
    except LemonxError as refusal:
        return Cell(REFUSED, why=str(refusal))
    except Exception as error:
        return Cell(FAILED, why=reason(error))
    if not answers and not claim.begins:
        return Cell(NOT_COMPARED, why="every output grows with the model, and it is not said how")
    if claim.model is not None:
        return _noted(judged(subject.model, claim.model, subject.other, names, claim.loss), claim)
    filled = judged(subject.model, large, subject.other, names, claim.loss)
    if filled.kind not in (EXACT, UP_TO_EPS):
        return filled
    again = subject.make(sizes)
    again.load_state_dict(large.state_dict())
    reloaded = judged(subject.model, again, subject.other, names, claim.loss)
    if reloaded.kind != filled.kind:
        return replace(reloaded, why=f"{reloaded.why}, after its weights were read again")
    return _noted(reloaded, claim)


def _noted(cell: Cell, claim: Claim) -> Cell:
    """What was found, and by what means if by more than the plain growth."""
    return replace(cell, why=SMALL_GAINS) if cell.kind == EXACT and claim.small_gains else cell


def judged(small: Any, large: Any, batch: Batch, names: frozenset[str], loss: float = 0.0) -> Cell:
    """Whether two models compute the same, measured on inputs that neither was grown with.

    `names`: the outputs that are compared; of one that is larger, the entries that it begins with. `loss`: a difference
    that was announced, because norms are applied once more and have an eps.
    """
    one, other = outputs(small, batch), outputs(large, batch)
    if one.keys() != other.keys():
        return Cell(WRONG, why=f"other outputs: {sorted(one.keys() ^ other.keys())}")
    worst = max((difference(one[name], _first(other[name], one[name])) for name in names), default=float("inf"))
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
