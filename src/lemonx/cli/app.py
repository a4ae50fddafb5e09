"""The application that every command registers with. Only what `--help` needs is imported anywhere in this package."""

from __future__ import annotations

from typing import Annotated

import typer

from lemonx.guards.terminal import print_lines

app = typer.Typer(
    name="lemonx",
    help="Lossless model expansion: a trained checkpoint in, a larger one that computes exactly the same function out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print_lines(f"lemonx {version('lemonx')}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of lemonx and exit."),
    ] = False,
) -> None:
    """Options before the command."""


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
