"""What a model type needs beyond the rules of `fields`, as data, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lemonx.checkpoints.plain import JsonValue
from lemonx.inference.tiny_sizes import Sizes

Fields = dict[str, JsonValue]


def _detector(*stages: str) -> Fields:
    """A detector that reads these maps of a tiny ResNet; its default backbone is from another library, timm."""
    resnet = {
        "model_type": "resnet",
        "hidden_sizes": [16, 32, 48, 64],
        "embedding_size": 16,
        "depths": [1, 1, 1, 1],
        "out_features": list(stages),
    }
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": resnet}


# Models that take the last map alone.
_ONE_MAP = _detector("stage4")


def _experts(sizes: Sizes) -> Fields:
    """Its class leaves the experts open."""
    return {"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": sizes.ffn}  # fmt: skip


# All widths of an EfficientNet are multiples of one number, the first and the last of which are not in its config.
_EFFICIENT: Fields = {
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "in_channels": [32, 8, 16, 16, 24, 24, 32],
    "out_channels": [8, 16, 16, 24, 24, 32, 40],
    "hidden_dim": 1280,
}
# Pictures enter as many of the first text layers as the list has entries, of which there are two.
_DEEPSTACK: Fields = {"vision_config": {"depth": 2, "deepstack_visual_indexes": [0, 1]}}
# Its positions turn otherwise in layers of each kind, and it has no default for that.
_COMPASS: Fields = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
    },
}
# It chooses whom to attend to in blocks, and its class leaves that open.
_INDEXER: Fields = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
    "hc_lowrank": 16,
}


# Model type -> fields of its tiny config, or a function of the sizes that gives them.
OVERRIDES: Mapping[str, Fields | Callable[[Sizes], Fields]] = {
    **dict.fromkeys(("detr", "conditional_detr", "table-transformer"), _ONE_MAP),
    "dab-detr": _ONE_MAP | {"query_dim": 4},
    "deformable_detr": _detector("stage2", "stage3", "stage4"),
    "dots1": _experts,
    "diffusion_gemma": lambda s: {"text_config": _experts(s)},
    "efficientnet": _EFFICIENT,
    "align_vision_model": _EFFICIENT,
    "align": {"vision_config": _EFFICIENT, "projection_dim": 40},
    # A stage must have more blocks than its number.
    "cvt": {"depth": [1, 2, 3]},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "cosmos3_omni"), _DEEPSTACK),
    "cohere_compass": {"text_config": _COMPASS, **_DEEPSTACK},
    # Layers that share their weights cannot be more: one set for each.
    "albert": lambda s: dict.fromkeys(("num_hidden_layers", "num_hidden_groups"), s.layers),
    # Its heads are in four parts, each of which has several.
    "codegen": {"n_embd": 96, "n_head": 8},
    # Groups of channels; and a first width that is an eighth of what its config says.
    "bit": {"num_groups": 4},
    "levit": {"hidden_sizes": [16, 32, 48]},
    # It has weights for every language, and must be told one.
    "xmod": {"default_language": "en_XX"},
    # The number of patches that its projector knows is a table.
    "aria": {"projector_patch_to_query_dict": {"16": 8}},
    # Its positions are a grid of rows and columns that make up the width.
    "reformer": lambda s: {
        "hidden_size": s.width,
        "axial_pos_embds_dim": [s.width // 3, s.width * 2 // 3],
        "axial_pos_shape": [8, 20],
    },
    # Its own default is as small as what is not a width in other configs.
    "patchtsmixer": lambda s: {"d_model": s.width},
    # A series of which nothing is to be foretold has no decoder.
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    # The number of its picture token is looked up by its text.
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGA": 91, "IMGIMGB": 92}},
    # Its class leaves open what its attention cannot do without.
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "cohere_compass_text": _COMPASS,
    # The kinds of layers are left open.
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    # It rounds the inner size up to a number that no tiny model reaches.
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_vl": {"text_config": {"block_auto_adjust_ff_dim": False}},
    # Its layers share the weights of one, so there are two that do; attention is twice as wide as the model.
    "zamba": {"num_hidden_layers": 4, "layers_block_type": 2 * ["linear_attention", "hybrid"]},
    # The kinds of its layers come in turn, three of them.
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    # The answers that it weighs are two tokens.
    "shieldgemma2": {"yes_token_index": 10, "no_token_index": 11},
    # Its class lacks the tokens around pictures that its code looks for.
    "qwen2_5_omni_thinker": {"vision_start_token_id": 60, "audio_start_token_id": 61},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 60, "audio_start_token_id": 61},
    # What its encoder makes has a width of its own.
    "trocr": {"cross_attention_hidden_size": 40},
    # Attention in blocks, which texts must be longer than; in `fields` the name may be another thing's.
    "gpt_neo": {"window_size": 4},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 2, "num_random_blocks": 1},
    "minimax": {"block_size": 4},
    "pegasus_x": {"block_size": 4},
    # It chooses among means of so many keys.
    "glm5_next": {"text_config": {"index_topk": 8, "index_kpool": 4}},
    # What pictures are read as enters several layers of the text.
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "image_seq_length": 16,
    },
    # All its widths are multiples of one number, whatever that is called.
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "pp_lcnet": {"scale": 0.5},
    # Of smaller pictures its last stage sees a single patch, and attention over one patch reads no queries.
    "mobilevit": {"image_size": 128},
    "mobilevitv2": {"image_size": 128},
    # What its adapter reads is four patches side by side.
    "llama4": lambda s: {"vision_config": {"intermediate_size": 4 * s.width}},
}
# Fields that a config's class derives from others.
DERIVED: Mapping[str, tuple[str, ...]] = {
    # Its heads make up the width, whatever head_dim says.
    **dict.fromkeys(("d_fine", "deimv2"), ("head_dim",)),
    "zamba": ("attention_hidden_size", "attention_head_dim"),
    "zamba2": ("attention_hidden_size", "attention_head_dim", "kv_channels", "num_query_groups", "mamba_headdim"),
}
