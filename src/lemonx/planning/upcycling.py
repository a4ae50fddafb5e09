"""Dense to experts: a dense model is read as a model of another family with a single expert, which gets every token.

Then it grows like any other. All experts are copies of that one, and the weights of those that a router picks sum to
one (renormalised gates), so the function stays the same for any number of experts, any k and any router. The router is
new and random, so that experts get different tokens and come to differ. Their weights get no noise: it would not
cancel, since copies are not picked together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lemonx import architectures
from lemonx.algebra.expansions import Expansion, all_free
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
        advice = f"set model_type to {' or '.join(able)}" if able else "leave model_type out"
        raise BadTarget(f"a {own} cannot become a {asked} without loss", advice)
    return as_it_is(checkpoint, family), rest


def as_it_is(checkpoint: Checkpoint, family: Architecture) -> Origin:
    """The checkpoint as this family reads it, under its own names."""
    return Origin(family, checkpoint.config, checkpoint.tensors, {name: name for name in checkpoint.tensors})


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
    return all_free(beside.shape[0], experts.target_size)
