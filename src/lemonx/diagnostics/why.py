"""Why a checkpoint cannot be expanded: its family, or the nearest one, and what does not fit that family's table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.diagnostics.capabilities import default_config
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.planning.typecheck import check, with_tied
from lemonx.specs.coverage import match, settled, unmatched
from lemonx.specs.spec import Spec


@dataclass(frozen=True)
class Diagnosis:
    """The family that fits best, how many tensors its rows cover, and what does not fit.

    `known`: the checkpoint's model_type has a spec. Names have `*` for every number. `reason` is the error that an
    expansion would stop with, None if there is none.
    """

    model_type: str
    known: bool
    family: str
    covered: int
    tensors: int
    without_row: tuple[str, ...]
    without_tensor: tuple[str, ...]
    reason: LemonxError | None

    def as_dict(self) -> dict[str, JsonValue]:
        return {**vars(self), "reason": self.reason and self.reason.as_dict()}


def diagnose(checkpoint: Checkpoint) -> Diagnosis:
    """Compare a checkpoint with its own family, or with all of them if it has none, and say what does not fit."""
    model_type = architectures.model_type_of(checkpoint.config)
    if model_type is None:
        raise BadCheckpoint("has no model_type", "give a folder that transformers saved", file=CONFIG)
    known = model_type in architectures.families()
    if known:
        try:
            spec = architectures.families()[model_type].spec(checkpoint.config)
        except LemonxError as error:
            return Diagnosis(model_type, True, model_type, 0, len(checkpoint.tensors), (), (), error)
        return _compared(checkpoint, model_type, spec, known)
    near = [_compared(checkpoint, name, spec, known) for name, spec in _candidates(checkpoint)]
    return max(near, key=lambda found: (found.covered, -len(found.without_tensor)))


def _candidates(checkpoint: Checkpoint) -> Iterable[tuple[str, Spec]]:
    """Every family's spec at this checkpoint's sizes, as far as its config names them as that family does."""
    for name, family in sorted(architectures.families().items()):
        try:
            yield name, family.spec({**default_config(name), **checkpoint.config, "model_type": name})
        except LemonxError:
            yield name, family.spec({**default_config(name), "model_type": name})


def _compared(checkpoint: Checkpoint, family: str, spec: Spec, known: bool) -> Diagnosis:
    odd, empty = unmatched(spec, checkpoint.tensors)
    reason = None
    try:
        if not known:
            architectures.find(checkpoint.config)
        found = match(spec, checkpoint.tensors)
        spec = settled(spec, found)
        rows = with_tied(spec, {hit.row for hit in found})
        check(spec, spec, rows, architectures.families()[family].config(checkpoint.config))
    except LemonxError as error:
        reason = error
    total = len(checkpoint.tensors)
    return Diagnosis(
        str(architectures.model_type_of(checkpoint.config)),
        known,
        family,
        total - len(odd),
        total,
        _starred(odd),
        tuple(empty),
        reason,
    )


def _starred(names: Iterable[str]) -> tuple[str, ...]:
    """Each kind of name once, numbers as `*`."""
    return tuple(sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names}))
