"""LoRA as a baseline: low-rank adapters by peft, trained alone and merged into the weights at the end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel

from lemonx.errors import BadRecipe
from lemonx_lab.training.recipe import Lora


@contextmanager
def adapted(model: PreTrainedModel, asked: Lora | None) -> Generator[None]:
    """A context in which only the adapters of a model are trained; behind it they are part of its weights."""
    if asked is None:
        yield
        return
    if find_spec("peft") is None:
        raise BadRecipe("lora needs peft, which is not installed", "install peft, or leave lora out")
    import peft

    config = peft.LoraConfig(
        r=asked.rank, lora_alpha=asked.alpha, lora_dropout=0.0, target_modules="all-linear", bias="none"
    )
    wrapped: Any = peft.get_peft_model(model, config)
    yield
    wrapped.merge_and_unload()
