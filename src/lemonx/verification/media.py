"""Inputs for a model of any kind, told from what its forward takes: texts, pictures, videos, sounds, series.

There are several ways to hand over a picture or a sound, and a model takes one of them. `Media` lists the ways, and
`find_inputs` finds one that the model takes by running it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from lemonx.verification.float64 import Float64

Batch = dict[str, torch.Tensor]
# Sizes of pictures and the number of tokens where a config names none.
IMAGE, PATCH, VOCABULARY = 64, 16, 97
# Odd numbers, so that no axis of a batch is taken for one of the model's; texts run past every window.
ROWS, LENGTH, DECODED = 3, 23, 7
# Longer sounds are tried last: attention over them would fill the memory.
_LONG = 4096
# What stands for a picture, a video, a sound in the types of tokens.
KINDS = {"image": 1, "video": 2, "audio": 3}


def parts(config: Any) -> Iterator[Any]:
    """A config and all configs in it, the outer ones first."""
    from transformers import PreTrainedConfig

    yield config
    inner = [v for v in vars(config).values() if isinstance(v, PreTrainedConfig)]
    for part in inner:
        yield from parts(part)


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that some part of a config has a value for."""
    for name in names:
        for part in parts(config):
            value = getattr(part, name, None)
            if value is not None and not callable(value):
                return value
    return default


# The fields that say how many numbers a spectrum has.
_BINS = (
    *("num_mel_bins", "n_mel_bins", "feature_size", "input_feat_per_channel", "mel_dim"),
    *("feature_projection_input_dim", "input_dim", "model_in_dim", "input_feat_size"),
)


def _special(config: Any) -> set[int]:
    """The tokens that mean something to some part of a model."""
    named = [v for part in parts(config) for n, v in vars(part).items() if n.endswith(("token_id", "token_index"))]
    return {token for token in named if isinstance(token, int)}


PICTURES = ("pixel_values", "image_pixel_values", "flattened_patches", "images", "image")
# How many pictures of a video make one patch.
_TIMES = ("temporal_patch_size", "patch_temporal", "patch_size_t")


