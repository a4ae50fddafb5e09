"""The command methods: LEMON and the methods it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from lemonx.cli.app import Json, app
from lemonx.guards.terminal import print_json

_BELOW = "lossless, or the largest difference of an output relative to the largest output; -: not defined"


@app.command("methods", rich_help_panel="Commands")
def methods_command(
    check: Annotated[bool, typer.Option("--check", help="Measure each on a small model: the paper's table 1.")] = False,
    as_json: Json = False,
) -> None:
    """List LEMON and the methods it is compared with: what each grows, and what it keeps."""
    from lemonx import methods
    from lemonx.cli.render.console import Out, styled, table

    found = [method for _, method in sorted(methods.methods().items())]
    measured = _measured(quiet=as_json) if check else {}
    if as_json:
        fields = [{"method": one.name, "title": one.title, "paper": one.paper, "grows": [*one.grows]} for one in found]
        print_json([{**one, **measured.get(str(one["method"]), {})} for one in fields])
        return
    out = Out()
    if measured:
        columns = [*measured[found[0].name]]
        rows = table("method", *columns)
        for method in found:
            rows.add_row(method.name, *(measured[method.name][column] for column in columns))
        out.table(rows)
        out.line(_BELOW)
    for method in found:
        out.line(styled("bold", method.name), f" ({' and '.join(method.grows)}): {method.title}.")
        out.line(f"  {method.paper}")


def _measured(*, quiet: bool) -> Mapping[str, Mapping[str, str]]:
    """The figures of every method by column."""
    from lemonx.cli.render.console import waiting
    from lemonx_lab.training.requirements import require

    require("`lemonx methods --check` trains small models, which")
    with waiting("growing a small model by every method", quiet=quiet):
        from lemonx_lab.experiments import method_table

        return method_table.overview()
