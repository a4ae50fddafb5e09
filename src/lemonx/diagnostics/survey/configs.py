"""Tiny configs of any model type: the defaults of its class with every size that is told from its name made small."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lemonx.diagnostics.survey.fields import (
    IMAGE,
    KEPT,
    LAYERS,
    VOCABULARY,
    Sizes,
    Stages,
    is_layer_indices,
    layer_count,
    tiny,
)
from lemonx.diagnostics.survey.overrides import DEFAULTS, DERIVED, OVERRIDES

# Where rotary positions have their settings.
_ROPES = ("rope_parameters", "rope_scaling")
# Set by the class itself, or at odds with the sizes of a tiny model.
_DROPPED = frozenset(
    (
        *("transformers_version", "torch_dtype", "dtype", "architectures", "out_features", "stage_names"),
        *("_out_features", "_out_indices", "_attn_implementation_internal", "use_cache"),
    )
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth")
# What a config may leave open, and its model then lacks.
_NEEDED = {"vocab_size": VOCABULARY, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
           "n_shared_experts": 1, "pad_token_id": 0}  # fmt: skip
_INNER = ("n_inner", "intermediate_size", "ffn_hidden_size", "moe_intermediate_size")
# Switches of faster code that computes the same, or needs another library.
_OFF = ("use_cache", "use_kernels", "use_mamba_kernels", "use_timm_backbone", "use_pretrained_backbone")


def tiny_config(model_type: str, sizes: Sizes) -> Any:
    """A config of transformers' own class, of these sizes."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    defaults = _defaults(kind, model_type)
    values = _shrunk(defaults, sizes, {}, Stages.of(defaults, sizes), mixed=model_type.endswith("_text"))
    own = OVERRIDES.get(model_type, {})
    values = _merged(values, own(sizes) if callable(own) else own)
    made = kind(**values)
    _finish(made)
    return made


def _defaults(kind: Any, model_type: str) -> dict[str, Any]:
    """Every field of a config as its class fills it, nested configs as dicts."""
    own = DEFAULTS.get(model_type, {})
    return copy.deepcopy(kind(**own).to_dict())


def _merged(values: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in more.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, dict) and "model_type" not in value:
            merged[name] = _merged(inner, value)
        else:
            merged[name] = value
        if value is DERIVED:
            del merged[name]
    return merged


def _shrunk(
    values: Mapping[str, Any], sizes: Sizes, ids: dict[Any, int], stages: Stages, *, mixed: bool = False
) -> dict[str, Any]:
    """A config's fields made small; `ids`: the new number of each token whose own is beyond the vocabulary.

    `mixed`: it is a part of a model of texts and pictures, whose positions may turn by time, height and width.
    """
    mixed = mixed or "vision_config" in values
    layers = layer_count(values)
    chosen = _chosen_layers(values, layers, sizes)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _DROPPED:
            continue
        if isinstance(value, dict) and value and all(type(k) is int or k.isdecimal() for k in value) and chosen:
            found[name] = {chosen.index(int(k)): v for k, v in value.items() if int(k) in chosen}
        elif (
            isinstance(value, dict)
            and name not in KEPT
            and name not in _ROPES
            and all(isinstance(k, str) for k in value)
        ):
            found[name] = _shrunk(value, sizes, ids, stages, mixed=mixed)
        elif name in _ROPES:
            found[name] = _rope(value, sizes, mixed=mixed)
        elif chosen and isinstance(value, list | tuple) and len(value) == layers:
            found[name] = type(value)(value[i] for i in chosen)
        elif name.endswith(("token_id", "token_index", "token_ids")):
            found[name] = _token(name, value, ids)
        elif is_layer_indices(name, value) and "depths" not in values:
            found[name] = _ranks(value, layers)
        elif chosen and name in _LAYERS and value == layers:
            found[name] = len(chosen)
        else:
            found[name] = tiny(name, value, sizes, stages)
    return found | _related(values, found, sizes)


