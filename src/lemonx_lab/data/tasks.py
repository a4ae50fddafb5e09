"""The task of a model, from the name of its class, and the default data for that task."""

from __future__ import annotations

from collections.abc import Mapping

from lemonx.checkpoints.config import class_names
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadTarget

_HEADS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "sequence-classification",
}
_DEFAULTS = {"causal-lm": "stdlib", "masked-lm": "stdlib", "image-classification": "digits"}


def task_of(config: Mapping[str, JsonValue]) -> str:
    """The task of the class that a config.json names."""
    name = next(iter(class_names(config)), "a model without architectures")
    for head, task in _HEADS.items():
        if name.endswith(head):
            return task
    raise BadTarget(f"lemonx cannot train the head of {name}", f"use a class that ends in one of {', '.join(_HEADS)}")


def default(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The embedded data for the task of a config's class."""
    task = task_of(config)
    if task not in _DEFAULTS:
        raise BadTarget(
            f"lemonx has no data of its own for {task}", "name the data to train on, as in {name: ligo, data: ...}"
        )
    return {"kind": _DEFAULTS[task]}
