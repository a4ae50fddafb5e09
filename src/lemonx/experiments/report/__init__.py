"""report: one self-contained HTML page from result.json files."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lemonx.checkpoints.plain import parse_json
from lemonx.errors import BadOutput, BadRecipe
from lemonx.experiments.report.schema import check
from lemonx.experiments.report.view import page
from lemonx.experiments.result import FILE
from lemonx.training.folder import write_text

__all__ = ["read", "write", "render"]


def read(path: Path) -> dict[str, Any]:
    """The content of a result.json, or of the one in a folder."""
    file = path / FILE if path.is_dir() else path
    try:
        content = parse_json(file.read_bytes())
    except OSError as error:
        raise BadRecipe(f"{file}: {error.strerror}: give a result.json that `lemonx compare` wrote") from None
    except ValueError as error:
        raise BadRecipe(f"{file} is not a result: {error}; `lemonx compare` writes one") from None
    return check(content, file)


def write(results: Sequence[dict[str, Any]], output: Path) -> Path:
    """Write the page; it appears whole or not at all."""
    text = render(results)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, text)
    except OSError as error:
        raise BadOutput(f"{str(output)!r} cannot be written ({error.strerror}): choose another output") from None
    return output


def render(results: Sequence[dict[str, Any]]) -> str:
    """The page as text. It allows itself its own script alone, and nothing from anywhere else."""
    from jinja2 import Environment, StrictUndefined

    # Autoescape: labels, claims and notes are anybody's text.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    script = _part("script.js")
    text = environment.from_string(_part("page.html")).render(
        page=page(results),
        style=_part("style.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    # Plain ASCII reads the same whatever encoding it is written in; style and script are ASCII themselves.
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _part(name: str) -> str:
    return resources.files("lemonx.experiments.report").joinpath(name).read_text(encoding="ascii")
