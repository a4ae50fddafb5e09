"""Do two checkpoints compute the same? Measured here by inputs and a comparison of their own, apart from lemonx's.

Texts run past every window, are padded left and right, have all types of tokens and special tokens, and go on from a
cache; pictures come in three sizes, sounds with a text begun. Both models are loaded by transformers, in float64.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lemonx.verification.float64 import Float64

LENGTH = 33
Outputs = dict[str, Tensor]
View = Callable[[Any], Outputs]
# Streams that a model gives out: a wider model's may hold the same in another basis.
STREAMS = (
    "last_hidden_state",
    "encoder_last_hidden_state",
    "pooler_output",
    "feature_maps",
    "text_embeds",
    "image_embeds",
)


def load(model_class: Any, folder: Path) -> Any:
    """The model as any user loads it; no tensor may be missing or left over."""
    # Outputs by name, whatever config.json says: several models do not run otherwise.
    options = {"dtype": torch.float64, "output_loading_info": True, "return_dict": True}
    model, info = model_class.from_pretrained(folder, **options)
    assert not any(info.values()), f"keys that do not fit: {info}"
    return model.eval()


def views(model: Any, seed: int, rows: int = 3) -> dict[str, View]:
    """Ways to call a model, by name; what a model does not take is found out by calling the source.

    `rows`: the number of pictures or sounds, and half of that of texts.
    """
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config = model.config
    if hasattr(config, "text_config") and hasattr(config, "vision_config"):
        pixels = dict(_pictures(model, config.vision_config, rows, generator))
        texts = _texts(model, config.text_config, 2 * rows, generator) if model.main_input_name == "input_ids" else {}
        return {name: _call({**texts, **batch}, **options) for name, (batch, options) in pixels.items()}
    if model.main_input_name == "pixel_values":
        return {name: _call(batch, **options) for name, (batch, options) in _pictures(model, config, rows, generator)}
    if model.main_input_name == "input_features":
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        sound = {"input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}
        begun = _begun(model, config, rows, generator)
        return {"sounds": _call(sound | begun), **({"sounds, cached": _cached(sound | begun)} if begun else {})}
    texts = _texts(model, config, 2 * rows, generator)
    one = {name: value[:1, : r.randint(5, 20)] for name, value in texts.items() if name == "input_ids"}
    found = {"texts": _call(texts)}
    if not type(model).__name__.endswith("ForMultipleChoice"):
        found |= {"a text without a mask": _call(one | _begun(model, config, 1, generator)), "cached": _cached(texts)}
        if "position_ids" in inspect.signature(model.forward).parameters:
            last = _longest(config) or LENGTH
            where = torch.arange(last - 4, last)[None]
            found["last positions"] = _call({"input_ids": texts["input_ids"][:1, :4], "position_ids": where})
    return found


def _longest(config: Any) -> int | None:
    """The last position that the model has, if the config says."""
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    return next((longest for name in names if (longest := getattr(config, name, None))), None)


def _texts(model: Any, config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    # RoBERTa's positions begin behind its padding token.
    length = min(LENGTH, (_longest(config) or 64) - 7)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    special = [t for name in ("bos_token_id", "pad_token_id", "eos_token_id") for t in _ids(config, name)]
    ids[0, : len(special)] = torch.tensor(special, dtype=ids.dtype)
    padding = (_ids(config, "pad_token_id") or [0])[0]
    mask = torch.ones_like(ids)
    mask[1, length - 9 :], mask[2, :7], mask[3, 3:] = 0, 0, 0
    if config.pad_token_id is None and type(model).__name__.endswith("ForSequenceClassification"):
        ids, mask = ids[:1], mask[:1]  # it takes no second text
    batch = {"input_ids": ids.where(mask.bool(), torch.tensor(padding)), "attention_mask": mask}
    types = getattr(config, "type_vocab_size", 0) or 0
    if types and "token_type_ids" in inspect.signature(model.forward).parameters:
        batch["token_type_ids"] = torch.randint(0, types, ids.shape, generator=generator)
    if config.is_encoder_decoder and type(model).__name__.endswith("ForSequenceClassification"):
        ids = batch["input_ids"]
        for end in _ids(config, "eos_token_id"):  # they read the last end, of which all texts must have as many
            ids[ids == end] = (end + 1) % config.vocab_size
            ids[:, 2] = end
    if type(model).__name__.endswith("ForMultipleChoice"):
        return {name: value.unflatten(0, (-1, 2)) for name, value in batch.items()}
    return batch | _begun(model, config, len(ids), generator)


def _ids(config: Any, name: str) -> list[int]:
    found = getattr(config, name, None)
    return [t for t in (found if isinstance(found, list) else [found]) if isinstance(t, int)]


def _begun(model: Any, config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The text that an encoder-decoder has begun to write."""
    taken = inspect.signature(model.forward).parameters
    repeats = type(model).__name__.endswith("ForSequenceClassification")
    if not config.is_encoder_decoder or "decoder_input_ids" not in taken or repeats:
        return {}
    tokens = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    length = min(19, (_longest(config) or 64) - 3)
    return {"decoder_input_ids": torch.randint(0, tokens, (rows, length), generator=generator)}


