"""Files that are copied along with the weights, and the few of them that repeat a size or refer to a block."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, BinaryIO, TypeAlias

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.folder import GENERATION, MODULES, module_weights, parse_object
from lemonx.checkpoints.opening import file_inside, read_small
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.errors import BadCheckpoint, Refused
from lemonx.planning.plan import Plan

# sentence-transformers repeats the width of the embeddings in the settings of its pooling module.
_WIDTHS = {"word_embedding_dimension", "embedding_dimension"}


Carried: TypeAlias = str | Callable[[], BinaryIO]
"""The text that a file becomes, or what opens the file that is carried as it is."""


def companions(checkpoint: Checkpoint, plan: Plan) -> dict[str, Carried]:
    """The files that are written beside the weights, by name."""
    return {**carried(checkpoint, plan), **_modules(checkpoint, plan)}


def carried(checkpoint: Checkpoint, plan: Plan | None) -> dict[str, Carried]:
    """The tokenizer and the like; without a plan they stay as they are."""
    found: dict[str, Carried] = {}
    for name in checkpoint.companions:
        text = plan and _following(name, checkpoint, plan)
        found[name] = partial(checkpoint.open_companion, name) if text is None else text
    return found


def follows_sizes(name: str, plan: Plan) -> bool:
    """Whether a companion repeats a size or refers to a block."""
    return name.endswith("_Pooling/config.json") or (name == GENERATION and bool(plan.source_spec.pointers))


def _following(name: str, checkpoint: Checkpoint, plan: Plan) -> str | None:
    """The new text of a companion that depends on the sizes; None if the file is copied unchanged."""
    if not follows_sizes(name, plan):
        return None
    if name == GENERATION:
        content = parse_object(_content(checkpoint, name), checkpoint.path / name)
        return json.dumps(pointing(content, plan), indent=2, sort_keys=True) + "\n"
    return _pooling(_content(checkpoint, name), plan)


def _content(checkpoint: Checkpoint, name: str) -> bytes:
    with checkpoint.open_companion(name) as file:
        return read_small(file, checkpoint.path / name)


def _width(plan: Plan) -> tuple[Any, Any] | None:
    """The width before and after, if it is a single number."""
    fields = plan.family.sizes.get("width", ())
    if len(fields) != 1:
        return None
    before, after = (plan.family.config(config)[fields[0]] for config in (plan.source_config, plan.target_config))
    return before, after


def _pooling(raw: bytes, plan: Plan) -> str | None:
    width = _width(plan)
    try:
        content = parse_json(raw)
    except ValueError:
        return None
    if width is None or width[0] == width[1] or not isinstance(content, dict):
        return None
    changed = {key: width[1] if key in _WIDTHS and value == width[0] else value for key, value in content.items()}
    return json.dumps(changed, indent=2) + "\n"


def pointing(content: Mapping[str, JsonValue], plan: Plan) -> dict[str, JsonValue]:
    """Generation settings with their lists of [block, unit] changed to the same units in the target."""
    changed = dict(content)
    for field, (stack, space) in plan.source_spec.pointers.items():
        if content.get(field) is not None:
            changed[field] = [_pointer(pair, stack, space, plan, field) for pair in _listed(content[field])]
    return changed


def _listed(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else [value]


def _pointer(pair: Any, stack: str, space: str, plan: Plan, field: str) -> list[int]:
    """The target's first copy of this source block, and in it the first copy of this unit."""
    blocks, units = plan.blocks[stack], plan.types.spaces[space]
    whole = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
    if not whole or not (0 <= pair[0] < plan.source_spec.stacks[stack].size and 0 <= pair[1] < units.size):
        raise BadCheckpoint(
            f"{GENERATION}: {field} names {str(pair)[:60]}, which is not a layer and head of this model",
            "correct it, or remove the field",
        )
    here = [index for index, block in enumerate(blocks) if block.source == pair[0]]
    block = next((index for index in here if not blocks[index].added), here[0])
    return [block, units.copies_of(pair[1])[0]]


def _modules(checkpoint: Checkpoint, plan: Plan) -> dict[str, Carried]:
    """The weights of modules after the model, whose input is as wide as the model's output."""
    folder = checkpoint.origin
    names = module_weights(folder) if MODULES in checkpoint.companions else []
    width = _width(plan)
    if MODULES in checkpoint.companions and any(frame.readers for frame in plan.types.framed):
        raise Refused(
            f"{MODULES} makes vectors of sentences of the outputs, and at this width their angles would change",
            f"grow the width by a whole factor, or remove {MODULES} and train another pooling",
        )
    for name in names:
        if width is None or width[0] != width[1]:
            raise Refused(
                f"{name} is a sentence-transformers layer that reads the model's width, which would grow",
                f"keep the width, or remove the layer and its entry in {MODULES} and train another",
            )
        if name.endswith(".bin"):
            raise Refused(f"{name} is a pickle, which lemonx does not copy", "save it as safetensors, or move it away")
    return {name: partial(file_inside, folder, name) for name in names}
