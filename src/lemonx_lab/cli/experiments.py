"""The commands compare and report: the paper's question, and the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.guards.terminal import print_json


@app.command("compare")
def compare_command(
    experiment: Annotated[
        str | None,
        typer.Argument(metavar="EXPERIMENT", help="An experiment by name, or its TOML file.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of result.json and the report. Default: results/NAME.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and lengths, as the experiment says.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Number of seeds. Default: as the experiment says.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Runs side by side, one core each. Default: 2.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where finished runs are kept; what is there is not run again.")] = Path(
        ".lemonx"
    ),
    as_json: Json = False,
) -> None:
    """Train a source, grow it by each method, train each on: how many steps until it is as good as from scratch?

    `lemonx compare vit --quick`; without a name, lists the experiments. Run it again after an interruption to continue.
    """
    from lemonx_lab.cli import show_experiments as show
    from lemonx_lab.experiments import compare, report

    if experiment is None:
        found = [compare.find(name) for name in compare.names()]
        if as_json:
            print_json([e.model_dump(include={"name", "title", "claim", "cost"}) for e in found])
        else:
            show.print_list(found)
        return
    chosen = compare.find(experiment)
    folder = output or Path("results") / chosen.name
    report.check_page(folder / "report.html")
    with show.progress(quiet=as_json) as tell:
        content = compare.compare(chosen, folder, quick=quick, seeds=seeds, cache=cache, jobs=jobs, tell=tell)
    page = report.write([content], folder / "report.html")
    if as_json:
        print_json(content.as_json())
    else:
        show.print_result(content, page)


@app.command("report")
def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT", help="result.json files, or folders with one.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: the answer first, then curves, plan and certificate. Needs no network."""
    from lemonx.cli.render.console import Out
    from lemonx_lab.experiments import report

    page = report.write([report.read(path) for path in results], output)
    Out().line(f"wrote {page}")
