"""The command train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.errors import BadRecipe, Stopped
from lemonx.guards.terminal import print_json


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
    from lemonx.training.recipe_file import parse_changes
    from lemonx_lab.cli import show_training as show
    from lemonx_lab.training.shipped import shipped

    if list_:
        found = shipped()
        print_json(found) if as_json else show.print_recipes(found)
        return
    if recipe is None or output is None:
        raise BadRecipe(
            "`lemonx train` needs a recipe and an --output folder",
            "`lemonx train --list` names the recipes that come with lemonx",
        )
    from lemonx_lab.training.recipe import read_recipe
    from lemonx_lab.training.run import run
    from lemonx_lab.training.run_folder import saved_folders

    asked = read_recipe(recipe, parse_changes(set_ or []))
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