def _pictures(
    model: Any, config: Any, rows: int, generator: torch.Generator
) -> Iterator[tuple[str, tuple[dict[str, Tensor], dict[str, Any]]]]:
    """Pictures of the config's size, and of two others."""
    size, patch = getattr(config, "image_size", 24), getattr(config, "patch_size", 2)
    (high, wide), (down, right) = (s if isinstance(s, list | tuple) else (s, s) for s in (size, patch))
    taken = inspect.signature(model.forward).parameters
    more = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in taken else {}
    for name, sides, options in (
        ("pictures", (high, wide), {}),
        ("larger pictures", (high + 3 * down, wide + 5 * right + 1), more),
        ("smaller pictures", (max(2 * down, high - down), max(2 * right, wide - 1)), more),
    ):
        pixels = torch.randn((rows, config.num_channels, *sides), generator=generator, dtype=torch.float64)
        batch = {"pixel_values": pixels}
        if "bool_masked_pos" in taken and type(model).__name__.endswith("ForMaskedImageModeling"):
            patches = (sides[0] // down) * (sides[1] // right)
            batch["bool_masked_pos"] = torch.rand((rows, patches), generator=generator) < 0.5
        yield name, (batch, options)


def _call(batch: dict[str, Tensor], **options: Any) -> View:
    return lambda model: _outputs(model, batch, **options)


def _cached(batch: dict[str, Tensor]) -> View:
    """The first half of the texts, then the rest with what is remembered of it."""
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"

    def view(model: Any) -> Outputs:
        # Padding on the right is not for who goes on writing.
        several = name == "input_ids" and len(batch[name]) > 4
        rows = [0, 2, 4] if several else slice(None)
        whole = {n: value[rows] for n, value in batch.items()}
        half = whole[name].shape[1] // 2
        cut = {n: value[:, :half] if value.shape == whole[name].shape else value for n, value in whole.items()}
        first = model(**cut, use_cache=True, return_dict=True)
        memory = {n: first[n] for n in ("past_key_values", "cache_params") if first.get(n) is not None}
        assert memory, "it remembers nothing"
        rest = {n: value for n, value in whole.items() if n != "token_type_ids"} | {name: whole[name][:, half:]}
        if "token_type_ids" in whole:
            rest["token_type_ids"] = whole["token_type_ids"][:, half:]
        return _outputs(model, rest, use_cache=True, **memory)

    return view


def _outputs(model: Any, batch: dict[str, Tensor], **options: Any) -> Outputs:
    """Every floating-point output by name; without what stands at padding, of which nobody takes notice."""
    plain = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
    if "output_router_logits" in inspect.signature(model.forward).parameters:
        plain["output_router_logits"] = False
    taken = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    plain = {name: given for name, given in plain.items() if anything or name in taken}
    result = model(**batch, **plain, **options)
    found = {name: value for name, value in result.items() if isinstance(value, Tensor)}
    found |= {f"feature_maps.{i}": value for i, value in enumerate(result.get("feature_maps") or ())}
    mask = batch.get("attention_mask")
    kept = {}
    for name, value in found.items():
        if value.is_floating_point() and value.ndim:
            shared = mask is not None and value.ndim > 1 and value.shape[: mask.ndim] == mask.shape
            kept[name] = value[mask.bool()] if shared else value  # pyright: ignore[reportOptionalMemberAccess]
    return kept


# ----------------------------------------------------------------- the comparison


@torch.no_grad()
def run(model: Any, ways: dict[str, View]) -> dict[str, Outputs | Exception]:
    """What a model makes of every view; an exception where it does not take one.

    A copy of it runs: a Swin that has seen a small picture keeps the window that it chose for that.
    """
    model = copy.deepcopy(model)
    found: dict[str, Outputs | Exception] = {}
    for name, view in ways.items():
        try:
            found[name] = view(model)
        except Exception as error:
            found[name] = error
    return found


class Bases:
    """The affine maps that take what a wider model gives out to what the source does, found from many inputs.

    They are tried on other inputs; a stream that is no map of the wide one has none that fits those.
    """

    ROWS = 64

    def __init__(self, source: Any, target: Any, seed: int) -> None:
        self.source, self.target, self.seed = source, target, seed

    @cached_property
    def _outputs(self) -> tuple[Outputs, Outputs]:
        view = next(iter(views(self.source, self.seed + 1, self.ROWS).values()))
        with torch.no_grad():
            return view(self.source), view(self.target)

    def relative(self, name: str, value: Tensor, wide: Tensor) -> float:
        """The difference of one output, brought to the source's basis."""
        narrow, given = self._outputs
        # The maps of a backbone have their channels in front of height and width; texts may come without padding, flat.
        axis = next(i for i in range(-1, -1 - value.ndim, -1) if value.shape[i] != wide.shape[i])
        fitted = torch.linalg.lstsq(
            _flat(given[name], axis, one=True), _flat(narrow[name], axis), rcond=1e-11, driver="gelsd"
        ).solution
        return _relative(_flat(value, axis), _flat(wide, axis, one=True) @ fitted)


def _flat(x: Tensor, axis: int, *, one: bool = False) -> Tensor:
    """A row for every vector along this axis, with a 1 behind it if so asked."""
    x = x.movedim(axis, -1).flatten(0, -2)
    return torch.cat([x, torch.ones_like(x[:, :1])], 1) if one else x


def difference(before: Outputs, after: Outputs, bases: Bases | None = None) -> tuple[float, str]:
    """The largest difference of any output relative to its largest entry, and which output it is."""
    assert before.keys() == after.keys(), f"other outputs: {sorted(before)} and {sorted(after)}"
    worst, where = 0.0, ""
    for name, value in before.items():
        found = _of_one(name, value, after[name], bases)
        if not found <= worst:
            worst, where = found, name
    return worst, where


def _of_one(name: str, value: Tensor, wide: Tensor, bases: Bases | None) -> float:
    first = wide[tuple(slice(size) for size in value.shape)] if wide.ndim == value.ndim else wide
    if first.shape != value.shape:
        return float("inf")
    found = _relative(value, first)
    if wide.shape != value.shape and not found < 1e-6:
        if name.endswith("_embeds"):  # of length one: the direction of the first entries
            found = min(found, _relative(value, first / first.norm(dim=-1, keepdim=True)))
        if name.startswith(STREAMS) and bases:
            found = min(found, bases.relative(name, value, wide))
    return found


def _relative(value: Tensor, other: Tensor) -> float:
    if not value.numel():
        return 0.0
    return float((value - other).abs().max() / (value.abs().max() or 1.0))


def noise(model: Any, ways: dict[str, View], before: dict[str, Outputs | Exception], dtype: str, seed: int) -> float:
    """By how much the source's outputs move when every weight is moved by up to one rounding of its dtype."""
    generator, half = torch.Generator().manual_seed(seed), torch.finfo(getattr(torch, dtype)).eps / 2
    with torch.no_grad():
        for weight in model.parameters():
            usual = weight.square().mean().sqrt()  # copies are as large as is usual, whatever they sum to
            weight += (2 * torch.rand(weight.shape, generator=generator) - 1) * half * (weight.abs() + usual)
    moved = run(model, ways)
    return max(
        difference(found, again)[0]
        for name, found in before.items()
        if isinstance(found, dict) and isinstance(again := moved[name], dict)
    )


def in_float64() -> Float64:
    return Float64()
