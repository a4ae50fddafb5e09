"""The command architectures, which lists what lemonx knows."""

from __future__ import annotations

from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.errors import BadTarget
from lemonx.guards.terminal import print_json


@app.command("architectures", rich_help_panel="Commands")
def architectures_command(
    why: Annotated[
        str | None, typer.Option("--why", metavar="DIR", help="Say why this checkpoint cannot be expanded.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", hidden=True)] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Ask the type check now, with the installed transformers: takes some seconds."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the supported families: what grows, and how exactly."""
    if everything:
        raise BadTarget("--all is a command of its own", "use `lemonx survey`")
    from lemonx.checkpoints import Checkpoint
    from lemonx.cli.render import catalogue as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import waiting
    from lemonx.diagnostics.capabilities import matrix
    from lemonx.diagnostics.stored_matrix import stored_matrix
    from lemonx.diagnostics.why import diagnose

    if why is not None:
        folder = hub.fetched(why, quiet=as_json, whole=False)
        with waiting("comparing with every family", quiet=as_json), Checkpoint.open(folder) as checkpoint:
            found = diagnose(checkpoint)
        print_json(found.as_dict()) if as_json else show.print_why(found)
        return
    with waiting("asking the type check", quiet=as_json):
        cells = matrix() if fresh else stored_matrix()
    print_json(show.architectures_json(cells)) if as_json else show.print_architectures(cells)
