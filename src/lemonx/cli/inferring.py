"""The command infer: the table of a model, as a file."""

from __future__ import annotations

from lemonx.cli.app import app
from lemonx.cli.options import SourceArgument
from lemonx.guards.terminal import print_lines
from lemonx.options.declared import Pickled


@app.command("infer", rich_help_panel="Commands")
def infer_command(
    source: SourceArgument,
    options: Pickled,
) -> None:
    """Print the table of a model, inferred by running transformers' own class without its weights.

    Save it, edit it, and use it: `lemonx infer ./small > table.py`, then `lemonx expand ./small ./large --width 768
    --spec table.py`.
    """
    from lemonx.cli.render.console import waiting
    from lemonx.workflows.tables import table_text

    with waiting("running the model without its weights", quiet=False):
        text = table_text(source, options)
    print_lines(text)
