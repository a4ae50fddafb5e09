"""The commands architectures and methods, which list what lemonx knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.guards.terminal import print_json


@app.command("architectures", rich_help_panel="Commands")
def architectures_command(
    why: Annotated[
        str | None, typer.Option("--why", metavar="DIR", help="Say why this checkpoint cannot be expanded.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Expand a tiny model of every type in transformers: hours."),
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--type", metavar="MODEL_TYPE", help="With --all: this model type alone.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="With --all: file of results, to continue from."),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="With --all: show what this file holds, and measure nothing."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="With --all: processes at once.")] = 1,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Ask the type check now, with the installed transformers: takes some seconds."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the supported families: what grows, and how exactly."""
    if everything:
        _survey(only, record, recorded, jobs, as_json)
        return
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


def _survey(only: list[str] | None, record: Path | None, recorded: Path | None, jobs: int, as_json: bool) -> None:
    from lemonx_lab.survey import by_command as surveying
    from lemonx_lab.cli import show_survey as show
    from lemonx.cli.render.console import bar

    if recorded is not None:
        found = surveying.recorded(only, recorded)
    else:
        with bar(hidden=as_json) as shown:
            task = shown.add_task("model types", total=None)
            found = surveying.survey(
                only,
                record,
                jobs,
                lambda done, total, name: shown.update(task, completed=done, total=total, description=name),
            )
    print_json(show.survey_json(found.rows)) if as_json else show.print_survey(found.rows)


@app.command("methods", rich_help_panel="Commands")
def methods_command(
    check: Annotated[bool, typer.Option("--check", help="Measure each on a small model: the paper's table 1.")] = False,
    as_json: Json = False,
) -> None:
    """List LEMON and the methods it is compared with: what each grows, and what it keeps."""
    from lemonx.cli.render import catalogue as show
    from lemonx.cli.render.console import waiting

    if check:
        show.require_for_check()
    with waiting("growing a small model by every method", quiet=as_json or not check):
        found = show.listed_methods(check)
    if as_json:
        print_json([entry.as_dict() for entry in found])
    else:
        show.print_methods(found)
