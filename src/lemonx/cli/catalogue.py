"""architectures, methods: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.guards.terminal import print_json


@app.command("architectures", rich_help_panel="Commands")
def architectures_command(
    why: Annotated[
        Path | None, typer.Option("--why", metavar="DIR", help="Say what this checkpoint lacks to be expanded.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the supported families: what grows, and how exactly."""
    from lemonx.cli.render import catalogue as show
    from lemonx.cli.render.console import waiting

    if why is not None:
        with waiting("comparing with every family", quiet=as_json):
            found = show.why_json(why)
        print_json(found) if as_json else show.print_why(found)
        return
    with waiting("asking the type check", quiet=as_json):
        content = show.architectures_json()
    if as_json:
        print_json(content)
    else:
        show.print_architectures(content)


@app.command("methods", rich_help_panel="Commands")
def methods_command(
    check: Annotated[bool, typer.Option("--check", help="Measure each on a small model: the paper's table 1.")] = False,
    as_json: Json = False,
) -> None:
    """List LEMON and the methods it is compared with: what each grows, and what it keeps."""
    from lemonx.cli.render import catalogue as show
    from lemonx.cli.render.console import waiting

    with waiting("growing a small model by every method", quiet=as_json or not check):
        content = show.methods_json(check)
    if as_json:
        print_json(content)
    else:
        show.print_methods(content)
