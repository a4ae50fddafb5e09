"""Dense to experts: a model without experts is one of another family that has a single expert, which gets every token.

Then it grows as any other: experts are copies of the one, and whichever of them a router picks, their weights sum to
one (renormalised gates), so any number, any choice of k and any router keep the function. The router is new: random,
so that experts are sent other tokens and come to differ. Noise in their weights would not cancel, since copies are not
picked together: there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lemonx import architectures
from lemonx.algebra.expansions import RAND, Expansion
from lemonx.checkpoints import Checkpoint, TensorInfo
from lemonx.errors import BadTarget
from lemonx.planning.request import Target
from lemonx.specs.coverage import Matched
from lemonx.specs.family import Architecture
from lemonx.specs.spec import Spec
from lemonx.specs.weights import Router

FIELD = "model_type"


@dataclass(frozen=True)
class Origin:
    """A checkpoint as its target's family reads it: config, tensors by that family's names, and their names on disk."""

    family: Architecture
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, str]


def origin(checkpoint: Checkpoint, wanted: Target) -> tuple[Origin, Target]:
    """The checkpoint as it is, or as one of the family that `model_type` asks for; and what else is asked for."""
    family, config = architectures.find(checkpoint.config), checkpoint.config
    asked = wanted.fields.get(FIELD)
    own = architectures.model_type_of(config) or ""
    becomes = str(asked or (wanted.like or {}).get(FIELD) or own)
    rest = replace(wanted, fields={name: value for name, value in wanted.fields.items() if name != FIELD})
    known = architectures.families()
    dense = known[becomes].dense if becomes in known and becomes != own else {}
    if own in dense:
        turn = dense[own]
        files = {turn.renamed(name): name for name in checkpoint.tensors}
        tensors = {name: checkpoint.tensors[file] for name, file in files.items()}
        return Origin(known[becomes], turn.config(family.config(config)), tensors, files), rest
    if asked not in (None, own):
        able = sorted(name for name, other in known.items() if own in other.dense)
        advice = f"it can become {' or '.join(able)}" if able else "leave model_type out"
        raise BadTarget(f"a {own} cannot become a {asked} without loss: {advice}")
    return Origin(family, config, checkpoint.tensors, {name: name for name in checkpoint.tensors}), rest


def routers(spec: Spec, found: list[Matched]) -> dict[str, list[Matched]]:
    """Routers that a checkpoint lacks, with a tensor of every block that reads what they read."""
    present = {hit.row for hit in found}
    result = {}
    for name, row in spec.rows.items():
        if isinstance(row, Router) and name not in present:
            stack = spec.stack_of(name)
            beside = [hit for hit in found if hit.stack == stack and spec.rows[hit.row].reads == row.reads]
            first = next(iter(beside)).row
            result[name] = [hit for hit in beside if hit.row == first and hit.suffix == "weight"]
    return result


def scores(beside: TensorInfo, experts: Expansion) -> Expansion:
    """The rows of a new router, beside a tensor that reads what it reads: none is that tensor's."""
    return Expansion(beside.shape[0], np.full(experts.target_size, RAND), np.ones(experts.target_size))
