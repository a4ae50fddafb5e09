"""The command recipe: how to train an expanded model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import app
from lemonx.cli.options import SourceArgument
from lemonx.errors import BadRecipe
from lemonx.guards.limits import LONGEST_TEXT, MOST_AT_ONCE, MOST_STEPS
from lemonx.guards.terminal import print_lines

SCRATCH = "Training the target from scratch"


class Format(StrEnum):
    yaml = "yaml"
    arguments = "arguments"


class RecipeDecay(StrEnum):
    cosine = "cosine"
    wsd = "wsd"


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
    from lemonx.cli.render import advising as show
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
    from lemonx.options.sizes import parse_count

    count = None if text is None else parse_count(text)
    if text is not None and not count:
        raise BadRecipe(f"--tokens {text[:40]} is not a number of tokens", "write it as 300M or 20B")
    return count
