"""The audit of a hand-written table: the run of a model says what its code does, and the table what it should do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

import pico
from auditing import blocks, norms, spaces
from auditing.explained import Reason, reason_for
from auditing.subject import Difference, subject
from lemonx.specs.spec import Spec


@dataclass(frozen=True)
class Audit:
    """What was compared for one model, and every difference.

    `axes`: of tensors. `equal` and `finer`: spaces that are one axis of the trace, or several, which the table lets
    grow together. `norms`, `blocks`: how many were run. `explained`: differences, with the reason.
    """

    model_type: str
    axes: int
    equal: int
    finer: int
    norms: int
    blocks: int
    explained: tuple[tuple[Difference, Reason], ...]
    unexplained: tuple[Difference, ...]


def audit(
    model: PreTrainedModel,
    batch: Mapping[str, torch.Tensor] | None = None,
    change: Callable[[Spec], Spec] = lambda spec: spec,
) -> Audit:
    """Every difference between the table of a model and its run; `change`: what is done to the table first."""
    with tempfile.TemporaryDirectory() as folder:
        one = subject(model, batch or pico.inputs(model, seed=1), Path(folder), change)
        found, wrong = spaces.partition(one)
        plan = blocks.grown(Path(folder))
        plan = replace(plan, source_spec=change(plan.source_spec), target_spec=change(plan.target_spec))
        wrong += [
            *spaces.merged(one, found),
            *spaces.grows(one, found),
            *spaces.computed(one, found),
            *spaces.activations(one, found),
            *spaces.constants(one, found),
            *spaces.turning(one, found),
            *norms.norms(one, found),
            *norms.factors(one),
            *norms.ties(one),
            *norms.roles(one),
            *norms.unused(one),
            *blocks.streams(one, found),
            *blocks.calls(one, found, plan),
        ]
    known = [(difference, reason_for(one, difference)) for difference in wrong]
    counts = [len(found.of_name[name]) for name in one.spec.spaces]
    return Audit(
        str(one.config["model_type"]),
        len(one.said),
        sum(count == 1 for count in counts),
        sum(count > 1 for count in counts),
        len(one.tracer.norms),
        len(one.blocks),
        tuple((difference, reason) for difference, reason in known if reason),
        tuple(difference for difference, reason in known if not reason),
    )