class Media:
    """Draws inputs for one model; the same numbers for the same seed, whatever the model's sizes."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.config, self.seed = model, model.config, seed
        self.taken = inspect.signature(model.forward).parameters
        side = setting(self.vision, "image_size", "img_size", default=IMAGE)
        side = list(side.values()) if isinstance(side, dict) else side
        self.high, self.wide = tuple(side)[:2] if isinstance(side, list | tuple) else (side, side)
        patch = setting(self.vision, "patch_size", default=PATCH)
        self.patch = max(patch) if isinstance(patch, list | tuple) else patch
        channels = setting(self.vision, "num_channels", "in_channels", "in_chans", "input_channels", default=3)
        self.channels = channels if isinstance(channels, int) else 3

    @property
    def vision(self) -> Any:
        """The part of the config that pictures are for."""
        names = ("vision_config", "image_config", "backbone_config", "encoder_config", "vision_encoder_config")
        found = (getattr(part, name, None) for part in parts(self.config) for name in names)
        return next((part for part in found if part is not None and not isinstance(part, dict)), self.config)

    def normal(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(low, max(low + 1, high), shape, generator=generator)

    # ----------------------------------------------------------------- texts

    def only(self, made: Batch) -> Batch:
        """The inputs that the model takes."""
        return {name: value for name, value in made.items() if name in self.taken}

    def texts(self, places: dict[str, int]) -> Batch:
        """Texts, with so many tokens in each that stand for a picture, a video, a sound."""
        if "input_ids" not in self.taken:
            return {}
        plain = self._ids(LENGTH)
        tokens = {kind: token for kind in places if (token := self.placeholder(kind)) is not None}
        runs = [torch.full((ROWS, n), tokens[kind]) for kind, n in places.items() if kind in tokens]
        around = [self._mark("vision_start_token_id"), self._mark("vision_end_token_id")]
        marked = [torch.cat([around[0], run, around[1]], 1) for run in runs]
        ids = torch.cat([plain[:, :2], *marked, plain[:, 2:]], 1)
        batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        types = setting(self.config, "type_vocab_size", default=0)
        if isinstance(types, int) and types > 1:
            batch["token_type_ids"] = self.whole(0, types, *ids.shape)
        if places:
            kinds = torch.zeros_like(ids)
            for kind, token in tokens.items():
                kinds[ids == token] = KINDS[kind]
            batch["mm_token_type_ids"] = kinds
            # Pictures and texts may have experts of their own.
            batch["moe_mm_token_type_ids"] = (kinds > 0).long()
            if "mm_token_type_ids" not in self.taken:
                batch["token_type_ids"] = (kinds > 0).long()
        return self.only(batch | self._beside(ids))

    def _beside(self, ids: torch.Tensor) -> Batch:
        """The inputs that go with a text: other properties of its tokens, texts for other parts of the model."""
        batch: Batch = {}
        for name in self.taken:
            if name.endswith("_input_ids") and name != "decoder_input_ids":  # for another part of the model
                batch[name] = self._ids(DECODED)
                mask = torch.ones_like(batch[name])
                batch |= {name.replace("input_ids", "attention_mask"): mask, f"{name}_mask": mask}
            elif name.startswith("input_") and name.endswith("_ids") and name != "input_ids":  # how a token sounds
                batch[name] = self.whole(1, VOCABULARY // 2, *ids.shape)
        corners = self.whole(0, 20, *ids.shape, 2)
        batch["bbox"] = torch.cat([corners, corners + 5], -1)
        # The first token sees all, beyond its window.
        batch["global_attention_mask"] = torch.zeros_like(ids).index_fill(1, torch.tensor(0), 1)
        many = (ROWS, 3)  # entities, which three parts of the text name
        batch["entity_ids"] = self.whole(1, setting(self.config, "entity_vocab_size", default=9), *many)
        batch["entity_position_ids"] = self.whole(0, LENGTH, *many, 4)
        batch["entity_attention_mask"] = batch["entity_token_type_ids"] = torch.ones(many, dtype=torch.long)
        if (width := setting(self.config, "cross_attention_hidden_size")) is not None:
            batch["encoder_hidden_states"] = self.normal(ROWS, 5, width)
        return batch

    def streams(self) -> list[Batch]:
        """Ways to hand over a text: by itself, or as several streams of codes, which stand one below the other."""
        streams = setting(self.config, "num_codebooks", default=1)
        codes: Batch = {"input_ids": self._ids(LENGTH).repeat(streams, 1)}
        return [{}, codes] if isinstance(streams, int) and streams > 1 else [{}]

    def placeholder(self, kind: str) -> int | None:
        """The token that stands for a picture, a video or a sound."""
        token = setting(self.config, f"{kind}_token_id", f"{kind}_token_index")
        return token if isinstance(token, int) else None

    def _mark(self, name: str) -> torch.Tensor:
        token = setting(self.config, name)
        return torch.full((ROWS, 1 if isinstance(token, int) else 0), token if isinstance(token, int) else 0)

    def _ids(self, length: int) -> torch.Tensor:
        """Tokens without special ones, which stand at the ends of the vocabulary."""
        size = setting(self.config, "vocab_size", "text_vocab_size", "src_vocab_size", default=VOCABULARY)
        size = min(size) if isinstance(size, list | tuple) else size
        longest = setting(self.config, "max_position_embeddings", "n_positions", default=length + 2)
        length = min(length, max(2, longest - 2)) if isinstance(longest, int) else length
        ids = self.whole(min(5, size - 1), min(size, VOCABULARY * 3 // 5), ROWS, length)
        special = _special(self.config)
        plain = next((token for token in range(5, size) if token not in special), 0)
        return torch.where(torch.isin(ids, torch.tensor(sorted(special))), plain, ids)

    def decoded(self) -> Batch:
        """The text that an encoder-decoder has written so far."""
        return self.only({"decoder_input_ids": self._ids(DECODED)})

    # ----------------------------------------------------------------- pictures, videos, sounds, series

    def ways(self) -> dict[str, list[Batch]]:
        """Ways to hand over every kind of input that the model names."""
        kinds = {"image": self.pictures(), "video": self.videos(), "audio": self.sounds(), "series": self.series()}
        if "input_ids" in self.taken:
            kinds["text"] = self.streams()
        elif not any(kinds.values()):
            kinds["text"] = self.anything()
        return {kind: [self.only(way) for way in ways] for kind, ways in kinds.items()}

    def pictures(self) -> list[Batch]:
        """Ways to hand over pictures."""
        names = [n for n in PICTURES if n in self.taken]
        names += ["hidden_states"] if "grid_thw" in self.taken and not names else []
        if not names:
            return []
        name, high, wide = names[0], self.high // self.patch, self.wide // self.patch
        whole, square = (self.channels, self.high, self.wide), (self.channels, self.patch, self.patch)
        flat, patches = self.channels * self.patch**2, ROWS * high * wide
        times, tiles = setting(self.vision, *_TIMES, default=1), setting(self.config, "max_num_tiles", default=1)
        extras, grids = self._picture_extras, self._grids(1, high, wide)
        ways: list[Batch] = []
        if {"image_grid_thw", "grid_thw", "image_grid_hws", "image_grid_hw", "grid_hws"} & set(self.taken):
            shapes = ((patches, times * flat), (1, patches, *square), (patches, *square), (patches, flat))
            ways += [{name: self.normal(*shape)} | grids for shape in shapes]
        return [
            *ways,
            {name: self.normal(ROWS, *whole)} | extras(),
            {name: self.normal(ROWS, *whole)},
            *({name: self.normal(ROWS, many, *whole)} | extras(many) for many in (1, 2, 3, self._frames())),
            {name: self.normal(ROWS, 1, tiles, *whole)} | extras(1),
            {name: self.normal(ROWS, high * wide, flat)} | self._patch_extras(high, wide),
            {name: self.normal(ROWS, high * wide, 2 + flat).abs()},
            {name: self.normal(patches, *square)} | extras(),
        ]

    def _frames(self) -> int:
        frames = setting(self.config, "num_frames", "frames_per_clip", default=4)
        return frames if isinstance(frames, int) else 4

    def _picture_extras(self, many: int = 0) -> Batch:
        """The inputs that go with pictures of one size, `many` pictures for each text (0: one, without an axis)."""
        each, number = (ROWS, many) if many else (ROWS,), max(1, many)
        high, wide, tiles = self.high, self.wide, setting(self.config, "max_num_tiles", default=1)
        sizes = torch.tensor([[high, wide]] * ROWS)
        made = {
            "pixel_mask": torch.ones(*each, high, wide, dtype=torch.long),
            "pixel_attention_mask": torch.ones(*each, high, wide, dtype=torch.bool),
            "image_sizes": sizes,
            "target_sizes": sizes,
            "images_spatial_crop": torch.ones(ROWS, 2, dtype=torch.long),
            "aspect_ratio_ids": torch.ones(each, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(*each, tiles, dtype=torch.long),
            "cross_attention_mask": torch.ones(ROWS, LENGTH, number, tiles, dtype=torch.long),
            "image_attention_mask": torch.ones(ROWS, LENGTH, number, dtype=torch.long),
            "batch_num_images": torch.full((ROWS,), number),
            "num_patches": torch.full((ROWS,), number),
        }
        if "high_res_pixel_values" in self.taken:  # for a second tower, which takes the pictures larger
            side = setting(getattr(self.config, "high_res_vision_config", self.vision), "image_size", default=IMAGE)
            made["high_res_pixel_values"] = self.normal(ROWS, self.channels, side, side)
        return made

    def _patch_extras(self, high: int, wide: int) -> Batch:
        """The inputs that go with pictures that are cut into patches."""
        rows, columns = torch.arange(high).repeat_interleave(wide), torch.arange(wide).repeat(high)
        where = torch.stack([columns, rows], -1).expand(ROWS, -1, -1)
        mask = torch.ones(ROWS, high * wide, dtype=torch.long)
        made = {
            "spatial_shapes": torch.tensor([[high, wide]] * ROWS),
            "pixel_attention_mask": mask,
            "pixel_position_ids": where,
            "image_position_ids": where,
        }
        return made if "input_ids" in self.taken else made | {"attention_mask": mask}

    def _grids(self, times: int, high: int, wide: int, prefix: str = "image_") -> Batch:
        """The numbers of patches along time, height and width, under every name that models have for them."""
        solid, flat = torch.tensor([[times, high, wide]] * ROWS), torch.tensor([[high, wide]] * ROWS)
        merged = torch.full((ROWS,), setting(self.vision, "spatial_merge_size", default=2))
        return {
            **dict.fromkeys((f"{prefix}grid_thw", "grid_thw"), solid),
            **dict.fromkeys((f"{prefix}merge_sizes", "merge_sizes"), merged),
            **dict.fromkeys((f"{prefix}grid_hws", f"{prefix}grid_hw", "grid_hws"), flat),
        }

    def videos(self) -> list[Batch]:
        """Ways to hand over videos, where the model takes them apart from pictures."""
        name = next((n for n in ("pixel_values_videos", "pixel_values_video") if n in self.taken), None)
        if name is None:
            return []
        high, wide, frames = self.high // self.patch, self.wide // self.patch, self._frames()
        times = setting(self.vision, *_TIMES, default=1)
        flat = self.channels * self.patch**2
        ways = [{name: self.normal(ROWS, frames, self.channels, self.high, self.wide)}]
        if {"video_grid_thw", "grid_thw"} & set(self.taken):
            # Of one step in time: some models have a text before each.
            patches = ROWS * high * wide
            ways.insert(0, {name: self.normal(patches, times * flat)} | self._grids(1, high, wide, "video_"))
        return ways

    def sounds(self) -> list[Batch]:
        """Ways to hand over sounds: waves, or spectra with time first or last."""
        config = self.config
        bins = setting(config, *_BINS, default=16)
        long = 2 * setting(config, "max_source_positions", default=32)
        found: list[Batch] = []
        for name in ("input_features", "audio_input_features", "input_audio_embeds", "spectrogram", "audio_values"):
            if name in self.taken:
                # Some models take one length only; none of these takes one that is very long.
                times = sorted(dict.fromkeys((long, 64, 100, 204)), key=lambda time: (time > _LONG, time != long))
                for time in times:
                    found.append({name: self.normal(ROWS, bins, time)} | self._sound_masks(time))
                    found.append({name: self.normal(ROWS, time, bins)} | self._sound_masks(time))
                found.append({name: self.normal(ROWS, 1, 64, bins)} | self._sound_masks(64))
        name = next((n for n in ("input_values", "audio", "waveform") if n in self.taken), None)
        if name is not None:
            lengths = (4000, setting(config, "sampling_rate", default=16000))
            channels = setting(config, "audio_channels", default=1)
            for time in lengths:
                found.append({name: self.normal(ROWS, time)} | self._sound_masks(time))
                found.append({name: self.normal(ROWS, channels, time)} | self._sound_masks(time))
            for time in dict.fromkeys((setting(config, "max_length", default=64), 64)):
                if isinstance(time, int):
                    found.append({name: self.normal(ROWS, time, bins)})
        return found + [{n: v for n, v in way.items() if not n.endswith("mask")} for way in found]

    def _sound_masks(self, time: int) -> Batch:
        names = ("feature_attention_mask", "input_features_mask", "audio_attention_mask", "padding_mask")
        names += () if "input_ids" in self.taken else ("attention_mask",)
        masks: Batch = dict.fromkeys(names, torch.ones(ROWS, time, dtype=torch.long))
        return masks | {"feature_lens": torch.full((ROWS,), time), "is_longer": torch.zeros(ROWS, 1, dtype=torch.bool)}

    def series(self) -> list[Batch]:
        """Ways to hand over the past of a series."""
        if "past_values" not in self.taken:
            return []
        lags = setting(self.config, "lags_sequence", default=[0])
        time = setting(self.config, "context_length", default=32) + max(lags or [0])
        channels = setting(self.config, "num_input_channels", "input_size", default=1)
        features = setting(self.config, "num_time_features", default=0)
        batch: Batch = {"past_time_features": self.normal(ROWS, time, features)}
        if "future_time_features" in self.taken:
            ahead = setting(self.config, "prediction_length", default=0) or 0
            batch["future_time_features"] = self.normal(ROWS, ahead, features)
            batch["future_values"] = self.normal(ROWS, ahead)
        return [
            batch | {"past_values": self.normal(*shape), "past_observed_mask": torch.ones(shape, dtype=torch.float64)}
            for shape in ((ROWS, time, channels), (ROWS, time))
        ]

    def anything(self) -> list[Batch]:
        """The model's main input, or its first, as numbers of whatever shape it takes."""
        names = [getattr(self.model, "main_input_name", ""), *self.taken]
        name = next(n for n in names if n in self.taken)
        width = setting(self.config, "hidden_size", "d_model", default=48)
        shapes = [(ROWS, self.channels, self.high, self.wide), (ROWS, LENGTH, width), (ROWS, width, LENGTH)]
        found: list[Batch] = [{name: self.normal(*shape)} for shape in shapes]
        return [{name: self._ids(LENGTH)}, *found]


