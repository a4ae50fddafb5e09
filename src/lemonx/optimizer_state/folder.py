"""The optimizer state of a checkpoint folder, in whichever of the two forms it is there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from lemonx.errors import BadCheckpoint
from lemonx.optimizer_state import by_name, trainer
from lemonx.optimizer_state.moments import moments
from lemonx.planning.plan import Plan


def grow_folder(plan: Plan, source: Path, into: Path, *, max_shard_size: int) -> dict[str, Any]:
    """Write the grown optimizer state of `source` into a folder; returns what a certificate says of it."""
    if (source / trainer.OPTIMIZER).exists():
        form, step = "Trainer", trainer.grow_trainer_folder(plan, source, into)
    elif by_name.has_named_state(source):
        form, step = "by name", by_name.grow_named_folder(plan, source, into, max_shard_size=max_shard_size)
    else:
        raise BadCheckpoint(
            f"{str(source)!r} has no optimizer state, neither {trainer.OPTIMIZER} nor {by_name.FOLDER}/*.safetensors: "
            "give a checkpoint-N folder of a training run, or expand without --with-optimizer"
        )
    readings = moments(plan).values()
    return {
        "form": form,
        "step": step,
        "moments": dict(Counter(reading.status for reading in readings)),
        "reasons": dict(Counter(why for reading in readings for why in sorted(reading.why))),
        "tensors": {reading.name: reading.status for reading in readings},
    }
