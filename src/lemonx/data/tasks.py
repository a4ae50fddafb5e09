"""What a model is trained to do, as its class says, and the data that it can then be shown by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemonx.errors import BadTarget

_HEADS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "sequence-classification",
}
_DEFAULTS = {"causal-lm": "stdlib", "masked-lm": "stdlib", "image-classification": "digits"}


def task_of(config: Mapping[str, Any]) -> str:
    """The task of the class that a config.json names."""
    name = (config.get("architectures") or ["a model without architectures"])[0]
    for head, task in _HEADS.items():
        if name.endswith(head):
            return task
    raise BadTarget(f"{name} has no head that is trained here: want a class that ends in one of {', '.join(_HEADS)}")


def default(config: Mapping[str, Any]) -> dict[str, Any]:
    """The embedded data for the task of a config's class."""
    task = task_of(config)
    if task not in _DEFAULTS:
        raise BadTarget(f"there is no embedded data for {task}: name the data to learn from")
    return {"kind": _DEFAULTS[task]}
