"""The audit of a hand-written table: the run of a pico model says what its code does, and the table what it should."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from auditing import blocks, norms, spaces
from auditing.subject import Difference, Subject, subject


@dataclass(frozen=True)
class Audit:
    """What was compared for one model, and every difference."""

    name: str
    model_type: str
    axes: int
    differences: tuple[Difference, ...]


def audit(name: str) -> tuple[Subject, Audit]:
    with tempfile.TemporaryDirectory() as folder:
        one = subject(name, Path(folder))
        found, wrong = spaces.partition(one)
        wrong += [
            *spaces.merged(one, found),
            *spaces.grows(one, found),
            *spaces.activations(one, found),
            *spaces.turning(one, found),
            *norms.norms(one, found),
            *norms.ties(one),
            *norms.roles(one),
            *norms.unused(one),
            *blocks.streams(one, found),
            *blocks.calls(one, found, blocks.grown(Path(folder))),
        ]
    return one, Audit(name, str(one.config["model_type"]), len(one.said), tuple(wrong))
