"""The command survey: which of transformers' model types grow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.guards.terminal import print_json


@app.command("survey", rich_help_panel="Commands")
def survey_command(
    only: Annotated[
        list[str] | None, typer.Option("--type", metavar="MODEL_TYPE", help="This model type alone.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="File of results, to continue from.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show what this file holds, and measure nothing.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes at once.")] = 1,
    as_json: Json = False,
) -> None:
    """Expand a tiny model of every type in transformers, and compare its outputs. This takes hours.

    `lemonx survey --type llama`
    """
    from lemonx.cli.render.console import bar
    from lemonx_lab.cli import show_survey as show
    from lemonx_lab.survey import by_command

    if recorded is not None:
        found = by_command.recorded(only, recorded)
    else:
        with bar(hidden=as_json) as shown:
            task = shown.add_task("model types", total=None)
            found = by_command.survey(
                only,
                record,
                jobs,
                lambda done, total, name: shown.update(task, completed=done, total=total, description=name),
            )
    print_json(show.survey_json(found.rows)) if as_json else show.print_survey(found.rows)
