"""Random values for every field of transformers' config classes: small sizes that fit together, and other settings.

`fields_of` enumerates a config class; `drawn` gives every size a value, and a share of all other fields another value
than the default: a flag is flipped, a word is one of those that the modelling code knows, a number is another number.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import transformers as hf
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lemonx.models.resnet import TorchvisionResNetConfig
from lemonx.models.timm import TimmResNetConfig, TimmViTConfig

Config = type[hf.PreTrainedConfig]
# Fields that are no setting of a function: names, versions, and what other fields say already.
NO_SETTINGS = frozenset(
    ("transformers_version", "architectures", "dtype", "label2id", "is_encoder_decoder", "text_config",
     "vision_config", "model_args", "architecture", "num_features", "_out_features", "_out_indices")
)  # fmt: skip


@dataclass
class Draw:
    """What a value may depend on: the random numbers, the class, and what was drawn before it."""

    r: random.Random
    config_class: Config
    class_name: str
    values: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else fields_of(self.config_class)[name].default

    def one_of(self, *values: Any) -> Any:
        return self.r.choice(values)

    def has(self, name: str) -> bool:
        return name in fields_of(self.config_class)

    def may_lack(self, name: str) -> list[None]:
        """None, where the type of the field allows it."""
        return [None] if "None" in str(fields_of(self.config_class)[name].type) else []

    def ends(self, *ends: str) -> bool:
        return self.class_name.endswith(ends)


Make = Callable[[Draw], Any]


def fields_of(config_class: Config) -> dict[str, dataclasses.Field[Any]]:
    """Every field of a config class."""
    return {field.name: field for field in dataclasses.fields(config_class)}


def drawn(r: random.Random, config_class: Config, class_name: str, share: float) -> dict[str, Any]:
    """The fields of a random config; `share`: how many of those that are no sizes are not at their default."""
    d = Draw(r, config_class, class_name)
    if parts := getattr(config_class, "sub_configs", None):
        d.values |= {part: drawn(r, parts[part], class_name, share) for part in sorted(parts)}
        _joined(d)
    for name, size in (LAYOUTS.get(config_class) or layout)(d).items():
        d.values.setdefault(name, size)
    for name in sorted(fields_of(config_class).keys() - d.values.keys() - NO_SETTINGS):
        if r.random() < share or name in WINDOWS:
            d.values[name] = other(d, name)
    _of_the_class(d)
    return d.values


@cache
def sizes(config_class: Config, class_name: str) -> frozenset[str]:
    """The fields that the layout of a config class sets."""
    return frozenset((LAYOUTS.get(config_class) or layout)(Draw(random.Random(0), config_class, class_name)))


def other(d: Draw, name: str) -> Any:
    """Another value for a field: by its name, or flipped if it is a flag."""
    make = next((make for pattern, make in VALUES.items() if re.fullmatch(pattern, name)), None)
    if make is not None:
        return make(d)
    known = fields_of(d.config_class)[name]
    if "bool" not in str(known.type):
        raise KeyError(f"{d.config_class.__name__}.{name}: no values for {known.type} = {known.default!r}")
    return not known.default


# ----------------------------------------------------------------- sizes


def layout(d: Draw) -> dict[str, Any]:
    """The sizes of a transformer: heads of a few entries each, everything else small and odd."""
    rotary = d.has("rope_parameters") or d.has("rotary_dim")
    heads = d.one_of(1, 2, 2, 3, 4, 4, 6)
    entries = d.one_of(4, 6, 8, 12) if rotary else d.one_of(4, 5, 6, 7, 8, 12)
    width = heads * entries
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), width)
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    sizes |= dict.fromkeys((*names, "encoder_attention_heads", "decoder_attention_heads"), heads)
    kv = d.r.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if d.has("num_key_value_heads"):
        sizes["num_key_value_heads"] = d.r.choice([kv, kv, *d.may_lack("num_key_value_heads")])
    sizes["num_kv_heads"] = d.one_of(None, kv, heads)
    sizes |= {"head_dim": d.one_of(entries, entries, 2, 4, 10, 16), "d_kv": d.one_of(3, 4, 8, 12)}
    layers = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
    sizes |= {name: d.one_of(1, 2, 2, 3, 4) for name in layers}
    sizes["num_decoder_layers"] = d.one_of(None, 1, 2, 3)
    ffn = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "moe_intermediate_size", "encoder_ffn_dim")
    sizes |= {name: d.r.randint(7, 60) for name in (*ffn, "decoder_ffn_dim")}
    sizes |= {name: d.one_of(None, d.r.randint(7, 60)) for name in ("n_inner", "ffn_hidden_size")}
    sizes |= {"vocab_size": d.r.randint(37, 61), "type_vocab_size": d.one_of(1, 2, 2, 3)}
    sizes["decoder_vocab_size"] = d.one_of(None, sizes["vocab_size"], 43)
    positions = ("max_position_embeddings", "n_positions", "max_target_positions")
    sizes |= {name: d.r.randint(40, 64) for name in positions}
    sizes |= {"max_source_positions": d.r.randint(6, 20), "num_mel_bins": d.r.randint(3, 9)}
    sizes |= {"embedding_size": d.one_of(8, 15, width), "word_embed_proj_dim": d.one_of(None, width, 9)}
    sizes |= {"num_hidden_groups": d.r.randint(1, sizes["num_hidden_layers"]), "inner_group_num": d.one_of(1, 1, 2)}
    sizes |= {name: d.r.randint(5, 24) for name in ("projection_dim", "projection_size")}
    experts = d.one_of(2, 3, 4, 5)
    sizes |= dict.fromkeys(("num_experts", "num_local_experts"), experts)
    sizes |= {"num_experts_per_tok": d.one_of(1, 2, 2, experts), "state_size": d.r.randint(2, 6)}
    # MPNet counts to 32 whatever its config says.
    buckets = d.one_of(32, 40) if d.config_class is hf.MPNetConfig else d.one_of(4, 8, 12)
    sizes |= {"relative_attention_num_buckets": buckets, "rotary_dim": d.one_of(2, 4, entries)}
    if d.has("image_size"):
        sizes |= _picture(d, square=d.config_class in (hf.CLIPVisionConfig, hf.SiglipVisionConfig))
    sizes["num_channels"] = d.r.randint(1, 4)
    return {name: size for name, size in sizes.items() if d.has(name)}


def _picture(d: Draw, square: bool) -> dict[str, Any]:
    """An image of whole patches, or with a pixel over; a number, or a height and a width."""
    high, wide = (d.one_of(2, 3, 4) for _ in "hw")
    patch, over = d.one_of(2, 3, 4), d.one_of(0, 0, 0, 1)
    if square or d.r.random() < 0.6:
        return {"image_size": high * patch + over, "patch_size": patch}
    side = d.one_of(patch, 2, 3)
    size = patch if side == patch else [patch, side]
    return {"image_size": [high * patch + over, wide * side], "patch_size": size}


def _swin(d: Draw) -> dict[str, Any]:
    """Windows that fill the grid of a stage, or do not; a grid that halves evenly, or does not."""
    stages, window, patch, heads = d.one_of(1, 2, 2, 3), d.one_of(2, 3, 4), d.one_of(2, 4), d.one_of(1, 2, 3)
    whole = patch << (stages - 1)
    high, wide = (whole * d.one_of(window, 2 * window, d.r.randint(2, 6)) for _ in "hw")
    high += d.one_of(0, 0, 0, 1, patch)
    sizes = {
        "patch_size": patch,
        "window_size": window,
        "embed_dim": heads * d.one_of(4, 6, 8),
        "num_heads": [heads << i if d.r.random() < 0.8 else heads for i in range(stages)],
        "depths": [d.one_of(1, 2, 2, 3) for _ in range(stages)],
        "image_size": high if d.r.random() < 0.6 else [high, wide],
        "num_channels": d.r.randint(1, 4),
    }
    return sizes | ({"pretrained_window_sizes": [d.one_of(0, 0, 6) for _ in range(stages)]}
                    if d.has("pretrained_window_sizes") else {})  # fmt: skip


def _stages(d: Draw) -> dict[str, Any]:
    """ConvNeXt and ResNet: a width and a number of blocks for each stage."""
    stages, resnet = d.one_of(1, 2, 2, 3), d.config_class is hf.ResNetConfig
    widths = [(4 if resnet else 1) * d.r.randint(2, 5) for _ in range(stages)]
    depths = {"hidden_sizes": widths, "depths": [d.one_of(1, 2, 2, 3) for _ in range(stages)]}
    more = {"embedding_size": d.one_of(widths[0], 5, 8)} if resnet else {"num_stages": stages, **_picture(d, False)}
    if not resnet:
        more["image_size"] = d.one_of(16, 20, [16, 24], 33)
    return {**depths, **more, "num_channels": d.r.randint(1, 4)}


def _torchvision(d: Draw) -> dict[str, Any]:
    stages, block = d.one_of(1, 2, 2, 3), d.one_of("basic", "bottleneck")
    widths = sorted(d.r.randint(3, 12) for _ in range(stages + 1))
    inner = widths[1:] if block == "basic" and d.r.random() < 0.5 else [d.r.randint(2, 9) for _ in range(stages)]
    depths = [d.one_of(1, 2, 3) for _ in range(stages)]
    return {"width": widths[0], "stage_width": widths[1:], "inner_width": inner, "layers": depths, "block": block,
            "num_channels": d.r.randint(1, 4)}  # fmt: skip


def _timm_resnet(d: Draw) -> dict[str, Any]:
    stages = d.one_of(1, 2)
    layers, channels = ([d.r.choice(few) for _ in range(stages)] for few in ((1, 2), (16, 24, 64)))
    args = {"layers": layers, "channels": channels}
    block, name = d.one_of(("basic", "resnet18"), ("bottleneck", "resnet50"))
    args = args | ({"base_width": d.one_of(64, 128)} if block == "bottleneck" else {})
    # The rest follows from these.
    derived = dict.fromkeys(("layers", "width", "stage_width", "inner_width"))
    kept = {name: fields_of(d.config_class)[name].default for name in derived}
    return {**kept, "model_args": args, "architecture": name, "block": block, "num_classes": d.r.randint(2, 7),
            "stem": "imagenet", "shortcut": "B", "classifier": "fc", "num_channels": 3}  # fmt: skip


def _timm_vit(d: Draw) -> dict[str, Any]:
    heads, patch = d.one_of(1, 2, 3, 4), d.one_of(2, 3, 4)
    width = heads * d.one_of(4, 5, 8)
    args = {"embed_dim": width, "depth": d.one_of(1, 2, 3), "num_heads": heads, "mlp_ratio": d.one_of(1.0, 2.0, 2.5),
            "img_size": patch * d.one_of(2, 3, 4), "patch_size": patch}  # fmt: skip
    args |= {"init_values": d.one_of(None, 0.1, 1.0)} if d.r.random() < 0.5 else {}
    return {"model_args": args, "architecture": "vit_base_patch16_224", "num_features": width, "num_channels": 3}


def _mamba2(d: Draw) -> dict[str, Any]:
    """As many entries in all heads as the width times `expand`."""
    groups, entries, expand = d.one_of(1, 1, 2, 3), d.one_of(4, 6, 8), d.one_of(1, 2)
    heads = 2 * groups * d.one_of(1, 2, 3)
    sizes = {"num_heads": heads, "head_dim": entries, "n_groups": groups, "expand": expand}
    return layout(d) | sizes | {"hidden_size": heads * entries // expand}


LAYOUTS: dict[Config, Callable[[Draw], dict[str, Any]]] = {
    hf.SwinConfig: _swin,
    hf.Swinv2Config: _swin,
    hf.ConvNextConfig: _stages,
    hf.ResNetConfig: _stages,
    hf.Mamba2Config: _mamba2,
    TorchvisionResNetConfig: _torchvision,
    TimmResNetConfig: _timm_resnet,
    TimmViTConfig: _timm_vit,
}


def _joined(d: Draw) -> None:
    """Both towers of a model write the same space."""
    text, vision = d.values["text_config"], d.values["vision_config"]
    if d.config_class is hf.SiglipConfig:
        text["projection_size"] = vision["hidden_size"]
    else:
        d.values["projection_dim"] = text["projection_dim"] = vision["projection_dim"]


# ----------------------------------------------------------------- settings

ACTS = sorted(ACT2FN)
WINDOWS = frozenset({"sliding_window", "local_attention"})  # shorter than the texts, always


def _of(*values: Any) -> Make:
    return lambda d: d.r.choice(values)


def _rope(d: Draw) -> Any:
    """The rotary rule: one, or one for each type of layer where the family has several."""
    if d.config_class in (hf.Gemma3TextConfig, hf.ModernBertConfig):
        return {kind: _rope_rule(d) for kind in ("sliding_attention", "full_attention")}
    return _rope_rule(d)


def _rope_rule(d: Draw) -> dict[str, Any]:
    kind = d.r.choice(["default", *ROPE_INIT_FUNCTIONS])
    rule: dict[str, Any] = {"rope_type": kind, "rope_theta": d.one_of(10000.0, 500.0, 1e6)}
    if d.r.random() < 0.4:
        rule["partial_rotary_factor"] = d.one_of(0.5, 0.25, 0.75)
    if kind != "default":
        rule["factor"] = d.one_of(2.0, 4.0, 1.5)
    if kind in ("yarn", "longrope", "llama3"):
        rule["original_max_position_embeddings"] = d.one_of(8, 16, 20)
    if kind == "llama3":
        rule |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        more = {"truncate": False, "attention_factor": 0.9, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7,
                "mscale_all_dim": 0.5}  # fmt: skip
        rule |= {name: given for name, given in more.items() if d.r.random() < 0.4}
    if kind == "longrope":
        width, heads = (next(d[n] for n in names if d.has(n)) for names in (("hidden_size", "n_embd"), HEADS))
        head = (d["head_dim"] if d.has("head_dim") else None) or width // heads
        pairs = int(head * rule.get("partial_rotary_factor", 1.0)) // 2
        rule |= {name: [round(d.r.uniform(1, 3), 3) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
    return rule


HEADS = ("num_attention_heads", "n_head")


def _layer_types(d: Draw) -> Any:
    return d.one_of(None, [d.one_of("sliding_attention", "full_attention") for _ in range(d["num_hidden_layers"])])


def _window(d: Draw) -> Any:
    return d.r.choice([3, 5, 8, 12, *d.may_lack("sliding_window")])


def _mlp_ratio(d: Draw) -> Any:
    return d.one_of(1, 2, 3) if fields_of(d.config_class)["mlp_ratio"].type is int else d.one_of(1.0, 1.5, 2.5, 3.0)


def _token(d: Draw) -> Any:
    """A token of the vocabulary that is not large: some families count positions from it."""
    return d.one_of(None, 0, 1, 2, 3, 5)


# The values of fields that are no flags, by the field's name: the first pattern that fits.
VALUES: dict[str, Make] = {
    "hidden_act|hidden_activation|activation_function|activation|classifier_activation|pooler_act": _of(*ACTS),
    "summary_activation": _of(None, "tanh", "relu", "gelu"),
    "feed_forward_proj": lambda d: d.one_of("", "gated-") + d.r.choice(ACTS),
    "summary_type": _of("first", "last", "mean", "cls_index"),
    ".*dropout.*|.*_pdrop|.*layerdrop|drop_path_rate|mask_.*_prob": _of(0.0, 0.1, 0.5),
    ".*_eps|.*_epsilon": _of(1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 0.05),
    "init_std|initializer_.*|logit_scale_init_value": _of(0.01, 0.5, 1.0),
    "rope_parameters": _rope,
    "layer_types": _layer_types,
    "no_rope_layers": lambda d: d.one_of(None, [d.one_of(0, 1) for _ in range(d["num_hidden_layers"])]),
    "no_rope_layer_interval": _of(1, 2, 3),
    "max_window_layers": _of(0, 1, 2, 3),
    "sliding_window": _window,
    "local_attention": _of(4, 6, 8, 12),
    "query_pre_attn_scalar": _of(4, 16, 24),
    ".*_softcapping": _of(None, 0.5, 2.0, 30.0),
    "logit_scale|.*_multiplier|logits_scaling": _of(0.25, 0.5, 1.7, 3.0),
    "clip_qkv": _of(None, 0.3, 1.0),
    "layer_scale_init_value|layerscale_value": _of(0.0, 0.1, 1.0),
    "swiglu_alpha|swiglu_limit": _of(0.5, 1.0, 3.0),
    "router_.*|auxiliary_loss_weight": _of(0.001, 0.1),
    "auxiliary_channels|auxiliary_num_convs|semantic_.*": _of(1, 2),
    "num_ln_in_parallel_attn": _of(None, 1, 2),
    "decoder_sparse_step": _of(1, 2, 3),
    "mlp_only_layers": lambda d: [i for i in range(d["num_hidden_layers"]) if d.r.random() < 0.4],
    "relative_attention_max_distance": _of(16, 24, 40),
    "pooler_output_size": lambda d: d.one_of(None, d["hidden_size"], 9),
    "mlp_ratio": _mlp_ratio,
    "encoder_stride": _of(2, 4, 8),
    "classifier_pooling": _of("cls", "mean"),
    "sparse_pred_ignore_index": _of(-100, 0),
    "layer_type": _of("basic", "bottleneck"),
    "out_indices": lambda d: sorted({d.r.randint(0, 2) for _ in "ab"}),
    "pool_scales": _of([1, 2], [1]),
    "expand": _of(1, 2, 3),
    "conv_kernel": _of(2, 3, 4),
    "time_step_rank": _of("auto", 2, 3),
    "time_step_limit": _of([0.0, float("inf")], [0.01, 0.3]),
    "time_step_(min|max|floor|scale)": _of(0.001, 0.01, 0.1, 2.0),
    "time_step_init_scheme": _of("random", "constant"),
    "chunk_size": _of(3, 8, 256),
    "chunk_size_feed_forward": _of(0, 1, 11),
    "pretraining_tp": _of(1, 2),
    "original_max_position_embeddings": _of(16, 20),
    "classifier_proj_size": _of(5, 12, 20),
    "mask_.*|median_filter_width": _of(1, 3),
    "suppress_tokens|begin_suppress_tokens": _of(None, [3, 5]),
    "problem_type": _of("regression", "single_label_classification", "multi_label_classification"),
    "id2label": lambda d: {i: f"L{i}" for i in range(d.one_of(1, 2, 3, 5))},
    "num_classes": _of(2, 5, 7),
    "global_pool": _of("token", "avg"),
    "stem": _of("imagenet", "cifar"),
    "shortcut": _of("A", "B"),
    "classifier": _of("fc", "linear"),
    "eos_token_id": lambda d: d.one_of(_token(d), [2, 4]),
    ".*_token_id": _token,
}

# Encoders that can be told to write texts.
_WRITERS = ("ForCausalLM", "LMHeadModel")


def _of_the_class(d: Draw) -> None:
    """What a class needs of its config, and tokens that the vocabulary has."""
    values = d.values
    if d.ends("ForQuestionAnswering"):
        values["id2label"] = {0: "start", 1: "end"}
    if d.ends(*_WRITERS) and d.has("is_decoder") and d.r.random() < 0.9:
        values["is_decoder"] = True
    if d.ends("ForMaskedImageModeling") and d.has("encoder_stride") and isinstance(d["patch_size"], int):
        values["encoder_stride"] = d["patch_size"] << (len(d["depths"]) - 1 if d.has("depths") else 0)
    if d.ends("Backbone"):
        blocks = len(d["depths"]) if d.has("depths") else d["num_hidden_layers"]
        shown = sorted({d.r.randint(0, blocks) for _ in "ab"})
        values |= d.one_of({"out_indices": shown}, {"out_features": [f"stage{i}" if i else "stem" for i in shown]}, {})
    if d.has("vocab_size"):
        for name in fields_of(d.config_class):
            if name.endswith("_token_id") and name not in values:
                default = fields_of(d.config_class)[name].default
                if default is not None:  # of a vocabulary that is far larger
                    values[name] = default if default < 6 else d.one_of(0, 1, 2, 3)
