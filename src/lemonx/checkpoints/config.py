"""config.json: a JSON object whose counts are those of a model.

transformers makes a layer, a label or an entry of a list for every count that a config names, some as it reads it, and
copies the whole of it two dozen times: a number with a few zeros too many would take all memory, before anything could
be compared with the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lemonx.checkpoints.folder import parse_object
from lemonx.errors import BadCheckpoint
from lemonx.guards.limits import MOST_BLOCKS, MOST_ENTRIES, MOST_LABELS

_BLOCKS = re.compile(r"(^|_)(layers?|depths?|blocks)$")
_LABELS = re.compile(r"(^|_)(labels|experts|groups?)$")


def parse_config(raw: bytes, path: Path) -> dict[str, Any]:
    """What a config.json says; `path` only names it. BadCheckpoint if it is none, or counts more than any model has."""
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > MOST_ENTRIES:
        raise BadCheckpoint(f"{str(path)!r} has more than {MOST_ENTRIES} entries, too many for a config: save it again")
    values = parse_object(raw, path)
    for complaint in (*odd_counts(values), *_odd_classes(values)):
        raise BadCheckpoint(f"{str(path)!r}: {complaint}")
    return values


def _odd_classes(values: Mapping[str, Any]) -> Iterator[str]:
    """A complaint if the names of classes are no list of names; every reader of them counts on one."""
    classes = values.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        yield 'architectures is not a list of names: give the class of the model, such as ["LlamaForCausalLM"]'


def is_blocks(name: str) -> bool:
    """Whether a field of this name counts blocks.

    >>> [name for name in ("n_layer", "depths", "layer_norm_eps") if is_blocks(name)]
    ['n_layer', 'depths']
    """
    return _BLOCKS.search(name) is not None


def odd_counts(values: Mapping[str, Any]) -> Iterator[str]:
    """A complaint for every count that is larger than that of any model, in the parts of a config too.

    >>> list(odd_counts({"text_config": {"num_hidden_layers": 100000}}))
    ['num_hidden_layers is 100000: at most 4096 are allowed']
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from odd_counts(value)
        most = MOST_BLOCKS if is_blocks(name) else MOST_LABELS if _LABELS.search(name) else None
        if most is not None and isinstance(value, int | float) and value > most:
            yield f"{name} is {value}: at most {most} are allowed"