# ----------------------------------------------------------------- which of these a model takes

_FEATURES = re.compile(r"features:\D{0,12}(\d+)")


def outputs(model: Any, batch: Batch, *, grad: bool = False) -> Batch:
    """Every floating-point output; what the model draws at random is drawn from one seed."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad), Float64():
        torch.manual_seed(0)
        found = model(**batch, **asked(model))
        return {name: x for name, x in tensors(found) if x.is_floating_point()}


def asked(model: Any) -> dict[str, bool]:
    """Outputs by their names, and no cache, from a model that can be asked for that."""
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in (("return_dict", True), ("use_cache", False)) if name in taken}


def tensors(found: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a model gives out, each with its name."""
    if isinstance(found, torch.Tensor):
        yield name, found
    elif isinstance(found, dict | list | tuple):
        pairs = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in pairs:
            yield from tensors(value, f"{name}.{key}".lstrip("."))


def find_inputs(model: Any, seed: int = 0) -> tuple[Batch, dict[str, Exception]]:
    """Inputs that the model runs on, of every kind that it takes; and why it does not run on a kind that it names."""
    if type(model).forward is torch.nn.Module.forward:
        raise ValueError("its class has no forward of its own")
    media = Media(model, seed)
    works: dict[str, Batch] = {}
    failed: dict[str, Exception] = {}
    for kind, ways in media.ways().items():
        for way in ways:
            try:
                works[kind] = _completed(model, media, {kind: way})
                failed.pop(kind, None)
                break
            except Exception as error:
                failed.setdefault(kind, error)
    if not works:
        raise next(iter(failed.values()), ValueError("no input is known that it takes"))
    if len(works.keys() - {"text"}) > 1:
        try:
            ways = {kind: {n: v for n, v in batch.items() if n not in _TEXT} for kind, batch in works.items()}
            return _completed(model, media, ways), failed
        except Exception as error:
            failed["all at once"] = error
    return next(iter(works.values())), failed


