"""config.json: a JSON object whose counts are those of a model.

For every count in a config, transformers creates that many layers, labels or list entries, some of them while it reads
the config, and it copies the whole config two dozen times. A number with a few zeros too many would fill the memory
before anything could be compared with the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lemonx.checkpoints.folder import parse_object
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, raise_first
from lemonx.guards.limits import MOST_BLOCKS, MOST_ENTRIES, MOST_LABELS

_BLOCKS = re.compile(r"(^|_)(layers?|depths?|blocks)$")
_LABELS = re.compile(r"(^|_)(labels|experts|groups?)$")


def parse_config(raw: bytes, path: Path) -> dict[str, JsonValue]:
    """The content of a config.json (`path` is for messages); BadCheckpoint if it is invalid or a count is absurd."""
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > MOST_ENTRIES:
        raise BadCheckpoint(
            f"has more than {MOST_ENTRIES} entries, too many for a config",
            "save the model again with transformers",
            file=path,
        )
    values = parse_object(raw, path)
    raise_first(odd_counts(values, path))
    raise_first(_odd_classes(values, path))
    return values


def class_names(values: Mapping[str, JsonValue]) -> list[str]:
    """The classes that a config.json names, none if it names none."""
    classes = values.get("architectures")
    return [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []


def _odd_classes(values: Mapping[str, JsonValue], path: Path) -> Iterator[BadCheckpoint]:
    """An error if `architectures` is not a list of class names, which every reader of it relies on."""
    classes = values.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        yield BadCheckpoint(
            "has an architectures that is not a list of names",
            'give the class of the model, such as ["LlamaForCausalLM"]',
            file=path,
        )


def is_blocks(name: str) -> bool:
    """Whether a field of this name counts blocks.

    >>> [name for name in ("n_layer", "depths", "layer_norm_eps") if is_blocks(name)]
    ['n_layer', 'depths']
    """
    return _BLOCKS.search(name) is not None


def odd_counts(values: Mapping[str, JsonValue], path: Path) -> Iterator[BadCheckpoint]:
    """An error for every count that is larger than in any real model, also in the nested parts of a config.

    >>> print(*odd_counts({"text_config": {"num_hidden_layers": 100000}}, Path("config.json")))
    'config.json' has num_hidden_layers = 100000: use at most 4096
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from odd_counts(value, path)
        most = MOST_BLOCKS if is_blocks(name) else MOST_LABELS if _LABELS.search(name) else None
        if most is not None and isinstance(value, int | float) and value > most:
            yield BadCheckpoint(f"has {name} = {value}", f"use at most {most}", file=path)
