"""The commands plan, expand and verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lemonx.cli.app import Json, app
from lemonx.cli.options import (
    CHOICES,
    AdapterOption,
    AllowPickle,
    Choices,
    ConfigOption,
    Depth,
    DepthType,
    DtypeOption,
    Ffn,
    FreeOption,
    From,
    Heads,
    Infer,
    KeepAdapter,
    KvHeads,
    Like,
    MethodOption,
    Params,
    PlacementOption,
    Private,
    Push,
    RampOption,
    Seed,
    Set,
    Sizes,
    SmallGains,
    SourceArgument,
    SpecFile,
    Weights,
    Width,
    WidthFactor,
    choices,
    data_section,
    in_bytes,
    merged,
    sizes,
)
from lemonx.guards.limits import MOST_STEPS
from lemonx.guards.others import doing_without
from lemonx.guards.terminal import print_json

if TYPE_CHECKING:
    from lemonx.planning.plan import Plan
    from lemonx.workflows.budget import Shape

# Half a second of imports, which transformers needs for the losses of object detectors alone.
_LOSSES = "scipy"


@app.command("plan", rich_help_panel="Commands")
def plan_command(
    source: SourceArgument,
    width: Width = None,
    depth: Depth = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    ffn: Ffn = None,
    width_factor: WidthFactor = None,
    set_: Set = None,
    like: Like = None,
    params: Params = None,
    from_: From = None,
    method: MethodOption = "lemon",
    seed: Seed = 0,
    free: FreeOption = None,
    depth_type: DepthType = None,
    placement: PlacementOption = None,
    small_gains: SmallGains = False,
    ramp: RampOption = False,
    dtype: DtypeOption = None,
    allow_pickle: AllowPickle = False,
    weights: Weights = None,
    adapter: AdapterOption = None,
    config: ConfigOption = None,
    infer: Infer = True,
    spec: SpecFile = None,
    solve: Annotated[
        bool,
        typer.Option(
            "--solve",
            help="Also solve for what depends on the weights of norms (Post-LN at widths that are not multiples). "
            "Without it, only headers are read.",
        ),
    ] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List the shape, the rule and the exactness of every tensor too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what `expand` with the same options would write: sizes, parameters, exactness. Nothing is written.

    `lemonx plan ./small --width 768 --depth 12`
    """
    from lemonx import api
    from lemonx.cli.render import hub
    from lemonx.cli.render import plan as show
    from lemonx.cli.render.console import Out

    asked = sizes(width, depth, heads, kv_heads, ffn, width_factor, set_, like, params)
    chosen = choices(method, seed, free, depth_type, placement, small_gains, ramp, dtype, weights or allow_pickle)
    if params is not None and from_ is None:
        found = _shapes(source, params, asked, chosen, adapter, config, infer, spec)
        print_json([shape.as_dict() for shape in found]) if as_json else show.print_shapes(source, params, found)
        return
    plan = api.plan(
        hub.fetched(source, quiet=as_json, whole=False, allow_pickle=weights or allow_pickle) if solve else source,
        **merged(asked, chosen, from_),
        solve=solve,
        adapter=adapter,
        config=config,
        infer=infer,
        spec=spec,
    )
    if as_json:
        print_json(show.plan_json(plan))
    else:
        show.print_plan(plan, Out(), tensors=tensors)


def _shapes(
    source: str,
    params: str,
    asked: Sizes,
    chosen: Choices,
    adapter: str | None,
    config: Path | None,
    infer: bool,
    spec: Path | None,
) -> list[Shape]:
    from lemonx.models.sources import opened
    from lemonx.workflows import budget, options
    from lemonx.workflows.tables import table_for, tables

    choices: dict[str, Any] = {**chosen}
    allow_pickle = choices.pop("allow_pickle")
    growth = options.GrowthOptions(options.sizes(**asked), **choices)
    with (
        opened(source, allow_pickle=allow_pickle, adapter=adapter, config=config) as checkpoint,
        table_for(checkpoint, tables(infer, spec)),
    ):
        return budget.shapes(checkpoint, growth, params)


