"""Config fields about blocks follow them: lists with one entry per block, and numbers that count or name blocks.

Some lists are not in config.json: transformers derives them from each block's index (every sixth layer sees the whole
text). Another block stands at that index in a deeper model, so the lists of the source are asked of transformers' own
config class and written out. Nothing here imports it: whoever plans hands in the function that asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import Refused, raise_first
from lemonx.specs.config import field_at, with_fields
from lemonx.specs.coverage import list_problems
from lemonx.specs.spec import Block, Spec

# Every field of a config.json as transformers' class for it reads them, defaults and all.
AsRead = Callable[[Mapping[str, JsonValue]], Mapping[str, JsonValue]]
BlocksByStack = Mapping[str, tuple[Block, ...]]


def implied_lists(
    config: Mapping[str, JsonValue], source: Spec, blocks: BlocksByStack, as_read: AsRead | None
) -> dict[str, list[JsonValue]]:
    """The lists that the source's config.json leaves out and a deeper target's must say, as the source has them."""
    missing = [
        field
        for name, stack in source.stacks.items()
        if stack.implied and len(blocks[name]) != stack.size
        for field in stack.lists
        if not isinstance(field_at(config, field), list)
    ]
    if not missing:
        return {}
    read = as_read(config) if as_read is not None else {}
    found: dict[str, list[JsonValue]] = {}
    for field in missing:
        if not isinstance(entries := read.get(field), list):
            raise Refused(
                f"leaves out {field}, which depends on a layer's index, so lemonx cannot tell the types of a deeper "
                "model's layers",
                f"add {field}, with one entry per layer",
                file=CONFIG,
            )
        found[field] = [*entries]
    return found


def with_block_fields(config: Mapping[str, JsonValue], source: Spec, blocks: BlocksByStack) -> dict[str, JsonValue]:
    """config.json with the fields that speak of the source's blocks speaking of the target's."""
    raise_first(list_problems(source, config))
    new = dict[str, JsonValue]()
    for name, stack in source.stacks.items():
        for field in stack.lists:
            if isinstance(old := field_at(config, field), list):
                new[field] = [old[block.source] for block in blocks[name]]
        for field in stack.counts:
            if isinstance(old := field_at(config, field), int):
                new[field] = _recounted(old, stack.size, blocks[name])
        for field in stack.numbered:
            if isinstance(old := field_at(config, field), list):
                new[field] = [_renumbered(entry, stack.size, blocks[name]) for entry in old]
    return with_fields(config, new)


def _recounted(first: int, size: int, blocks: tuple[Block, ...]) -> int:
    """How many first blocks of the target come from the `first` blocks of the source; more than all of it is all.

    >>> blocks = (Block(0, False, False), Block(0, True, True), Block(1, False, True))
    >>> [_recounted(first, 2, blocks) for first in (0, 1, 2, 28)]
    [0, 2, 3, 28]
    """
    count = sum(block.source < first for block in blocks)
    return count if first < size else max(first, count)


def _renumbered(entry: Any, size: int, blocks: tuple[Block, ...]) -> Any:
    """Where the block that an entry points at stands in the target; 0, and a name without a number, stand for no block.

    >>> blocks = (Block(0, False, False), Block(0, True, True), Block(1, False, True))
    >>> [_renumbered(entry, 2, blocks) for entry in (0, 2, -2, "stem", "stage2")]
    [0, 3, 1, 'stem', 'stage3']
    """
    stem, number = re.fullmatch(r"(.*?)(-?\d*)", str(entry)).groups()  # type: ignore[union-attr]
    index = int(number or 0)
    index += size + 1 if index < 0 else 0  # from the end
    places = [place for place, block in enumerate(blocks, start=1) if block.source == index - 1 and not block.added]
    new = places[0] if places else index
    return f"{stem}{new}" if number and isinstance(entry, str) else new if number else entry
