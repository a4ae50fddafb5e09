"""Inputs for a model of any kind, told from what its forward takes: texts, pictures, videos, sounds, series.

There are several ways to hand over a picture or a sound, and a model takes one of them. `Media` lists the ways; which
one a model takes is found out by running it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

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
        batch: Batch = {"input_ids": ids}
        if "attention_mask" in self.taken:
            batch["attention_mask"] = torch.ones_like(ids)
        types = setting(self.config, "type_vocab_size", default=0)
        if "token_type_ids" in self.taken and isinstance(types, int) and types > 1:
            batch["token_type_ids"] = self.whole(0, types, *ids.shape)
        if {"mm_token_type_ids", "token_type_ids"} & set(self.taken) and places:
            name = "mm_token_type_ids" if "mm_token_type_ids" in self.taken else "token_type_ids"
            kinds = torch.zeros_like(ids)
            for kind, token in tokens.items():
                kinds[ids == token] = KINDS[kind] if name.startswith("mm") else 1
            batch[name] = kinds
            if "moe_mm_token_type_ids" in self.taken:  # pictures and texts have experts of their own
                batch["moe_mm_token_type_ids"] = (kinds > 0).long()
        return batch | self._beside(ids)

    def _beside(self, ids: torch.Tensor) -> Batch:
        """What goes with a text: other properties of its tokens, texts for other parts of the model."""
        batch: Batch = {}
        for name in self.taken:
            if name.endswith("_input_ids") and name != "decoder_input_ids":  # for another part of the model
                batch[name] = self._ids(DECODED)
                masks = (name.replace("input_ids", "attention_mask"), f"{name}_mask")
                batch |= {mask: torch.ones_like(batch[name]) for mask in masks if mask in self.taken}
            elif name.startswith("input_") and name.endswith("_ids") and name != "input_ids":  # how a token sounds
                batch[name] = self.whole(1, VOCABULARY // 2, *ids.shape)
        if "bbox" in self.taken:
            batch["bbox"] = self.whole(0, 20, *ids.shape, 2).repeat(1, 1, 2)
            batch["bbox"][..., 2:] += 5
        if "global_attention_mask" in self.taken:  # the first token sees all, beyond its window
            batch["global_attention_mask"] = torch.zeros_like(ids)
            batch["global_attention_mask"][:, 0] = 1
        if "entity_ids" in self.taken:  # what three parts of the text name
            many = (ROWS, 3)
            batch["entity_ids"] = self.whole(1, setting(self.config, "entity_vocab_size", default=9), *many)
            batch["entity_position_ids"] = self.whole(0, LENGTH, *many, 4)
            for name in ("entity_attention_mask", "entity_token_type_ids"):
                batch[name] = torch.ones(many, dtype=torch.long)
        if "encoder_hidden_states" in self.taken and setting(self.config, "cross_attention_hidden_size") is not None:
            batch["encoder_hidden_states"] = self.normal(ROWS, 5, self.config.cross_attention_hidden_size)
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
        """What an encoder-decoder has written so far."""
        return {"decoder_input_ids": self._ids(DECODED)} if "decoder_input_ids" in self.taken else {}

    # ----------------------------------------------------------------- pictures, videos, sounds, series

    def pictures(self) -> list[Batch]:
        """Ways to hand over pictures."""
        names = [n for n in PICTURES if n in self.taken]
        names += ["hidden_states"] if "grid_thw" in self.taken and not names else []
        if not names:
            return []
        name, high, wide = names[0], self.high // self.patch, self.wide // self.patch
        flat = self.channels * self.patch**2
        times = setting(self.vision, *_TIMES, default=1)
        side = self._picture_extras
        frames, tiles = self._frames(), setting(self.config, "max_num_tiles", default=1)
        ways: list[Callable[[], Batch]] = [
            lambda: {name: self.normal(ROWS, self.channels, self.high, self.wide)} | side(),
            lambda: {name: self.normal(ROWS, self.channels, self.high, self.wide)},
            lambda: {name: self.normal(ROWS, 1, self.channels, self.high, self.wide)} | side(1),
            lambda: {name: self.normal(ROWS, 2, self.channels, self.high, self.wide)} | side(2),
            lambda: {name: self.normal(ROWS, 3, self.channels, self.high, self.wide)} | side(3),
            lambda: {name: self.normal(ROWS, frames, self.channels, self.high, self.wide)} | side(frames),
            lambda: {name: self.normal(ROWS, 1, tiles, self.channels, self.high, self.wide)} | side(1),
            lambda: {name: self.normal(ROWS, high * wide, flat)} | self._patch_extras(high, wide),
            lambda: {name: self.normal(ROWS, high * wide, 2 + flat).abs()},
            lambda: {name: self.normal(ROWS * high * wide, self.channels, self.patch, self.patch)} | side(),
        ]
        if {"image_grid_thw", "grid_thw", "image_grid_hws", "image_grid_hw", "grid_hws"} & set(self.taken):
            ways.insert(0, lambda: {name: self.normal(ROWS * high * wide, times * flat)} | self._grids(1, high, wide))
            square = (self.channels, self.patch, self.patch)
            for shape in ((ROWS * high * wide, flat), (ROWS * high * wide, *square), (1, ROWS * high * wide, *square)):
                ways.insert(1, partial(lambda shape: {name: self.normal(*shape)} | self._grids(1, high, wide), shape))
        return [way() for way in ways]

    def _frames(self) -> int:
        frames = setting(self.config, "num_frames", "frames_per_clip", default=4)
        return frames if isinstance(frames, int) else 4

    def _picture_extras(self, many: int = 0) -> Batch:
        """What goes with pictures of one size, `many` of them for each text (0: one, without an axis for it)."""
        each = (ROWS, many) if many else (ROWS,)
        high, wide = self.high, self.wide
        sizes = torch.tensor([[high, wide]] * ROWS)
        made = {
            "pixel_mask": torch.ones(*each, high, wide, dtype=torch.long),
            "pixel_attention_mask": torch.ones(*each, high, wide, dtype=torch.bool),
            "image_sizes": sizes,
            "target_sizes": sizes,
            "images_spatial_crop": torch.ones(ROWS, 2, dtype=torch.long),
            "aspect_ratio_ids": torch.ones(each, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(*each, setting(self.config, "max_num_tiles", default=1), dtype=torch.long),
            "cross_attention_mask": torch.ones(
                ROWS, LENGTH, max(1, many), setting(self.config, "max_num_tiles", default=1), dtype=torch.long
            ),
            "image_attention_mask": torch.ones(ROWS, LENGTH, max(1, many), dtype=torch.long),
            "batch_num_images": torch.full((ROWS,), max(1, many)),
            "num_patches": torch.full((ROWS,), max(1, many)),
        }
        if "high_res_pixel_values" in self.taken:
            made["high_res_pixel_values"] = self._finer()
        return {name: value for name, value in made.items() if name in self.taken}

    def _finer(self) -> torch.Tensor:
        """The same pictures for a second tower, which takes them larger."""
        side = setting(getattr(self.config, "high_res_vision_config", self.vision), "image_size", default=IMAGE)
        return self.normal(ROWS, self.channels, side, side)

    def _patch_extras(self, high: int, wide: int) -> Batch:
        """What goes with pictures that are cut into patches."""
        rows, columns = torch.arange(high).repeat_interleave(wide), torch.arange(wide).repeat(high)
        where = torch.stack([columns, rows], -1).expand(ROWS, -1, -1)
        made = {
            "spatial_shapes": torch.tensor([[high, wide]] * ROWS),
            "pixel_attention_mask": torch.ones(ROWS, high * wide, dtype=torch.long),
            "pixel_position_ids": where,
            "image_position_ids": where,
            "attention_mask": torch.ones(ROWS, high * wide, dtype=torch.long)
            if "input_ids" not in self.taken
            else None,
        }
        return {name: value for name, value in made.items() if name in self.taken and value is not None}

    def _grids(self, times: int, high: int, wide: int, prefix: str = "image_") -> Batch:
        names = (f"{prefix}grid_thw", "grid_thw")
        flat = [n for n in (f"{prefix}grid_hws", f"{prefix}grid_hw", "grid_hws") if n in self.taken]
        found = {name: torch.tensor([[times, high, wide]] * ROWS) for name in names if name in self.taken}
        merged = [n for n in (f"{prefix}merge_sizes", "merge_sizes") if n in self.taken]
        found |= {name: torch.full((ROWS,), setting(self.vision, "spatial_merge_size", default=2)) for name in merged}
        return found | {name: torch.tensor([[high, wide]] * ROWS) for name in flat}

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
        masks: Batch = {n: torch.ones(ROWS, time, dtype=torch.long) for n in names if n in self.taken}
        if "feature_lens" in self.taken:
            masks["feature_lens"] = torch.full((ROWS,), time)
        if "is_longer" in self.taken:
            masks["is_longer"] = torch.zeros(ROWS, 1, dtype=torch.bool)
        return masks

    def series(self) -> list[Batch]:
        """Ways to hand over the past of a series."""
        if "past_values" not in self.taken:
            return []
        lags = setting(self.config, "lags_sequence", default=[0])
        time = setting(self.config, "context_length", default=32) + max(lags or [0])
        channels = setting(self.config, "num_input_channels", "input_size", default=1)
        made = []
        for shape in ((ROWS, time, channels), (ROWS, time)):
            batch = {"past_values": self.normal(*shape), "past_observed_mask": torch.ones(shape, dtype=torch.float64)}
            features = setting(self.config, "num_time_features", default=0)
            ahead = setting(self.config, "prediction_length", default=0) or 0
            batch["past_time_features"] = self.normal(ROWS, time, features)
            if "future_time_features" in self.taken:
                batch["future_time_features"] = self.normal(ROWS, ahead, features)
                batch["future_values"] = self.normal(ROWS, ahead)
            made.append({name: value for name, value in batch.items() if name in self.taken})
        return made

    def anything(self) -> list[Batch]:
        """The model's main input, or its first, as numbers of whatever shape it takes."""
        names = [getattr(self.model, "main_input_name", ""), *self.taken]
        name = next(n for n in names if n in self.taken)
        width = setting(self.config, "hidden_size", "d_model", default=48)
        shapes = [(ROWS, self.channels, self.high, self.wide), (ROWS, LENGTH, width), (ROWS, width, LENGTH)]
        found: list[Batch] = [{name: self.normal(*shape)} for shape in shapes]
        return [{name: self._ids(LENGTH)}, *found]