_TEXT = ("input_ids", "attention_mask", "decoder_input_ids", "token_type_ids", "mm_token_type_ids", "bbox")


def _completed(model: Any, media: Media, ways: dict[str, Batch]) -> Batch:
    """Inputs with the text that goes with them, tried: an exception if the model does not run on them."""
    given = {name: value for way in ways.values() for name, value in way.items()}
    media_ways = {kind: way for kind, way in ways.items() if kind in KINDS and media.placeholder(kind) is not None}
    places = {kind: _features(model, kind, way) // ROWS for kind, way in media_ways.items()}
    begun = media.decoded()
    try:
        batch = {**media.texts({kind: n for kind, n in places.items() if n}), **begun, **given}
        _check(model, batch)
    except Exception as error:
        needed = _FEATURES.search(str(error))
        if len(places) != 1 or needed is None:
            raise
        batch = {**media.texts({kind: int(needed[1]) // ROWS for kind in places}), **begun, **given}
        _check(model, batch)
    return batch


def _check(model: Any, batch: Batch) -> None:
    found = outputs(model, batch).values()
    if not found:
        raise ValueError("no output is a tensor of numbers")
    if not all(bool(torch.isfinite(x[~torch.isinf(x)]).all()) for x in found if not x.is_meta):
        raise ValueError("an output is not a number")


def _features(model: Any, kind: str, way: Batch) -> int:
    """Count the vectors that the model makes of a picture or sound; 0 if it does not say."""
    get = getattr(model, f"get_{kind}_features", None) or getattr(
        getattr(model, "model", None), f"get_{kind}_features", None
    )
    if get is None:
        return 0
    taken = inspect.signature(get).parameters
    given = {name: value for name, value in way.items() if name in taken}
    try:
        with torch.no_grad(), Float64():
            found = get(**given)
    except Exception:
        return 0
    found = getattr(found, "pooler_output", found)
    return sum(x.numel() // x.shape[-1] for _, x in tensors(found))
