"""report: one self-contained HTML page from result.json files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lemonx.errors import BadRecipe
from lemonx.experiments.result import FILE


def read(path: Path) -> dict[str, Any]:
    """The content of a result.json, or of the one in a folder."""
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadRecipe(f"{file} is not a result: {error}; `lemonx compare` writes one") from None
    if not isinstance(content, dict) or "arms" not in content:
        raise BadRecipe(f"{file} is not a result: `lemonx compare` writes one")
    return content


def write(results: Sequence[dict[str, Any]], output: Path) -> Path:
    """Write the page."""
    raise NotImplementedError
