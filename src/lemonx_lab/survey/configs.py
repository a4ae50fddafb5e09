"""Tiny configs of any model type: the defaults of its class with every size that is told from its name made small."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lemonx.checkpoints.plain import JsonValue
from lemonx.inference.running import plain
from lemonx.inference.size_names import (
    KEPT,
    Stages,
    is_layer_indices,
    is_layers_of_a_kind,
    is_numbers,
    layer_count,
    of_layer,
    tiny,
)
from lemonx.inference.tiny_sizes import Sizes
from lemonx.verification.media import IMAGE, VOCABULARY
from lemonx_lab.survey.overrides import DERIVED, OVERRIDES

Fields = dict[str, JsonValue]
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
# A state-space layer's number of heads, and the size of each.
_SCANNED = (("mamba_n_heads", "mamba_d_head"), ("num_heads", "head_dim"), ("n_mamba_heads", "mamba_headdim"))


# Fields that a config may lack, as code reads them: attention the size of a head, a tower whether it has a head.
_HEAD_DIM = re.compile(r'self\.head_dim = getattr\((?:self\.)?config, "head_dim"')
_USE_HEAD = re.compile(r'hasattr\(config, "vision_use_head"')


def tiny_config(model_type: str, sizes: Sizes) -> Any:
    """A config of transformers' own class, of these sizes."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    defaults: Fields = copy.deepcopy(kind().to_dict())
    values = _shrunk(defaults, sizes, {}, Stages.of(defaults, sizes), mixed=model_type.endswith("_text"))
    own = OVERRIDES.get(model_type, {})
    values = _merged(values, own(sizes) if callable(own) else own)
    made = kind(**{name: value for name, value in values.items() if name not in DERIVED.get(model_type, ())})
    _finish(plain(made, cache=True))
    return made


def _merged(values: Mapping[str, JsonValue], more: Mapping[str, JsonValue]) -> Fields:
    merged = dict(values)
    for name, value in more.items():
        inner = merged.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping) and "model_type" not in value:
            merged[name] = _merged(inner, value)
        else:
            merged[name] = value
    return merged


def _shrunk(
    values: Mapping[str, JsonValue], sizes: Sizes, ids: dict[JsonValue, int], stages: Stages, *, mixed: bool = False
) -> Fields:
    """A config's fields made small; `ids`: the new number of each token whose own is beyond the vocabulary.

    `mixed`: it is a part of a model of texts and pictures, whose positions may turn by time, height and width.
    """
    mixed = mixed or "vision_config" in values
    layers = layer_count(values)
    chosen = _chosen_layers(values, layers, sizes)
    found: Fields = {}
    for name, value in values.items():
        if name in _DROPPED:
            continue
        if isinstance(value, Mapping):
            found[name] = _part(name, value, chosen, sizes, ids, stages, mixed=mixed)
        elif chosen and is_layers_of_a_kind(value, name):
            found[name] = _like(value, (i for i, layer in enumerate(chosen) if layer in value))
        elif chosen and isinstance(value, list | tuple) and len(value) == layers:
            found[name] = _like(value, (of_layer(name, value[i], sizes, stages) for i in chosen))
        elif name.endswith(("token_id", "token_index", "token_ids")):
            found[name] = _token(name, value, ids)
        elif is_numbers(value) and is_layer_indices(name, value) and "depths" not in values:
            found[name] = _ranks(value, layers)
        elif chosen and name in _LAYERS and value == layers:
            found[name] = len(chosen)
        else:
            found[name] = tiny(name, value, sizes, stages)
    return found | _related(values, found, sizes)


def _part(
    name: str,
    value: Mapping[str, JsonValue],
    chosen: list[int],
    sizes: Sizes,
    ids: dict[JsonValue, int],
    stages: Stages,
    *,
    mixed: bool,
) -> JsonValue:
    """A part of a config: settings of positions, something for each layer, or a config of its own."""
    if name in _ROPES:
        return _rope(value, sizes, mixed=mixed)
    numbered: Mapping[Any, JsonValue] = value
    if name in KEPT:
        return value
    if value and chosen and all(isinstance(key, int) or key.isdecimal() for key in numbered):
        entries = {int(key): entry for key, entry in numbered.items()}
        kept: dict[Any, JsonValue] = {i: entries[layer] for i, layer in enumerate(chosen) if layer in entries}
        return kept
    if not all(isinstance(key, str) for key in numbered):
        return value
    return _shrunk(value, sizes, ids, stages, mixed=mixed)


def _like(value: JsonValue, entries: Iterable[JsonValue]) -> JsonValue:
    """Entries in a list, or in a tuple where there was one."""
    return tuple(entries) if isinstance(value, tuple) else list(entries)


