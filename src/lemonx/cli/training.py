"""The commands train and recipe, for training after an expansion."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.cli.options import SourceArgument
from lemonx.errors import BadRecipe, Stopped
from lemonx.guards.limits import MOST_AT_ONCE, MOST_STEPS
from lemonx.guards.terminal import print_json, print_lines

SCRATCH = "Training the target from scratch"


class Format(str, Enum):
    yaml = "yaml"
    arguments = "arguments"


@app.command("train", rich_help_panel="Commands")
def train_command(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file, or the name of one of lemonx's recipes.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the trained checkpoint.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, such as data.path. Repeatable."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes that come with lemonx.")] = False,
    force: Annotated[
        bool, typer.Option(help="Replace OUTPUT if it is the folder of a run and holds nothing else.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train from scratch or from a checkpoint. The same command continues a run that was stopped.

    `lemonx train vit-imagenet-small --output vit`
    """
    from lemonx.cli.render import training as show
    from lemonx.training import recipe_file

    if list_:
        found = recipe_file.shipped()
        print_json(found) if as_json else show.print_recipes(found)
        return
    if recipe is None or output is None:
        raise BadRecipe(
            "`lemonx train` needs a recipe and an --output folder",
            "`lemonx train --list` names the recipes that come with lemonx",
        )
    from lemonx.training.recipe import read_recipe
    from lemonx.training.run import run

    asked = read_recipe(recipe, recipe_file.parse_changes(set_ or []))
    try:
        with show.progress(quiet=as_json) as tell:
            done = run(asked, output, force=force, progress=tell)
    except KeyboardInterrupt:
        where = "from its last checkpoint" if output.exists() else "from the start: nothing was saved yet"
        raise Stopped("stopped", f"the same command goes on {where}") from None
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first process speaks
    if as_json:
        print_json(show.run_json(done))
    else:
        show.print_run(done)


@app.command("recipe", rich_help_panel="Commands")
def recipe_command(
    source: SourceArgument,
    target: Annotated[Path, typer.Argument(help="The expanded checkpoint, or its config.json.", show_default=False)],
    steps: Annotated[
        int | None, typer.Option(min=1, max=MOST_STEPS, help="Training steps.", rich_help_panel=SCRATCH)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=MOST_STEPS, help="Training epochs.", rich_help_panel=SCRATCH)
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, max=MOST_STEPS, help="Warm-up, in steps or epochs.", rich_help_panel=SCRATCH)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=1e-12, max=1e6, help="Maximum learning rate.", rich_help_panel=SCRATCH)
    ] = None,
    min_learning_rate: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Minimum learning rate.", rich_help_panel=SCRATCH)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=MOST_AT_ONCE, help="Batch size.", rich_help_panel=SCRATCH)
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(
            help="The source's own run, its folder or curve.csv: predict the head start that it gives, with an "
            "interval, and whether growing pays. Needs --steps.",
        ),
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="For `lemonx train`, or for transformers' Trainer.")
    ] = Format.yaml,
) -> None:
    """Print a training recipe for an expanded model (the paper's), with the reasons for it.

    `lemonx recipe ./small ./large --steps 100000 --learning-rate 3e-4`
    """
    from lemonx.cli.render import training as show
    from lemonx.training.advice import advise

    advice = advise(
        source, target, steps=steps, epochs=epochs, warmup=warmup, learning_rate=learning_rate,
        min_learning_rate=min_learning_rate, batch_size=batch_size,
    )  # fmt: skip
    print_lines(show.advice_text(advice, format_.value))
    if curve is not None:
        from lemonx.training.prediction import predict, useful_steps

        if steps is None:
            raise BadRecipe("--curve predicts steps, and --steps is not given", "give the steps from scratch")
        kind = "vision" if advice.task == "image-classification" else "language"
        print_lines(show.prediction_text(predict(kind, advice.share, useful_steps(curve), steps)))
