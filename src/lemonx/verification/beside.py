"""Do the files beside the weights agree with the source's? They turn text into tokens, and tokens into text.

A file that a loader reads must be in both folders, with the same content or with the changes that the plan makes.
Other files (a README, a licence) are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.folder import ADAPTER, has, is_loaded
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import parse_json
from lemonx.execution.sidecar_files import Carried, companions
from lemonx.planning.plan import Plan

# What transformers writes as it likes when it saves.
_VOLATILE = ("transformers_version", "_from_model_config")


def beside_faults(plan: Plan, source: Checkpoint, target: Checkpoint) -> Iterator[str]:
    """What is wrong with the files beside the target's weights, one line per fault."""
    wanted = {name: content for name, content in companions(source, plan).items() if is_loaded(name)}
    found = {name for name in target.companions if is_loaded(name)} | {n for n in wanted if has(target.path, n)}
    if has(target.path, ADAPTER):
        yield f"{ADAPTER} makes a loader that knows adapters take another model than the one that lies here"
    for name in sorted(wanted.keys() | found):
        if name not in found:
            yield f"{name} is missing, which the source has"
        elif name not in wanted:
            yield f"{name} is not the source's, which has none"
        elif not _same(name, wanted[name], read_inside(target.path, name)):
            yield f"{name} is not what the source's becomes"


def _same(name: str, wanted: Carried, found: bytes) -> bool:
    if isinstance(wanted, str):
        made = wanted.encode()
    else:
        with wanted() as file:
            made = file.read()
    return made == found or (name.endswith(".json") and _content(made) == _content(found))


def _content(raw: bytes) -> Any:
    """The content of a JSON file, whatever its layout; or the bytes themselves if they are not JSON."""
    try:
        value = parse_json(raw)
    except ValueError:
        return raw
    if not isinstance(value, dict):
        return value
    return {name: part for name, part in value.items() if name not in _VOLATILE}