def _related(values: Mapping[str, JsonValue], found: Mapping[str, JsonValue], sizes: Sizes) -> Fields:
    """Sizes that follow from others, and those that a config leaves open but its model needs."""
    made: Fields = {}
    model_type = str(values.get("model_type", ""))
    open_head = values.get("head_dim") is None and ("head_dim" in values or reads(model_type, _HEAD_DIM))
    if "num_attention_heads" in values and open_head:
        made["head_dim"] = sizes.head_dim
    needed = _NEEDED | dict.fromkeys(_INNER, sizes.ffn)
    needed["num_key_value_heads"] = sizes.kv_heads
    made |= {name: size for name, size in needed.items() if name in values and values[name] is None}
    heads, turned, still = (found.get(n) for n in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim"))
    if isinstance(still, int) and isinstance(turned, int):
        # Keys and values from a latent vector: as many of them as queries.
        latent = {"num_key_value_heads": heads, "head_dim": turned, "qk_head_dim": turned + still}
        made |= {name: size for name, size in latent.items() if name in values}
    if "image_grid_pinpoints" in values:  # pictures in one tile or two
        made["image_grid_pinpoints"] = [[IMAGE, IMAGE], [IMAGE, 2 * IMAGE]]
    return made | _scanned(values, found, sizes)


def _scanned(values: Mapping[str, JsonValue], found: Mapping[str, JsonValue], sizes: Sizes) -> Fields:
    """A state-space layer's heads make up its inner width, which is a multiple of the model's."""
    times, width = (values.get("mamba_expand") or values.get("expand")), found.get("hidden_size")
    if not (isinstance(times, int) and isinstance(width, int)):
        return {}
    made: Fields = {"mamba_d_ssm": times * width} if "mamba_d_ssm" in values else {}
    for heads, each in _SCANNED:
        if heads in values and each in values:
            made |= {each: sizes.head_dim, heads: times * width // sizes.head_dim}
    return made


@cache
def reads(model_type: str, optional: re.Pattern[str]) -> bool:
    """Whether the code of a model type reads a field that its config lacks."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    field = optional.pattern.rsplit('"', 2)[1]
    if model_type not in CONFIG_MAPPING or hasattr(CONFIG_MAPPING[model_type], field):  # derived from other fields
        return False
    module = model_type_to_module_name(model_type)
    try:
        found = find_spec(f"transformers.models.{module}.modeling_{module}")
    except ModuleNotFoundError:
        return False
    code = Path(found.origin).read_text() if found is not None and found.origin else ""
    return optional.search(code) is not None


def _chosen_layers(values: Mapping[str, JsonValue], layers: int | None, sizes: Sizes) -> list[int]:
    """The layers of the full model that the tiny one has: the first, and one of every kind that its lists tell apart.

    A first layer may be of its own kind whatever the lists say. As many as any list names the outputs of: a model that
    reads those of four layers has four.
    """
    if not layers or layers <= sizes.layers or "depths" in values:
        return []
    sequences = {n: v for n, v in values.items() if isinstance(v, list | tuple) and n not in KEPT}
    chosen = {n: v for n, v in sequences.items() if is_layers_of_a_kind(v, n)}
    lists: list[Sequence[JsonValue]] = [v for n, v in sequences.items() if len(v) == layers and n not in chosen]
    lists += [[layer in v for layer in range(layers)] for v in chosen.values()]
    named = [len(v) for n, v in sequences.items() if is_numbers(v) and is_layer_indices(n, v)
             and len(v) != layers and max(v) <= layers and n not in chosen]  # fmt: skip
    kinds: dict[str, int] = {}
    for i in range(layers):
        kinds.setdefault(str([i == 0, *(v[i] for v in lists)]), i)
    first = sorted(kinds.values())[:6]
    while len(first) < max([sizes.layers, *named]):
        first.append(min(first[-1] + 1, layers - 1))
    return first


def _ranks(values: list[int] | tuple[int, ...], layers: int | None) -> JsonValue:
    """Numbers of layers by their order among themselves, from the first layer, or from 1 where the last is counted."""
    if layers is None or max(values) > layers or len(values) == layers:
        return values
    ranks = {x: i for i, x in enumerate(sorted(set(values)))}
    first = 1 if max(values) == layers else 0
    return _like(values, (ranks[x] + first for x in values))


def _token(name: str, value: JsonValue, ids: dict[JsonValue, int]) -> JsonValue:
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


def _rope(value: Mapping[str, JsonValue], sizes: Sizes, *, mixed: bool) -> Fields:
    """The settings of rotary positions with sections that fit a tiny head."""
    share = value.get("partial_rotary_factor", 1.0)
    turned = int(sizes.head_dim * (share if isinstance(share, int | float) else 1.0)) // 2
    found: Fields = {"mrope_section": _sections(3, turned)} if mixed and "rope_type" in value else {}
    for name, inner in value.items():
        if name in ("mrope_section", "xdrope_section") and isinstance(inner, list | tuple):
            found[name] = _sections(len(inner), turned)
        elif name == "original_max_position_embeddings":
            found[name] = 16
        elif name in ("short_factor", "long_factor") and isinstance(inner, list):
            found[name] = inner[: sizes.head_dim // 2]
        else:
            found[name] = _rope(inner, sizes, mixed=mixed) if isinstance(inner, Mapping) else inner
    return found


def _sections(parts: int, total: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def _finish(config: Any, *, part: bool = False) -> None:
    """No head that the model around a part of it does not read."""
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            _finish(inner, part=True)
    if part and reads(config.model_type, _USE_HEAD):
        config.vision_use_head = False