def _related(values: Mapping[str, Any], found: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Sizes that follow from others, and those that a config leaves open but its model needs."""
    made: dict[str, Any] = {}
    if "num_attention_heads" in values and "head_dim" in values and values["head_dim"] is None:
        made["head_dim"] = sizes.head_dim
    inner = sizes.grown("ffn", sizes.ffn)
    needed = _NEEDED | dict.fromkeys(_INNER, inner) | {"num_key_value_heads": sizes.grown("heads", sizes.kv_heads)}
    made |= {name: size for name, size in needed.items() if name in values and values[name] is None}
    if "qk_rope_head_dim" in values:  # keys and values from a latent vector: as many of them as queries
        heads, turned, still = (found.get(n) for n in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim"))
        if still is not None and turned is not None:
            made |= {"num_key_value_heads": heads, "head_dim": turned, "qk_head_dim": turned + still}
        made = {name: size for name, size in made.items() if name in values}
    if "image_grid_pinpoints" in values:  # pictures in one tile or two
        made["image_grid_pinpoints"] = [[IMAGE, IMAGE], [IMAGE, 2 * IMAGE]]
    # A state-space layer's heads make up its inner width, which is a multiple of the model's.
    times, width = (values.get("mamba_expand") or values.get("expand")), found.get("hidden_size")
    if isinstance(times, int) and isinstance(width, int):
        inner = times * width
        for heads, each in (
            ("mamba_n_heads", "mamba_d_head"),
            ("num_heads", "head_dim"),
            ("n_mamba_heads", "mamba_headdim"),
        ):
            if heads in values and each in values:
                made |= {each: sizes.head_dim, heads: inner // sizes.head_dim}
        if "mamba_d_ssm" in values:
            made["mamba_d_ssm"] = inner
    return made


def _chosen_layers(values: Mapping[str, Any], layers: int | None, sizes: Sizes) -> list[int]:
    """The layers of the full model that the tiny one has: one of every kind that its lists tell apart.

    As many as any list names the numbers of: a model that reads the output of four layers has four.
    """
    if not layers or layers <= LAYERS or "depths" in values:
        return []
    lists = [v for n, v in values.items() if isinstance(v, list | tuple) and len(v) == layers and n not in KEPT]
    named = [len(v) for n, v in values.items() if is_layer_indices(n, v) and len(v) != layers and max(v) <= layers]
    kinds: dict[str, int] = {}
    for i in range(layers):
        kinds.setdefault(str([v[i] for v in lists]), i)
    first = sorted(kinds.values())[:6]
    while len(first) < max([LAYERS, *named]):
        first.append(min(first[-1] + 1, layers - 1))
    return first + [first[i % len(first)] for i in range(sizes.deeper)]


def _ranks(values: Any, layers: int | None) -> Any:
    """Numbers of layers by their order among themselves, from the first layer, or from 1 where the last is counted."""
    if layers is None or not values or max(values) > layers or len(values) == layers:
        return values
    ranks = {x: i for i, x in enumerate(sorted(set(values)))}
    first = 1 if max(values) == layers else 0
    return type(values)(ranks[x] + first for x in values)


def _token(name: str, value: Any, ids: dict[Any, int]) -> Any:
    """The number of a special token: another below the size of the vocabulary, the same for the same.

    The token that stands for a picture, a video or a sound has one even where a config leaves it open.
    """
    if isinstance(value, list):
        return [_token(name, x, ids) for x in value]
    if value is None and name.startswith(("image", "video", "audio")):
        value = name
    elif type(value) is not int or value < VOCABULARY // 2:
        return value
    return ids.setdefault(value, VOCABULARY - 1 - len(ids))


def _rope(value: Any, sizes: Sizes, *, mixed: bool) -> Any:
    """The settings of rotary positions with sections that fit a tiny head."""
    if not isinstance(value, dict):
        return value
    turned = int(sizes.head_dim * value.get("partial_rotary_factor", 1.0)) // 2
    found: dict[str, Any] = {"mrope_section": _sections(3, turned)} if mixed and "rope_type" in value else {}
    for name, inner in value.items():
        if name in ("mrope_section", "xdrope_section") and isinstance(inner, list | tuple):
            found[name] = _sections(len(inner), turned)
        elif name == "original_max_position_embeddings":
            found[name] = 16
        elif name in ("short_factor", "long_factor"):
            found[name] = inner[: sizes.head_dim // 2]
        else:
            found[name] = _rope(inner, sizes, mixed=mixed)
    return found


def _sections(parts: int, total: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def _finish(config: Any) -> None:
    """Plain attention and experts, no caches, and padding and ends inside the vocabulary, in every part."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if part is None:
            continue
        if part is not config:
            _finish(part)
        part._attn_implementation = "eager"
        if hasattr(part, "_experts_implementation"):
            part._experts_implementation = "eager"
        for name in _OFF:
            if hasattr(part, name):
                setattr(part, name, False)
