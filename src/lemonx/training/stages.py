"""Growth in stages: one run with one step counter and one schedule, in which the model grows between stages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lemonx import api
from lemonx.checkpoints.creating import remove, write_whole
from lemonx.checkpoints.opening import file_inside
from lemonx.training.recipe import Expand, Recipe
from lemonx.training.run_folder import Saved

# What Trainer needs, beside the weights, to go on: where it was, and the random state.
_CARRIED = ("trainer_state.json", "rng_state*.pth")


@dataclass(frozen=True)
class Leg:
    """The steps from `start` to `end` at one size, reached by `expand`."""

    stage: int
    start: int
    end: int
    expand: Expand | None
    with_optimizer: bool = True


def legs(recipe: Recipe, total: int) -> list[Leg]:
    """The stages of a run; a run without stages has one."""
    if not recipe.stages:
        return [Leg(0, 0, total, recipe.expand)]
    found: list[Leg] = []
    for number, stage in enumerate(recipe.stages):
        start = found[-1].end if found else 0
        found.append(Leg(number, start, start + stage.steps, stage.expand, stage.moments == "grown"))
    return found


def grow(saved: Saved, leg: Leg, output: Path) -> Saved:
    """Write a checkpoint of the larger model, from which Trainer continues as if it had always been this large."""
    assert leg.expand is not None
    partial, finished = output / f".stage-{leg.stage}", output / f"stage-{leg.stage}"
    remove(partial)
    options = {**leg.expand.options, "verify": leg.expand.verify, "with_optimizer": leg.with_optimizer}
    api.expand(saved.path, partial, **options)
    for path in (path for pattern in _CARRIED for path in saved.path.glob(pattern)):
        with file_inside(saved.path.resolve(), path.name) as file:
            write_whole(partial / path.name, file)
    os.rename(partial, finished)
    remove(saved.path)
    return Saved(finished, leg.start, leg.stage)
