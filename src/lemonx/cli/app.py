"""The application that every command registers with. Only what `--help` needs is imported anywhere in this package."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="lemonx",
    help="Lossless model expansion: a trained checkpoint in, a larger one that computes exactly the same function out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
