"""The blocks of a model: which tensors of the file belong to each, and which module in transformers it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.errors import LemonxError
from lemonx.specs.coverage import matched
from lemonx.specs.spec import Spec

# A stack and the index of a block in it.
BlockName = tuple[str, int]


def tensors_by_block(spec: Spec, names: Iterable[str]) -> dict[BlockName, list[str]]:
    """The tensors of every block."""
    found: dict[BlockName, list[str]] = {}
    for hit in matched(spec, names)[0]:
        if hit.stack is not None:
            found.setdefault((hit.stack, hit.index), []).append(hit.name)
    return found


def blocks_of(checkpoint: Checkpoint) -> dict[BlockName, list[str]]:
    """The tensors of every block of a checkpoint; empty if no spec covers it."""
    try:
        spec = architectures.find(checkpoint.config).spec(checkpoint.config)
    except LemonxError:
        return {}
    return tensors_by_block(spec, checkpoint.tensors)


def names_in_model(model: Any) -> Callable[[str], str]:
    """The name that transformers gives a tensor of the file when it loads it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    known = model.state_dict()
    return lambda name: rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0]


def modules_of(model: Any, blocks: Mapping[BlockName, list[str]]) -> dict[BlockName, Any]:
    """The module of every block. Files may use other names; transformers' own renaming maps them."""
    known, renamed = model.state_dict(), names_in_model(model)
    found = {}
    for (stack, index), names in blocks.items():
        inside = [name.split(".") for name in map(renamed, names) if name in known]
        if not inside:
            continue
        shared = [parts[0] for parts in zip(*inside, strict=False) if len(set(parts)) == 1]
        # The name of the stack may hold numbers too (stages), and so may what follows (a group's only layer).
        numbers = [i for i, part in enumerate(shared) if part.isdigit()]
        place = next(iter(numbers[sum(part.isdigit() for part in stack.split(".")) :]), None)
        if place is not None and shared[place] == str(index):
            found[stack, index] = model.get_submodule(".".join(shared[: place + 1]))
    return found
