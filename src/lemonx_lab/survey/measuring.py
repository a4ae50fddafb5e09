"""Measures one model type: builds a tiny model, saves it, has it grown as a user would, and judges what was written."""

from __future__ import annotations

import operator
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
from lemonx.verification.float64 import Float64
from lemonx.verification.media import Batch, find_inputs, outputs
from lemonx.verification.modules import relative_difference
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

# The most parameters without a gradient that are redrawn one by one: each takes a run.
_MOST_DRAWN = 24
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
    """The answer of `lemonx expand`: its exit code, the error if any, and the announced change of outputs by eps."""

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
    cells, names = dict[str, Cell](), frozenset[str]()
    with Temporary() as parent:
        source, model = parent / "source", found.model
        try:
            model.save_pretrained(source)
            small = _loaded(model_class, source)
            outputs(small, found.batch)
        except Exception as error:
            return replace(row, why=f"cannot be saved and loaded: {reason(error)}")
        fresh = find_inputs(small, seed=100)[0]
        for column, options in COLUMNS.items():
            target = parent / f"target {column}"
            grown = grow(source, target, options)
            cells[column], compared = _cell(grown, partial(_loaded, model_class, target), small, fresh, found.learned)
            names |= compared
    names = names or found.learned
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


def _cell(
    grown: Grown, load: Callable[[], Any], small: Any, batch: Batch, learned: frozenset[str]
) -> tuple[Cell, frozenset[str]]:
    """Judge one growth by its exit code and by the model that it wrote, and name the outputs that were compared."""
    if grown.code:
        kind = REFUSED if grown.code in _REFUSED else NOT_VERIFIED if grown.code in _UNVERIFIED else FAILED
        return Cell(kind, why=grown.why), frozenset()
    try:
        large = load()
        given = outputs(small, batch), outputs(large, batch)
    except Exception as error:
        return Cell(WRONG, why=f"what was written does not run: {reason(error)}"), frozenset()
    alike = same_size(*given) & learned
    names = alike or larger(*given) & learned
    found = judged(small, large, batch, names, grown.loss)
    if not alike and found.kind == WRONG:  # a wider hidden state may have another basis
        return Cell(NOT_COMPARED, why="only hidden states leave the model, and they are larger"), frozenset()
    return found, names


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


def same_size(small: Batch, large: Batch) -> frozenset[str]:
    """The outputs of two models that have one size."""
    return frozenset(name for name, x in small.items() if name in large and x.shape == large[name].shape)


def larger(small: Batch, large: Batch) -> frozenset[str]:
    """The outputs of two models that are larger in the second, such as hidden states of a wider one."""
    shapes = {name: (x.shape, large[name].shape) for name, x in small.items() if name in large}
    return frozenset(
        name for name, (x, y) in shapes.items() if len(x) == len(y) and x != y and all(map(operator.le, x, y))
    )


def judged(small: Any, large: Any, batch: Batch, names: frozenset[str], loss: float = 0.0) -> Cell:
    """Judge whether two models compute the same, on inputs that neither was grown with.

    `names`: the outputs that are compared; of one that is larger, the entries that it begins with. `loss`: a difference
    that was announced, because norms are applied once more and have an eps.
    """
    one, other = outputs(small, batch), outputs(large, batch)
    if missing := one.keys() - other.keys():
        return Cell(WRONG, why=f"outputs are missing: {sorted(missing)}")
    worst = max((relative_difference(one[name], other[name]) for name in names), default=float("inf"))
    worst = float(f"{worst:.1e}")
    if worst <= LARGEST:
        return Cell(EXACT, worst)
    why = f"outputs differ by {worst:.1e} of the largest"
    if worst <= loss:
        return Cell(UP_TO_EPS, worst, f"{why}, as the eps of norms in added Post-LN blocks makes them")
    return Cell(WRONG, worst, why)


def learned(model: Any, batch: Batch) -> frozenset[str]:
    """The outputs that depend on parameters, or all outputs of a model that has no gradients in this mode."""
    try:
        return frozenset(name for name, x in outputs(model, batch, grad=True).items() if x.requires_grad)
    except Exception:
        return frozenset(outputs(model, batch))


@dataclass(frozen=True)
class Read:
    """The share of all numbers in trained parameters that outputs depend on, and the names of those that none reads."""

    share: float
    silent: tuple[str, ...]


def read_by(model: Any, batch: Batch, of: frozenset[str]) -> Read:
    """The parameters that some outputs read, found by the gradient of a random sum of the outputs.

    In a stack of matrices, of which some may be experts that no token is sent to, each matrix counts by itself. What
    only decides a choice, such as whom to attend to, has no gradient: it is drawn anew, to see if an output changes.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        gradients = _gradients(model, batch, of, list(trained))
    except Exception:  # it has none, or not in this mode
        gradients = dict.fromkeys(trained)
    read, silent = 0, []
    for name, grad in gradients.items():
        if grad is not None and bool(grad.any()):
            parts = grad.flatten(1).any(1) if grad.ndim == 3 else torch.ones(1)
            read += int(parts.sum()) * (grad.numel() // len(parts))
        elif len(silent) < _MOST_DRAWN and _decides(model, batch, of, trained[name]):
            read += trained[name].numel()
        else:
            silent.append(name)
    return Read(read / max(1, sum(p.numel() for p in trained.values())), tuple(silent))


def _gradients(model: Any, batch: Batch, of: frozenset[str], names: list[str]) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    named = dict(model.named_parameters())
    with Float64():
        found = outputs(model, batch, grad=True)
        chosen = [x for name, x in found.items() if x.requires_grad and name in of]
        sums = [(torch.randn(x.shape, generator=generator) * x.nan_to_num(0, 0, 0)).sum() for x in chosen]
        total = torch.stack(sums).sum()
        wanted = [named[name] for name in names]
        return dict(zip(names, torch.autograd.grad(total, wanted, allow_unused=True), strict=True))


@torch.no_grad()
def _decides(model: Any, batch: Batch, of: frozenset[str], parameter: torch.Tensor) -> bool:
    """Return True if an output changes with a parameter."""
    before, kept = outputs(model, batch), parameter.clone()
    noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameter.copy_(kept + noise * (kept.square().mean().sqrt() + 0.1))
    after = outputs(model, batch)
    parameter.copy_(kept)
    return any(not torch.equal(before[name], after[name]) for name in of)


def told(code: int, said: Mapping[str, Any]) -> Grown:
    """Read what `lemonx expand --json` printed."""
    if code:
        error = said.get("error", {})
        return Grown(code, ": ".join(filter(None, (error.get("found"), error.get("remedy")))))
    return Grown(0, loss=(said.get("expected_loss") or {}).get("of_stream", 0.0))