@app.command("expand", rich_help_panel="Commands")
def expand_command(
    source: SourceArgument,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to create.", show_default=False)],
    width: Width = None,
    depth: Depth = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    ffn: Ffn = None,
    width_factor: WidthFactor = None,
    set_: Set = None,
    like: Like = None,
    params: Params = None,
    from_: From = None,
    method: MethodOption = "lemon",
    seed: Seed = 0,
    free: FreeOption = None,
    depth_type: DepthType = None,
    placement: PlacementOption = None,
    small_gains: SmallGains = False,
    ramp: RampOption = False,
    dtype: DtypeOption = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest file, such as 500MB or 5GB.", rich_help_panel=CHOICES)
    ] = "5GB",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Workers, side by side. Default: one per core, at most 8.", rich_help_panel=CHOICES
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|{KIND: ...}",
            help="Training data for methods that learn how to grow (ligo): embedded data by name, or a recipe's data "
            "section. Default: what is embedded for the model's task.",
            rich_help_panel=CHOICES,
        ),
    ] = None,
    lessons: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_STEPS,
            help="Training steps for methods that learn how to grow (ligo).",
            rich_help_panel=CHOICES,
        ),
    ] = 100,
    verify: Annotated[
        bool,
        typer.Option(
            help="Prove that the result is the same function before it appears: every tensor, every block, the outputs."
        ),
    ] = True,
    with_optimizer: Annotated[
        bool,
        typer.Option(
            "--with-optimizer",
            help="Grow the optimizer's state too (Adam's moments, for one), to resume a run at the new size: SOURCE is "
            "Trainer's checkpoint-N folder, or a distributed checkpoint.",
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="For how many processes a distributed checkpoint is cut. Default: as many as wrote SOURCE.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace OUTPUT if it is a checkpoint and holds nothing else.")] = False,
    push: Push = None,
    private: Private = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and check that OUTPUT can be written; write nothing.")
    ] = False,
    allow_pickle: AllowPickle = False,
    weights: Weights = None,
    adapter: AdapterOption = None,
    keep_adapter: KeepAdapter = False,
    config: ConfigOption = None,
    infer: Infer = True,
    spec: SpecFile = None,
    as_json: Json = False,
) -> None:
    """Write a larger checkpoint that computes the same function, and verify it.

    `lemonx expand ./small ./large --width 768 --depth 12`
    """
    from lemonx import api
    from lemonx.cli.render import expansion as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import Out
    from lemonx.hub.upload import check_destination
    from lemonx.methods import Lessons

    growth = merged(
        sizes(width, depth, heads, kv_heads, ffn, width_factor, set_, like, params),
        choices(method, seed, free, depth_type, placement, small_gains, ramp, dtype, weights or allow_pickle),
        from_,
    )
    if push:
        check_destination(push)
    if dry_run:
        merged_in = None if keep_adapter else adapter
        planned = api.plan(source, **growth, solve=True, adapter=merged_in, config=config, infer=infer, spec=spec)
        _print_dry_run(planned, output, force=force, as_json=as_json)
        return
    folder = hub.fetched(source, quiet=as_json, allow_pickle=weights or allow_pickle)
    with doing_without(_LOSSES), show.progress(quiet=as_json, lessons=lessons) as tell:
        expanded = api.expand(
            folder,
            output,
            **growth,
            infer=infer,
            spec=spec,
            max_shard_size=in_bytes(max_shard_size),
            threads=threads,
            verify=verify,
            force=force,
            planned=tell.planned,
            progress=tell.written,
            lessons=Lessons(data=data_section(data), steps=lessons, tell=tell.learned),
            with_optimizer=with_optimizer,
            adapter=adapter,
            keep_adapter=keep_adapter,
            config=config,
            processes=processes,
        )
    if not as_json:
        show.print_expanded(expanded, Out(), source)
    url = hub.pushed(expanded.path, push, private=private, quiet=as_json) if push else None
    if as_json:
        print_json({**expanded.certificate.as_dict(), **({"pushed": url} if url else {})})


def _print_dry_run(plan: Plan, output: Path, *, force: bool, as_json: bool) -> None:
    """What would be written, once it is known that it can be."""
    from lemonx.checkpoints.destination import check_writable
    from lemonx.cli.render import plan as show
    from lemonx.cli.render.console import Out
    from lemonx.planning.summary import bytes_on_disk

    check_writable(output, source=plan.source, needed=bytes_on_disk(plan)[1], force=force)
    if as_json:
        print_json(show.plan_json(plan))
    else:
        show.print_plan(plan, out := Out())
        out.line(f"a dry run: {output} can be written, and nothing was")


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
    force: Annotated[bool, typer.Option(help="Replace OUTPUT if it is a checkpoint and holds nothing else.")] = False,
    infer: Infer = True,
    spec: SpecFile = None,
    as_json: Json = False,
) -> None:
    """Undo an expansion: write the source of LARGE, bit for bit, or nothing.

    It works where the source's numbers are in LARGE: after --free inside, also once what was added has been trained
    (`train: new`), and in bf16 or fp16 until it is trained.

    `lemonx shrink ./large ./small`
    """
    from lemonx import api
    from lemonx.cli.render import expansion as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import Out, waiting

    fetched = hub.fetched(large, quiet=as_json, whole=False, allow_pickle=False)
    with waiting("reading the source out of it", quiet=as_json):
        shrunk = api.shrink(fetched, output, force=force, infer=infer, spec=spec)
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
    layerwise: Annotated[
        bool,
        typer.Option(
            "--layerwise",
            help="Compare block by block, with one block in memory at a time: for models larger than memory. Names the "
            "first block that differs.",
        ),
    ] = False,
    allow_pickle: AllowPickle = False,
    weights: Weights = None,
    adapter: AdapterOption = None,
    config: ConfigOption = None,
    infer: Infer = True,
    spec: SpecFile = None,
    as_json: Json = False,
) -> None:
    """Check that OUTPUT computes the same function as SOURCE. Exit code 1 if it does not.

    Every tensor is checked against its rule, every block against the one it comes from, and both models run in float64
    on the same inputs.

    `lemonx verify ./small ./large`
    """
    from lemonx import api
    from lemonx.cli.render import expansion as show
    from lemonx.cli.render import hub
    from lemonx.cli.render.console import Out, waiting

    both = [
        hub.fetched(one, quiet=as_json, whole=one is output, allow_pickle=bool(weights or allow_pickle))
        for one in (source, output)
    ]
    with doing_without(_LOSSES), waiting("reading both checkpoints", quiet=as_json):
        measured = api.verify(
            *both,
            layerwise=layerwise,
            allow_pickle=weights or allow_pickle,
            adapter=adapter,
            config=config,
            infer=infer,
            spec=spec,
        )
    if as_json:
        print_json(show.verified_json(measured))
    else:
        show.print_verified(measured, Out())
    raise typer.Exit(0 if measured.passed else 1)
