"""The command fsck: what is wrong with a folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.errors import BadCheckpoint
from lemonx.guards.terminal import print_json
from lemonx.options.declared import Checking


@app.command("fsck", rich_help_panel="Commands")
def fsck_command(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="Folder with config.json and safetensors, a model of the hub, a LoRA adapter, a .gguf file, "
            "or the checkpoint of a run.",
            show_default=False,
        ),
    ],
    options: Checking,
    as_json: Json = False,
) -> None:
    """Check a checkpoint of any family and list all that is wrong with it. Exit code 3 if something is.

    `lemonx fsck ./small`
    """
    from lemonx.cli.render import fsck as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import Out
    from lemonx.diagnostics import fsck

    path = hub.fetched(folder, quiet=as_json, allow_pickle=options.pickled)
    with show.progress(0 if options.quick else fsck.total_bytes(path), quiet=as_json) as tell:
        report = fsck.fsck(path, replace(options, progress=tell))
    if as_json:
        print_json(report.as_dict())
    else:
        show.print_report(report, Out())
    raise typer.Exit(0 if report.clean else BadCheckpoint.exit_code)
