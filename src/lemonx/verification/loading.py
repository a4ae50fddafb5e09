"""Models from disk, as any user would load them, and inputs to try them on."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx import architectures
from lemonx.verification.foreign import foreign
from lemonx.verification.settings import with_plain_outputs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SAMPLE = 4
LENGTH = 24
CHOICES = 2  # of a model that chooses among texts


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


def load(path: Path, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, frozenset[str]]:
    """The model of a checkpoint in eval mode, and the keys that its class missed or did not expect.

    `options` go to from_pretrained.
    """
    from lemonx import models

    models.register()
    with quiet(), foreign(f"load {str(path)!r}", "save the model again"):
        config = with_plain_outputs(read_config(path))
        model, info = model_class(config).from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    odd = (*info["missing_keys"], *info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"]))
    return model.eval(), frozenset(odd)


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


def sample(
    model: PreTrainedModel, seed: int = 0, other: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """A random batch: token ids, every second text padded, or pixels, or both; the other model's, if it can take it."""
    import torch

    if other is not None and model.main_input_name in other:
        return other
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    vision, text = getattr(config, "vision_config", config), getattr(config, "text_config", config)
    if model.main_input_name == "pixel_values":
        return _pixels(vision, generator)
    if model.main_input_name == "input_features":
        shape = (SAMPLE, config.num_mel_bins, 2 * config.max_source_positions)
        sound = {"input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}
        return sound | _begun(model, generator)
    texts = _texts(model, text, generator)
    return texts if vision is config else {**texts, **_pixels(vision, generator)}


def _pixels(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    size = getattr(config, "image_size", 64)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (SAMPLE, config.num_channels, height, width)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


def _texts(model: PreTrainedModel, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    longest = getattr(config, "max_position_embeddings", None) or LENGTH
    shape = (SAMPLE, min(LENGTH, longest))
    ids = torch.randint(0, config.vocab_size, shape, generator=generator)
    mask = torch.ones_like(ids)
    begins = model.can_generate() and not config.is_encoder_decoder
    padding = slice(0, shape[1] // 4) if begins else slice(-(shape[1] // 4) or None, None)
    mask[1::2, padding] = 0
    if config.pad_token_id is None:
        config.pad_token_id = 0  # classifiers of decoders ask for one to find the last token
    ids[mask == 0] = config.pad_token_id
    batch = {"input_ids": ids, "attention_mask": mask}
    if config.is_encoder_decoder and type(model).__name__.endswith("ForSequenceClassification"):
        # They repeat the text to their decoder, and read the end of it: one end each.
        ids[ids == config.eos_token_id] = config.eos_token_id - 1
        ids[:, shape[1] // 2] = config.eos_token_id
        return batch
    if type(model).__name__.endswith("ForMultipleChoice"):
        return {name: value.unflatten(0, (-1, CHOICES)) for name, value in batch.items()}
    return batch | _begun(model, generator)


def _begun(model: PreTrainedModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The text that an encoder-decoder has begun to write; none for models that do not take one."""
    import torch

    config: Any = model.config
    if not config.is_encoder_decoder or "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        return {}
    # Another length than the encoder's, so that its mask cannot be taken for the decoder's.
    longest = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    length = min(LENGTH, longest or LENGTH) // 2
    vocabulary = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    return {"decoder_input_ids": torch.randint(0, vocabulary, (SAMPLE, length), generator=generator)}


def new_cache(model: PreTrainedModel) -> dict[str, Any]:
    """The cache with which an encoder-decoder generates; other models make their own.

    transformers makes one with as many layers as the encoder has, and a T5's decoder may have more.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    if not model.config.is_encoder_decoder:
        return {}
    return {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}


def floating_outputs(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every floating-point output by name, in float64, without what was computed at padding."""
    import torch

    mask = batch.get("attention_mask")
    with torch.no_grad():
        result = model(**{k: v.to(model.dtype) if v.is_floating_point() else v for k, v in batch.items()})
    found = {}
    for name, value in result.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            per_token = mask is not None and value.shape[:2] == mask.shape
            found[name] = (value[mask.bool()] if per_token else value).double()  # type: ignore[union-attr]
    return found
