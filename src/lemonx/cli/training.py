"""The commands train and recipe, for training after an expansion."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.cli.options import SourceArgument
from lemonx.errors import BadRecipe, Stopped
from lemonx.guards.limits import LONGEST_TEXT, MOST_AT_ONCE, MOST_STEPS
from lemonx.guards.terminal import print_json, print_lines

SCRATCH = "Training the target from scratch"


class Format(StrEnum):
    yaml = "yaml"
    arguments = "arguments"


class RecipeDecay(StrEnum):
    cosine = "cosine"
    wsd = "wsd"


@app.command("train", rich_help_panel="Commands")
def train_command(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="A YAML file, or the name of one of lemonx's recipes.", show_default=False
        ),
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
    from lemonx.training.run_folder import saved_folders

    asked = read_recipe(recipe, recipe_file.parse_changes(set_ or []))
    try:
        with show.progress(quiet=as_json) as tell:
            done = run(asked, output, force=force, progress=tell)
    except KeyboardInterrupt:
        where = "from its last checkpoint" if saved_folders(output) else "from the start: nothing was saved yet"
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
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The expanded checkpoint, or its config.json.", show_default=False)
    ],
    steps: Annotated[
        int | None, typer.Option(min=1, max=MOST_STEPS, help="Training steps.", rich_help_panel=SCRATCH)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=MOST_STEPS, help="Training epochs.", rich_help_panel=SCRATCH)
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Training tokens, such as 20B; needs --length.", rich_help_panel=SCRATCH)
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=LONGEST_TEXT, help="Tokens of an example.", rich_help_panel=SCRATCH)
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
    decay: Annotated[
        RecipeDecay,
        typer.Option(help="cosine: the paper's. wsd: constant, then down to 0, which ended lower in `lemonx compare`."),
    ] = RecipeDecay.cosine,
    format_: Annotated[
        Format, typer.Option("--format", help="For `lemonx train`, or for transformers' Trainer.")
    ] = Format.yaml,
) -> None:
    """Print how to train an expanded model, in terms of how you would train it from scratch, and why.

    `lemonx recipe ./small ./large --steps 100000 --learning-rate 3e-4 --batch-size 512`
    """
    from lemonx.cli.render import training as show
    from lemonx.training.advice import OwnTraining, advise, growth

    own = OwnTraining(
        steps=steps, epochs=epochs, tokens=_tokens(tokens), length=length, batch_size=batch_size, warmup=warmup,
        learning_rate=learning_rate, min_learning_rate=min_learning_rate,
    )  # fmt: skip
    grown = growth(source, target)
    advised = None if own.lacking else advise(grown, own, decay.value)
    if advised is None:
        text = show.growth_text(grown, own.lacking)
    else:
        text = show.advice_text(advised, format_.value)
    if curve is not None:
        from lemonx.training.prediction import Case, predict, useful_steps

        scratch, unit = own.total
        if unit != "steps" or not scratch:
            raise BadRecipe("--curve predicts steps, and how many training from scratch takes is not known",
                            "give --steps, or --tokens with --length and --batch-size")  # fmt: skip
        found = predict(Case(grown.share, useful_steps(curve), scratch))
        text += show.prediction_text(found, None if advised is None else advised.length)
    print_lines(text)


def _tokens(text: str | None) -> int | None:
    from lemonx.planning.sizes import parse_count

    count = None if text is None else parse_count(text)
    if text is not None and not count:
        raise BadRecipe(f"--tokens {text[:40]} is not a number of tokens", "write it as 300M or 20B")
    return count
