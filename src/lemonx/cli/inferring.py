"""The command infer: the table of a model, as a file."""

from __future__ import annotations

from lemonx.cli.app import app
from lemonx.cli.options import AllowPickle, SourceArgument, Weights
from lemonx.guards.terminal import print_lines


@app.command("infer", rich_help_panel="Commands")
def infer_command(
    source: SourceArgument,
    allow_pickle: AllowPickle = False,
    weights: Weights = None,
) -> None:
    """Print the table of a model, inferred by running transformers' own class without its weights.

    Save it, edit it, and use it: `lemonx infer ./small > table.py`, then `lemonx expand ./small ./large --width 768
    --spec table.py`.
    """
    from lemonx import api
    from lemonx.cli.render.console import waiting

    with waiting("running the model without its weights", quiet=False):
        text = api.infer(source, allow_pickle=weights or allow_pickle)
    print_lines(text)
