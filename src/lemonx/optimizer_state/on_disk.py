"""The optimizer state of a checkpoint folder, in whichever form it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lemonx.errors import BadCheckpoint
from lemonx.optimizer_state import by_name, trainer
from lemonx.optimizer_state.grow import Grown, reasons
from lemonx.optimizer_state.moments import EXACT, EXPECTED, FRESH, moments
from lemonx.planning.plan import Plan


@dataclass(frozen=True)
class GrownState:
    """What a certificate says of a grown optimizer state.

    `form`: Trainer's own file, tensors by name, or a distributed checkpoint. `moments` counts the tensors by how well
    their moments are known, `reasons` why they are not known exactly.
    """

    form: str
    step: int | None
    moments: Mapping[str, int]
    reasons: Mapping[str, int]
    tensors: Mapping[str, str]


def grow_folder(plan: Plan, source: Path, into: Path, *, max_shard_size: int) -> GrownState:
    """Write the grown optimizer state of `source` into a folder; returns what a certificate says of it."""
    if (source / trainer.OPTIMIZER).exists():
        form, grown = "Trainer", trainer.grow_trainer_folder(plan, source, into)
    elif by_name.has_named_state(source):
        form, grown = "by name", by_name.grow_named_folder(plan, source, into, max_shard_size=max_shard_size)
    else:
        raise BadCheckpoint(
            f"has no optimizer state, neither {trainer.OPTIMIZER} nor {by_name.FOLDER}/*.safetensors",
            "give a checkpoint-N folder of a training run, or expand without --with-optimizer",
            file=source,
        )
    return told(form, plan, grown)


def told(form: str, plan: Plan, grown: Grown) -> GrownState:
    """What a certificate says of a state that was grown."""
    readings = moments(plan).values()
    why = {
        reading.name: reasons(reading, grown.kept.get(reading.source, ()), decayed=reading.source in grown.decayed)
        for reading in readings
    }
    status = {r.name: r.status if r.status == FRESH else EXPECTED if why[r.name] else EXACT for r in readings}
    return GrownState(
        form,
        grown.step,
        moments=dict(Counter(status.values())),
        reasons=dict(Counter(reason for found in why.values() for reason in sorted(found))),
        tensors=status,
    )
