"""Do the files beside the weights agree with the source's? They turn text into tokens, and tokens into text.

A file that a loader reads must be in both folders, with the same content or with the changes that the plan makes. What
lemonx.json says of the growth must be true. Other files (a README, a licence) are not compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.folder import ADAPTER, CERTIFICATE, has, is_loaded, parse_object
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.execution.sidecar_files import Carried, companions
from lemonx.guards.shown import shown
from lemonx.planning.plan import Plan
from lemonx.planning.summary import changed_fields, parameters

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
    if has(target.path, CERTIFICATE):
        yield from _claims(plan, parse_object(read_inside(target.path, CERTIFICATE), target.path / CERTIFICATE))


def _claims(plan: Plan, certificate: Mapping[str, JsonValue]) -> Iterator[str]:
    """What a certificate says of the growth itself, where that is not so."""
    before, after = parameters(plan)
    facts = {
        "lossless": plan.policy.lossless,
        "source.parameters": before,
        "target.parameters": after,
        "exactness": dict(Counter(step.exactness for step in plan.steps)),
        "config": {name: {"source": old, "target": new} for name, old, new in changed_fields(plan)},
    }
    for name, fact in facts.items():
        part, _, last = name.rpartition(".")
        within = certificate.get(part) if part else certificate
        claimed = within.get(last) if isinstance(within, Mapping) else None
        if claimed != json.loads(json.dumps(fact)):
            yield f"{CERTIFICATE} says {name} = {shown(json.dumps(claimed), 80)}, which is not so"


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
