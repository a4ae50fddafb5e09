"""The commands plan, expand and verify."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.cli.options import SourceArgument
from lemonx.guards.others import doing_without
from lemonx.guards.terminal import complain, print_json
from lemonx.options.declared import WRITE, Expansion, Planning, Shrinking, Verifying

if TYPE_CHECKING:
    from lemonx.planning.plan import Plan

# Half a second of imports, which transformers needs for the losses of object detectors alone.
_LOSSES = "scipy"


@app.command("plan", rich_help_panel="Commands")
def plan_command(
    source: SourceArgument,
    output: Annotated[
        Path | None,
        typer.Argument(metavar="[OUTPUT]", help="Also check that this folder can be written.", show_default=False),
    ] = None,
    *,
    options: Planning,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List the shape, the rule and the exactness of every tensor too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what `expand` with the same options would write: sizes, parameters, exactness. Nothing is written.

    `lemonx plan ./small --width 768 --depth 12`
    """
    from lemonx.cli.render import hub
    from lemonx.cli.render import plan as show
    from lemonx.workflows.budget import shapes
    from lemonx.workflows.planning import opened_for, plan_source

    if options.params is not None and output is None:
        with opened_for(source, options) as checkpoint:
            found = shapes(checkpoint, options, options.params)
        if as_json:
            print_json([shape.as_dict() for shape in found])
        else:
            show.print_shapes(source, str(options.params), found)
        return
    if options.solve:
        source = str(hub.fetched(source, quiet=as_json, whole=False, allow_pickle=options.pickled))
    plan = plan_source(source, options)
    if output is not None:
        _check_writable(plan, output.expanduser(), force=False)
    _print_plan(plan, output, tensors=tensors, as_json=as_json)


def _print_plan(plan: Plan, output: Path | None, *, tensors: bool, as_json: bool) -> None:
    from lemonx.cli.render import plan as show
    from lemonx.cli.render.console import Out

    if as_json:
        print_json(show.plan_json(plan))
        return
    show.print_plan(plan, out := Out(), tensors=tensors)
    if output is not None:
        out.line(f"{output} can be written, and nothing was")


def _check_writable(plan: Plan, output: Path, *, force: bool) -> None:
    from lemonx.checkpoints.destination import check_writable
    from lemonx.planning.summary import bytes_on_disk

    check_writable(output, source=plan.source, needed=bytes_on_disk(plan)[1], force=force)


@app.command("expand", rich_help_panel="Commands")
def expand_command(
    source: SourceArgument,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to create.", show_default=False)],
    options: Expansion,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME",
            help="Upload the finished OUTPUT, with its model card, to the hub under this name. A new repository is "
            "private.",
            rich_help_panel=WRITE,
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", hidden=True)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Write a larger checkpoint that computes the same function, and verify it.

    `lemonx expand ./small ./large --width 768 --depth 12`
    """
    from lemonx.cli.render import expansion as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import Out
    from lemonx.hub.upload import check_destination
    from lemonx.methods import chosen
    from lemonx.workflows.expanding import expand_folder
    from lemonx.workflows.planning import plan_source

    if push:
        check_destination(push)
    if private:
        complain("--private is the default now, so leave it out")
    if dry_run:
        complain("--dry-run is now `lemonx plan SOURCE OUTPUT`")
        planning = Planning.of(options, solve=True, adapter=None if options.keep_adapter else options.adapter)
        plan = plan_source(source, planning)
        _check_writable(plan, output.expanduser(), force=options.force)
        _print_plan(plan, output, tensors=False, as_json=as_json)
        return
    folder = hub.fetched(source, quiet=as_json, allow_pickle=options.pickled)
    lessons = chosen(options)[1]
    with doing_without(_LOSSES), show.progress(quiet=as_json, lessons=lessons.steps) as tell:
        told = replace(options, planned=tell.planned, progress=tell.written, learned=tell.learned)
        expanded = expand_folder(folder, output, told)
    if not as_json:
        show.print_expanded(expanded, Out(), source)
    url = hub.pushed(expanded.path, push, private=True, quiet=as_json) if push else None
    if as_json:
        print_json({**expanded.certificate.as_dict(), **({"pushed": url} if url else {})})


@app.command("shrink", rich_help_panel="Commands")
def shrink_command(
    large: Annotated[
        str,
        typer.Argument(
            metavar="LARGE",
            help="An expanded checkpoint, or a run of `train: new` on one; by its name on the hub too.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder for the source.", show_default=False)],
    options: Shrinking,
    as_json: Json = False,
) -> None:
    """Undo an expansion: write the source of LARGE, bit for bit, or nothing.

    It works where the source's numbers are in LARGE: after --free inside, also once what was added has been trained
    (`train: new`), and in bf16 or fp16 until it is trained.

    `lemonx shrink ./large ./small`
    """
    from lemonx.cli.render import expansion as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import Out, waiting
    from lemonx.workflows.shrinking import shrink_folder

    fetched = hub.fetched(large, quiet=as_json, whole=False, allow_pickle=False)
    with waiting("reading the source out of it", quiet=as_json):
        shrunk = shrink_folder(fetched, output, options)
    if as_json:
        print_json({"output": str(shrunk.path), "tensors": shrunk.tensors, "sha256": shrunk.sha256})
    else:
        show.print_shrunk(shrunk, Out())


@app.command("verify", rich_help_panel="Commands")
def verify_command(
    source: SourceArgument,
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="The expanded checkpoint, as a folder or by its name on the hub.",
            show_default=False,
        ),
    ],
    options: Verifying,
    as_json: Json = False,
) -> None:
    """Check that OUTPUT computes the same function as SOURCE. Exit code 1 if it does not.

    Every tensor is checked against its rule, every block against the one it comes from, and both models run in float64
    on the same inputs.

    `lemonx verify ./small ./large`
    """
    from lemonx.cli.render import expansion as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import Out, waiting
    from lemonx.workflows.verifying import verify_folders

    small, large = (
        hub.fetched(one, quiet=as_json, whole=one is output, allow_pickle=bool(options.pickled))
        for one in (source, output)
    )
    with doing_without(_LOSSES), waiting("reading both checkpoints", quiet=as_json):
        measured = verify_folders(small, large, options)
    if as_json:
        print_json(show.verified_json(measured))
    else:
        show.print_verified(measured, Out())
    raise typer.Exit(0 if measured.passed else 1)
