"""Do the files beside the weights say what the source's say? Text becomes tokens by them, and tokens text.

A file that a loader reads must be in both folders, with the same content, or with what the plan makes of it. Others
(a README, a licence) are nobody's business here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.folder import ADAPTER, has, is_loaded, real_file
from lemonx.companions import companions
from lemonx.planning import Plan

# What transformers writes as it likes when it saves.
_VOLATILE = ("transformers_version", "_from_model_config")


def beside_faults(plan: Plan, source: Checkpoint, target: Checkpoint) -> Iterator[str]:
    """What is wrong with the files beside the target's weights, a line for each."""
    wanted = {name: content for name, content in companions(source, plan).items() if is_loaded(name)}
    found = {name: path for name, path in target.companions.items() if is_loaded(name)}
    found |= {name: real_file(target.path, name) for name in wanted if name not in found and has(target.path, name)}
    if has(target.path, ADAPTER):
        yield f"{ADAPTER} makes a loader that knows adapters take another model than the one that lies here"
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            yield f"{name} is missing, which the source has"
        elif name not in wanted:
            yield f"{name} is not the source's, which has none"
        elif not _same(wanted[name], found[name]):
            yield f"{name} is not what the source's becomes"


def _same(wanted: Path | str, found: Path) -> bool:
    one = wanted.read_bytes() if isinstance(wanted, Path) else wanted.encode()
    other = found.read_bytes()
    return one == other or (found.suffix == ".json" and _content(one) == _content(other))


def _content(raw: bytes) -> Any:
    """What a JSON file says, however it is laid out; bytes that are no JSON are themselves."""
    try:
        value = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(value, dict):
        return value
    return {name: part for name, part in value.items() if name not in _VOLATILE}
