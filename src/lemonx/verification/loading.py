"""Loads models from disk as any user would, and runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.errors import BadCheckpoint
from lemonx.models import door
from lemonx.models.foreign import foreign
from lemonx.verification.generation_settings import with_plain_outputs
from lemonx.verification.sample import shorten

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache, PreTrainedModel

    from lemonx.verification.sample import View


# An output of a model, and the view that it was given.
Name = tuple[str, str]


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, from the folder `origin`.

    `odd`: keys that its class did not expect, or expected in another shape; `missing`: tensors that the file lacks,
    which are zero here, not random; `shortened`: windows that were cut, as `sample.shorten` does.
    """

    model: PreTrainedModel
    odd: frozenset[str]
    missing: frozenset[str]
    shortened: tuple[str, ...]
    origin: Path


def load(checkpoint: Checkpoint, dtype: torch.dtype, **options: Any) -> Loaded:
    """The model of a checkpoint, of the class that its config.json names; `options` go to from_pretrained."""
    with foreign(f"load {str(checkpoint.origin)!r}", "save the model again"):
        config = with_plain_outputs(door.read_config(checkpoint))
        shortened = shorten(config)
        model, info = door.load(
            checkpoint, _kind(checkpoint, config), config, dtype=dtype, ignore_mismatched_sizes=True, **options
        )
        odd = (*info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"]))
        missing = frozenset(info["missing_keys"])
        _fill(model, missing, checkpoint.origin)
        return Loaded(model.eval(), frozenset(odd), missing, tuple(shortened), checkpoint.origin)


@names_its_folder
def _kind(checkpoint: Checkpoint, config: Any) -> Any:
    return door.model_class(config)


def _fill(model: PreTrainedModel, missing: frozenset[str], path: Path) -> None:
    """Fill tensors that the file lacks with zeros; transformers would draw different random ones for each model."""
    base = f"{model.base_model_prefix}."
    inside = sorted(k for k in missing if re.search(r"\.\d+\.", k) and (k.startswith(base) or not _has_base(model)))
    if inside:
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        raise BadCheckpoint(f"has no tensor {inside[0]!r}{more}, which its model needs", "save it again", file=path)
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(tensor) for name, tensor in named.items() if name not in missing}
    with torch.no_grad():
        for name in missing & named.keys():
            if id(named[name]) not in kept:  # a tied weight has its values from elsewhere
                named[name].zero_()


def _has_base(model: PreTrainedModel) -> bool:
    return model.base_model is not model


def new_cache(model: PreTrainedModel) -> dict[str, EncoderDecoderCache]:
    """The cache with which an encoder-decoder generates; other models make their own.

    transformers makes one with as many layers as the encoder has, and a T5's decoder may have more.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    if not model.config.is_encoder_decoder:
        return {}
    return {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}


def running(origin: Path, view: View | str = "the sample") -> AbstractContextManager[None]:
    """A context in which a failure to run a model becomes an error in one line."""
    return foreign(f"run {str(origin)!r} on {view}", "mend its config.json, or expand with --no-verify")


def all_outputs(loaded: Loaded, view: View, *, grad: bool = False) -> dict[Name, torch.Tensor]:
    """Every output; if the file lacks the head, also the head's input, because a head of zeros shows nothing."""
    found = {(name, view.name): value for name, value in floating_outputs(loaded.model, view, grad=grad).items()}
    base = loaded.model.base_model
    if loaded.missing and base is not loaded.model:
        below = floating_outputs(base, view, grad=grad)  # pyright: ignore[reportArgumentType]
        found |= {(name, f"of the base model {view.name}".strip()): value for name, value in below.items()}
    return found


def floating_outputs(model: PreTrainedModel, view: View, *, grad: bool = False) -> dict[str, torch.Tensor]:
    """Every floating-point output by name, in float64, without what was computed at padding."""
    mask = view.inputs.get("attention_mask")
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in view.inputs.items()}
    with torch.set_grad_enabled(grad):
        result = model(**inputs, **view.options)
    found = {}
    for name, value in _tensors(result):
        if value.is_floating_point() and value.ndim:  # a loss is no output: it follows from one
            per_token = mask is not None and value.shape[:2] == mask.shape
            found[name] = (value[mask.bool()] if per_token else value).double()  # type: ignore[union-attr]
    return found


def _tensors(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a model gives out, also those of a backbone, which gives out several maps of features."""
    for name, value in result.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif name == "feature_maps":
            yield from ((f"{name}.{i}", part) for i, part in enumerate(value))
