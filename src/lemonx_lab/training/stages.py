"""Growth in stages: one run with one step counter and one schedule, in which the model grows between stages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lemonx import api
from lemonx.algebra.free_parameters import as_section
from lemonx.checkpoints.creating import remove, write_whole
from lemonx.checkpoints.folder import RAMP
from lemonx.checkpoints.opening import file_inside
from lemonx.checkpoints.safetensors_file import read_header_from
from lemonx.errors import BadRecipe
from lemonx.options.declared import Values
from lemonx.training.growth_file import Expand
from lemonx.training.ramp import AGAIN
from lemonx_lab.training.recipe import Recipe
from lemonx_lab.training.run_folder import Saved

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
    # Over how many of its steps the copied output weights of added blocks come in.
    ramp: int | None = None

    @property
    def options(self) -> Values:
        """The keywords of `lemonx.expand` for its growth."""
        assert self.expand is not None
        options = self.expand.options
        return options if self.ramp is None else {**options, "free": {**as_section(options.get("free")), "ramp": True}}


def legs(recipe: Recipe, total: int) -> list[Leg]:
    """The stages of a run; a run without stages has one."""
    if not recipe.stages:
        return [_checked(Leg(0, 0, total, recipe.expand, ramp=recipe.ramp))]
    found: list[Leg] = []
    for number, stage in enumerate(recipe.stages):
        start = found[-1].end if found else 0
        leg = Leg(number, start, start + stage.steps, stage.expand, stage.moments == "grown", stage.ramp)
        found.append(_checked(leg))
    return found


def _checked(leg: Leg) -> Leg:
    """The leg itself; BadRecipe if its ramp would not come to its end, and leave a model that is half open."""
    if leg.ramp is not None and leg.ramp >= leg.end - leg.start:
        raise BadRecipe(f"the ramp takes {leg.ramp} of {leg.end - leg.start} steps", "shorten it, or train longer")
    return leg


def ramp_of(leg: Leg, output: Path) -> Path:
    """The file of the output weights that come in during this stage."""
    return output / f".ramp-{leg.stage}.safetensors"


def keep_ramp(leg: Leg, folder: Path, output: Path) -> None:
    """Copy the ramp of a checkpoint to the folder of the run, whole or not at all."""
    if not (folder / RAMP).is_file():
        raise BadRecipe(f"the recipe has a ramp, but {str(folder)!r} holds no {RAMP}", AGAIN)
    with file_inside(folder.resolve(), RAMP) as file:
        read_header_from(file.fileno(), folder / RAMP)  # a broken one is named by where the user keeps it
        write_whole(ramp_of(leg, output), file)


def grow(saved: Saved, leg: Leg, output: Path) -> Saved:
    """Write a checkpoint of the larger model, from which Trainer continues as if it had always been this large."""
    partial, finished = output / f".stage-{leg.stage}", output / f"stage-{leg.stage}"
    remove(partial)
    api.expand(saved.path, partial, with_optimizer=leg.with_optimizer, **leg.options)
    if leg.ramp is not None:
        keep_ramp(leg, partial, output)
    for path in (path for pattern in _CARRIED for path in saved.path.glob(pattern)):
        with file_inside(saved.path.resolve(), path.name) as file:
            write_whole(partial / path.name, file)
    os.rename(partial, finished)
    remove(saved.path)
    return Saved(finished, leg.start, leg.stage)
