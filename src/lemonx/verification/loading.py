"""Models from disk, as any user would load them, and what they compute."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx import architectures
from lemonx.errors import BadCheckpoint
from lemonx.verification.foreign import foreign
from lemonx.verification.settings import with_plain_outputs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lemonx.verification.sample import View


# An output of a model, and the view that it was given.
Name = tuple[str, str]


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its warnings and progress bars."""
    from transformers.utils import logging

    shown, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(shown)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode. `odd`: keys that its class did not expect, or expected in another shape; `missing`: tensors
    that the file lacks, which are zero here, not random; `shortened`: windows that were cut, as `sample.shorten` does.
    """

    model: PreTrainedModel
    odd: frozenset[str]
    missing: frozenset[str]
    shortened: tuple[str, ...]


def load(path: Path, dtype: torch.dtype, **options: Any) -> Loaded:
    """The model of a checkpoint, of the class that its config.json names; `options` go to from_pretrained."""
    from lemonx import models
    from lemonx.verification.sample import shorten

    models.register()
    with quiet(), foreign(f"load {str(path)!r}", "save the model again"):
        config = with_plain_outputs(read_config(path))
        shortened = shorten(config)
        model, info = model_class(config).from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    odd = (*info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"]))
    missing = frozenset(info["missing_keys"])
    _fill(model, missing, path)
    return Loaded(model.eval(), frozenset(odd), missing, tuple(shortened))


def _fill(model: PreTrainedModel, missing: frozenset[str], path: Path) -> None:
    """Zeros for tensors that the file lacks: transformers draws them at random, and two models would get two draws."""
    import torch

    base = f"{model.base_model_prefix}."
    inside = sorted(k for k in missing if re.search(r"\.\d+\.", k) and (k.startswith(base) or not _has_base(model)))
    if inside:
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        raise BadCheckpoint(f"{str(path)!r} has no tensor {inside[0]!r}{more}, which its model needs: save it again")
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(tensor) for name, tensor in named.items() if name not in missing}
    with torch.no_grad():
        for name in missing & named.keys():
            if id(named[name]) not in kept:  # a tied weight has its values from elsewhere
                named[name].zero_()


def _has_base(model: PreTrainedModel) -> bool:
    return model.base_model is not model


def read_config(path: Path) -> Any:
    """config.json as an object; one of timm's, which does not say its class, as its family knows it."""
    import transformers

    values = json.loads((Path(path) / "config.json").read_text())
    if "model_type" in values:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    family = architectures.find(values)
    return transformers.CONFIG_MAPPING[family.model_types[0]].from_dict(dict(family.config(values)))


def model_class(config: Any) -> Any:
    """The class that config.json names, or else the bare model."""
    import transformers

    from lemonx import models

    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, None)
    if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
        return known
    if (ours := models.find(name)) is not None:
        return ours
    if type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForImageClassification
    return transformers.AutoModel


def new_cache(model: PreTrainedModel) -> dict[str, Any]:
    """The cache with which an encoder-decoder generates; other models make their own.

    transformers makes one with as many layers as the encoder has, and a T5's decoder may have more.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    if not model.config.is_encoder_decoder:
        return {}
    return {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}


def running(model: PreTrainedModel, view: View | str = "the sample") -> AbstractContextManager[None]:
    """A context in which a model that does not run is an error in one line."""
    return foreign(f"run {type(model).__name__} on {view}", "mend its config.json, or expand with --no-verify")


def all_outputs(loaded: Loaded, view: View, *, grad: bool = False) -> dict[Name, torch.Tensor]:
    """Every output, and where the file lacks the head, also what lies below it: a head of zeros shows nothing."""
    found = {(name, view.name): value for name, value in floating_outputs(loaded.model, view, grad=grad).items()}
    base = loaded.model.base_model
    if loaded.missing and base is not loaded.model:
        below = floating_outputs(base, view, grad=grad)  # pyright: ignore[reportArgumentType]
        found |= {(name, f"of the base model {view.name}".strip()): value for name, value in below.items()}
    return found


def floating_outputs(model: PreTrainedModel, view: View, *, grad: bool = False) -> dict[str, torch.Tensor]:
    """Every floating-point output by name, in float64, without what was computed at padding."""
    import torch

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
    import torch

    for name, value in result.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif name == "feature_maps":
            yield from ((f"{name}.{i}", part) for i, part in enumerate(value))
