"""Files that come along with the weights, and the few of them that repeat a size."""

from __future__ import annotations

import json
from pathlib import Path

from lemonx.planning import Plan

# sentence-transformers repeats the width of the embeddings in the settings of its pooling module.
_WIDTHS = {"word_embedding_dimension", "embedding_dimension"}


def carried(name: str, path: Path, plan: Plan) -> str | None:
    """The text of a companion that must follow the width; None if the file is carried as it is."""
    fields = plan.family.sizes.get("width", ())
    if len(fields) != 1 or not name.endswith("_Pooling/config.json"):
        return None
    old, new = (plan.family.config(config)[fields[0]] for config in (plan.source_config, plan.target_config))
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return None
    if old == new or not isinstance(content, dict):
        return None
    changed = {key: new if key in _WIDTHS and value == old else value for key, value in content.items()}
    return json.dumps(changed, indent=2) + "\n"
