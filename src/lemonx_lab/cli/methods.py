"""The command methods: LEMON and the methods it is compared with."""

from __future__ import annotations

from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.guards.terminal import print_json


@app.command("methods", rich_help_panel="Commands")
def methods_command(
    check: Annotated[bool, typer.Option("--check", help="Measure each on a small model: the paper's table 1.")] = False,
    as_json: Json = False,
) -> None:
    """List LEMON and the methods it is compared with: what each grows, and what it keeps."""
    from lemonx.cli.render.console import waiting
    from lemonx_lab.cli import show_methods as show

    if check:
        show.require_for_check()
    with waiting("growing a small model by every method", quiet=as_json or not check):
        found = show.listed_methods(check)
    if as_json:
        print_json([entry.as_dict() for entry in found])
    else:
        show.print_methods(found)
