"""report: one self-contained HTML page from result.json files."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lemonx.checkpoints.creating import write_whole
from lemonx.checkpoints.opening import open_file, read_given
from lemonx.checkpoints.plain import parse_json
from lemonx.errors import BadCheckpoint, BadOutput, BadRecipe
from lemonx.guards.shown import shown_lines
from lemonx.planning.summary import human
from lemonx_lab.experiments import verdict, wording
from lemonx_lab.experiments.report import charts
from lemonx_lab.experiments.result_file import FILE, Result, parse

__all__ = ["read", "write", "render", "check_page"]

# Twenty times what an experiment of twelve arms writes.
MAX_RESULT = 1_000_000
# The text that marks a page of ours, and the bytes at its beginning that are searched for it.
_MARK, _WITHIN = b": lemonx report</title>", 1 << 16


def read(path: Path) -> Result:
    """The content of a result.json, or of the one in a folder."""
    file = path / FILE if path.is_dir() else path
    try:
        content = parse_json(read_given(path, FILE, MAX_RESULT)[0])
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
        raise BadRecipe(found, "give a result.json that `lemonx compare` wrote", file=file) from None
    except BadCheckpoint as error:
        raise BadRecipe.of(error) from None
    except (RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
        raise BadRecipe(f"is not a result ({error})", "`lemonx compare` writes one", file=file) from None
    return parse(content, file)


def check_page(output: Path) -> None:
    """BadOutput if there is something under this name that `write` did not write."""
    if not os.path.lexists(output):
        return
    try:
        ours = not output.is_symlink()
        if ours:
            with open_file(output) as file:
                ours = _MARK in file.read(_WITHIN)
    except OSError:
        ours = False
    if not ours:
        raise BadOutput("exists and is not a report of lemonx's", "choose another output, or remove it", file=output)


def write(results: Sequence[Result], output: Path) -> Path:
    """Write the page, also in the place of an older one; it appears whole or not at all."""
    text = render(results)
    try:
        check_page(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, text)
    except OSError as error:
        raise BadOutput(f"cannot be written ({error.strerror})", "choose another output", file=output) from None
    return output


def render(results: Sequence[Result]) -> str:
    """The page as text. It allows itself its own script alone, and nothing from anywhere else."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from lemonx_lab.experiments.report import view

    loader = PackageLoader("lemonx_lab.experiments", "report")
    # Autoescape: labels, claims and notes are anybody's text.
    page: Any = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page.filters.update(place="{:.1f}".format)
    page.globals.update(charts.FRAME, wording=wording, verdict=verdict, number=view.number, human=human, string=str)
    style, script = (loader.get_source(page, name)[0] for name in ("style.css", "script.js"))
    text = page.get_template("page.html").render(
        title=results[0].experiment.title if len(results) == 1 else f"{len(results)} experiments",
        sections=view.sections(results),
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    # Plain ASCII reads the same whatever encoding it is written in; style and script are ASCII themselves.
    return shown_lines(text).encode("ascii", "xmlcharrefreplace").decode()
