"""Inputs that reach every branch of a model. They show that two models are wired the same, not that weights are right.

Texts are longer than every window, padded on the left and on the right, with every token type, special tokens among
the others, and once at the last positions. Images also come in a second size, if the model takes one, and sounds in a
second length, with padding. A window that is too long to exceed is shortened in both models; structure.py checks that
the two have the same window.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import CannotVerify
from lemonx.guards.limits import MOST_PIXELS
from lemonx.models.foreign import in_one_line
from lemonx.verification.media import find_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


T = TypeVar("T")
SAMPLE = 4
# Fewer pictures, and at last one, where they would have more entries than this together.
PICTURES = 2**20
LENGTH = 23
CHOICES = 2  # of a model that chooses among texts
# Windows up to this are run past as they are; longer ones are made SHORT for the comparison.
LONG, SHORT = 128, 8
# Tokens at the last positions.
TAIL = 6


@dataclass(frozen=True)
class View:
    """One call of a model: its tensors, its other arguments, and what it is in words."""

    name: str
    inputs: dict[str, torch.Tensor]
    options: Mapping[str, bool] = field(default_factory=dict[str, bool])

    def __str__(self) -> str:
        named = [name for name in self.inputs if name in SHOWN] or list(self.inputs)
        shapes = {name: list(self.inputs[name].shape) for name in named}
        text = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        return f"{text} {self.name}".strip()


# The inputs that are named where a sample is described; the others go with them.
SHOWN = ("input_ids", "decoder_input_ids", "pixel_values", "input_features", "input_values")


def shorten(config: Any) -> list[str]:
    """Shorten the windows in a config, so that a short text exceeds them; returns the names of the changed fields."""
    changed = []
    for part in (config, getattr(config, "text_config", None)):
        if part is None:
            continue
        for name in _windows(part):
            if getattr(part, name) > LONG:
                setattr(part, name, SHORT)
                changed.append(name)
        rope = getattr(part, "rope_parameters", None)
        for values in _ropes(rope):
            if (values.get("original_max_position_embeddings") or 0) > LONG:
                values["original_max_position_embeddings"] = LENGTH // 2
                changed.append("original_max_position_embeddings")
    return changed


def _windows(config: Any) -> Iterator[str]:
    """The fields that say how far back a token sees."""
    for name in ("sliding_window", "local_attention", "attention_chunk_size", "window_size"):
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and hasattr(config, "vocab_size"):
            yield name


def _ropes(rope: Any) -> list[dict[str, float]]:
    """The settings of rotary positions: one dict, or one for each type of layer."""
    if not isinstance(rope, dict):
        return []
    inner = [value for value in rope.values() if isinstance(value, dict)]
    return inner or [rope]


def views(model: PreTrainedModel, seed: int = 0) -> list[View]:
    """Random inputs for a model, drawn from its own sizes."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    vision, text = getattr(config, "vision_config", config), getattr(config, "text_config", config)
    if model.main_input_name == "pixel_values" and not hasattr(vision, "num_frames"):
        return _pictures(model, vision, generator)
    if model.main_input_name != "input_ids" or "input_ids" not in inspect.signature(model.forward).parameters:
        return _found(model, seed, generator)
    texts = _texts(model, text, generator)
    if vision is config:
        return [View("", texts), *_last_positions(model, text, generator)]
    pixels = _pixels(vision, _sides(vision), generator)
    return [View("", {**_with_places(model, texts, pixels), **pixels})]


def taken(model: PreTrainedModel, run: Callable[[View], T], seed: int = 0) -> tuple[list[View], T]:
    """Return views that the model takes, and what `run` makes of the first.

    Where the model does not take what `views` draws, it is tried with inputs of every kind that its forward names.
    """
    try:
        drawn = views(model, seed)
        return drawn, run(drawn[0])
    except Exception as error:
        try:
            found = _found(model, seed, torch.Generator().manual_seed(seed))
            return found, run(found[0])
        except Exception:
            raise error from None


def _found(model: PreTrainedModel, seed: int, generator: torch.Generator) -> list[View]:
    """Sounds, videos, series, as the model is found to take them: with padding if it has a mask for it, and shorter."""
    doing = f"run the model on any {model.main_input_name} that lemonx can draw"
    with in_one_line(doing, "expand with --no-verify, and compare outputs yourself", CannotVerify):
        batch, _ = find_inputs(model, seed)
    if "decoder_input_ids" in batch:
        batch |= _begun(model, generator, len(batch["decoder_input_ids"]))
    read = batch.get(model.main_input_name, next(iter(batch.values())))
    masks = {name: mask for name, mask in batch.items() if name.endswith("mask") and not mask.is_floating_point()}
    marked = (mask.shape[1] for mask in masks.values() if mask.ndim == 2)
    length = next((n for n in marked if n in read.shape[1:]), max(read.shape[1:], default=1))
    shorter = {name: _cut(value, length, length * 5 // 8) for name, value in batch.items()}
    for inputs, end in ((batch, length), (shorter, length * 5 // 8)):
        for name in masks:
            if inputs[name].shape[1:] == (end,):
                inputs[name] = inputs[name].clone()
                inputs[name][1, end - end // 4 :] = 0
                inputs[name][2, end - end // 2 :] = 0
    return [View("", batch), View("of another length", shorter)]


def _cut(value: torch.Tensor, length: int, to: int) -> torch.Tensor:
    """The beginning of an input along the axis that is this long, if it has one."""
    axis = next((axis for axis in range(1, value.ndim) if value.shape[axis] == length), None)
    return value if axis is None else value.narrow(axis, 0, to)


def _with_places(
    model: PreTrainedModel, texts: dict[str, torch.Tensor], pixels: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Texts with as many tokens in front that stand for a picture as the model makes vectors of one, if it has such."""
    named = (getattr(model.config, name, None) for name in ("image_token_id", "image_token_index"))
    token = next((token for token in named if isinstance(token, int)), None)
    features: Any = getattr(model, "get_image_features", None)
    if token is None or features is None:
        return texts
    with torch.no_grad():
        found = features(**{name: value.to(model.dtype) for name, value in pixels.items()})
    found = getattr(found, "pooler_output", found)
    vectors = [found] if isinstance(found, torch.Tensor) else found
    each = sum(vector.numel() // vector.shape[-1] for vector in vectors) // SAMPLE
    ids, mask = texts["input_ids"], texts["attention_mask"]
    ids = torch.where(ids == token, 0 if token else 1, ids)
    places = torch.full((len(ids), each), token, dtype=ids.dtype)
    return {"input_ids": torch.cat([places, ids], 1), "attention_mask": torch.cat([torch.ones_like(places), mask], 1)}


def _pictures(model: PreTrainedModel, config: Any, generator: torch.Generator) -> list[View]:
    """Images of the model's own size, and of another size that is a multiple of nothing."""
    rows = max(1, min(SAMPLE, PICTURES // (config.num_channels * math.prod(_sides(config)))))
    found = [View("", _pixels(config, _sides(config), generator, rows) | _masked(model, config, generator, rows))]
    if "bool_masked_pos" in found[0].inputs:
        return found  # they go with one size
    patch = getattr(config, "patch_size", 1)
    patch = max(patch) if isinstance(patch, list | tuple) else patch
    sides = tuple(side + 3 * patch for side in _sides(config))
    takes = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    options = {"interpolate_pos_encoding": True} if takes else {}
    return [*found, View("of another size", _pixels(config, sides, generator, rows), options)]


def _sides(config: Any, name: str = "image_size") -> tuple[int, int]:
    """A height and a width, which a config may give as one number."""
    size = getattr(config, name, None) or 64
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if height * width > MOST_PIXELS:
        raise CannotVerify(
            f"says pictures of {height} x {width}, too large to compare outputs on",
            f"check {name}, or leave the verification out",
            file=CONFIG,
        )
    return height, width


def _masked(model: PreTrainedModel, config: Any, generator: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    """The patches that a model of masked images must fill in; none where their pixels would make up no image."""
    masks = any(name.endswith("mask_token") for name, _ in model.named_parameters())
    if not masks or not type(model).__name__.endswith("ForMaskedImageModeling"):
        return {}
    image, patch = _sides(config), _sides(config, "patch_size")
    high, wide = (side // length for side, length in zip(image, patch, strict=True))
    stride, merged = getattr(config, "encoder_stride", None), len(getattr(config, "depths", [0])) - 1
    if stride and any((n >> merged) * stride != side for n, side in zip((high, wide), image, strict=True)):
        return {}
    return {"bool_masked_pos": torch.rand(rows, high * wide, generator=generator) < 0.5}


def _pixels(
    config: Any, sides: tuple[int, ...], generator: torch.Generator, rows: int = SAMPLE
) -> dict[str, torch.Tensor]:
    shape = (rows, config.num_channels, *sides)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


def _texts(model: PreTrainedModel, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    shape = (SAMPLE, _length(config))
    ids = torch.randint(0, config.vocab_size, shape, generator=generator)
    mask = torch.ones_like(ids)
    quarter = shape[1] // 4
    if quarter:
        mask[1, -quarter:] = 0
        mask[2, :quarter] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if config.is_encoder_decoder and type(model).__name__.endswith("ForSequenceClassification"):
        # They repeat the text to their decoder, and read the end of it: one end each.
        ids[mask == 0] = config.pad_token_id
        ends = _listed(config.eos_token_id)
        ids[torch.isin(ids, torch.tensor(ends))] = next(t for t in range(config.vocab_size) if t not in ends)
        ids[:, shape[1] // 2] = ends[0]
        return batch
    special = sorted(_special_tokens(config))[: shape[1] // 2]
    ids[3, : len(special)] = torch.tensor(special, dtype=ids.dtype)
    ids[mask == 0] = config.pad_token_id
    types = getattr(config, "type_vocab_size", 0) or 0
    if types > 1 and "token_type_ids" in inspect.signature(model.forward).parameters:
        batch["token_type_ids"] = torch.randint(0, types, shape, generator=generator)
    if type(model).__name__.endswith("ForMultipleChoice"):
        return {name: value.unflatten(0, (-1, CHOICES)) for name, value in batch.items()}
    return batch | _begun(model, generator)


def _length(config: Any) -> int:
    """Longer than the windows and than the texts that rotary positions were first made for, if there is room."""
    original = [values.get("original_max_position_embeddings") or 0 for values in _ropes(_rope(config))]
    past = max([2 * getattr(config, name) for name in _windows(config)] + [length + TAIL for length in original] + [0])
    longest = (
        getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None) or LENGTH
    )
    # Special tokens count in the positions of some families (RoBERTa's begin behind the padding's).
    length = max(1, min(max(LENGTH, past), longest if longest < LENGTH else longest - 2))
    # No width of anything, so that an output with this many entries is one for every token.
    widths = {value for name, value in config.to_dict().items() if isinstance(value, int) and "position" not in name}
    widths.add(getattr(config, "num_labels", 0))
    return next((n for n in range(length, length // 2, -1) if n not in widths), length)


def _rope(config: Any) -> Any:
    return getattr(config, "rope_parameters", None)


def _special_tokens(config: Any) -> set[int]:
    """The ids of the tokens that a config names and that are not the end of a text."""
    names = {name for name in (*dir(type(config)), *vars(config)) if name.endswith("_token_id")}
    # A field may list several: a text can end in more than one way.
    named = [t for name in names for t in _listed(getattr(config, name))]
    return {t for t in named if isinstance(t, int) and not isinstance(t, bool) and 0 <= t < config.vocab_size}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _last_positions(model: PreTrainedModel, config: Any, generator: torch.Generator) -> list[View]:
    """A short text at the end of the table of positions."""
    longest = getattr(config, "max_position_embeddings", None)
    takes = "position_ids" in inspect.signature(model.forward).parameters
    if not takes or not isinstance(longest, int) or longest < TAIL or type(model).__name__.endswith("MultipleChoice"):
        return []
    ids = torch.randint(0, config.vocab_size, (2, TAIL), generator=generator)
    where = torch.arange(longest - TAIL, longest).expand(2, -1)
    return [View("at the last positions", {"input_ids": ids, "position_ids": where})]


def _begun(model: PreTrainedModel, generator: torch.Generator, rows: int = SAMPLE) -> dict[str, torch.Tensor]:
    """The text that an encoder-decoder has begun to write; none for models that do not take one."""
    config: Any = model.config
    if not config.is_encoder_decoder or "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        return {}
    # Another length than the encoder's, so that its mask cannot be taken for the decoder's.
    longest = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    length = min(LENGTH, longest or LENGTH) // 2
    vocabulary = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    return {"decoder_input_ids": torch.randint(0, vocabulary, (rows, length), generator=generator)}
