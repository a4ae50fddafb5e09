"""What the sizes in a config mean, told from their names, and the tiny value that each gets.

A size that no factor moves is the same in every column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from lemonx.checkpoints.plain import JsonValue
from lemonx.inference.tiny_sizes import Sizes
from lemonx.verification.media import IMAGE, PATCH, VOCABULARY

WINDOW, POSITIONS = 4, 160


@dataclass(frozen=True)
class Rule:
    """Fields of these names, if larger than `over`, become `to`, a number or one of `Sizes`; `moves`: what grows them.

    Below `least` the name means something else.
    """

    names: str
    to: int | str
    moves: str = ""
    over: int = 0
    least: int = 0
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", re.compile(f"(?:{self.names})$"))


# The size of a head, where it is not the width divided by the heads.
HEAD_SIZE = re.compile(
    r"(.*_)?(head_dim|d_kv|head_size|kv_channels|d_head|dim_head|attention_head_dim|v_head_dim|headdim)"
)
# The first rule that matches a whole name is the field's. Numbers that no rule names stay as they are.
RULES = (
    Rule(r".*(coefficient|cost|dropout|temperature|stride|padding|kernel|kernel_size|kernel_dim|conv1d_width|ratio|seed)",
         0, "keep"),
    Rule(r".*(_token_id|_token_index|_index|_id|_ids|special.*)", 0, "keep"),
    Rule(r"in_channels|patch_embed_hidden_size|query_dim|cross_attention_hidden_size", 0, "keep"),
    # ---- positions, texts, pictures
    Rule(r"(.*_)?vocab(_size)?|n_vocab|vocab_size_.*|num_embeds", VOCABULARY, over=VOCABULARY),
    Rule(r"(.*_)?(max_position_embeddings|n_positions|max_target_positions|n_ctx|max_seq_len|model_max_length)|"
         r"max_(encoder|decoder)_position_embeddings|max_2d_position_embeddings|max_sequence_length",
         POSITIONS, over=POSITIONS),
    Rule(r"max_source_positions", 32, over=32),
    Rule(r"(image_size|img_size|input_size|pretrain_image_size|crop_size)", IMAGE, over=IMAGE),
    Rule(r"image_embedding_size|(.*_)?pos_emb_(height|width)", IMAGE // PATCH, over=8),
    Rule(r"patch_size", PATCH, over=7),
    Rule(r"num_mel_bins|n_mel_bins|mel_dim|input_feat_per_channel|model_in_dim|input_feat_size|"
         r"input_dim|feature_projection_input_dim", 16, over=16),
    Rule(r"(sliding|keep)_window(_size)?|local_attention|attention_window(_size)?|.*attention_chunk_size|index_topk|"
         r"local_radius|global_block_size|index_block_size|.*attn_chunk_length|n_window|speech_encoder_chunk_size",
         WINDOW, over=4),
    Rule(r"speech_encoder_left_chunk_num", 1, over=1),
    Rule(r"window_size", 2 * PATCH, least=64),  # in pixels
    Rule(r"window_size", 2, over=2),
    Rule(r"mm_tokens_per_image|image_seq_length|num_image_tokens|vision_soft_tokens_per_image", 4, over=4),
    Rule(r"(num_)?frames(_per_clip)?", 4, over=4),
    Rule(r"context_length", 32, over=32),
    Rule(r"num_queries|num_detection_tokens|num_query_tokens|.*num_latents|.*n_latents|latent_query_num", 6, over=6),
    Rule(r"num_codevectors_per_group|codebook_size|num_embeddings", 32, over=32),
    # ---- experts
    Rule(r"(num_|n_|moe_num_)?(routed_|local_)?experts", 4, over=4),
    Rule(r".*(experts_per_tok(en)?|moe_k|moe_topk|num_selected_experts|top_k_experts|router_top_k)", 2, over=2),
    Rule(r"n_group|topk_group|num_expert_group", 1, over=1),
    Rule(r"(mamba_)?n_?groups", 2, over=2),
    Rule(r"expert_capacity", 64),
    Rule(r"zero_expert_num", 2, over=2),
    Rule(r"num_conv_pos_embedding_groups", 4, over=4),
    Rule(r"num_conv_pos_embeddings", 8, over=8),
    # ---- layers
    Rule(r"num_nextn_predict_layers", 0),
    Rule(r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index", 1, over=1),
    Rule(r".*(feat_extract_layers|adapter_layers|stages|encoder_blocks|coda_layers)|num_blocks_per_group", 0, "keep"),
    Rule(r".*(_period|_interval|_every.*|_pattern|_frequency|_step)", 2, over=2),
    Rule(r".*layer_offset", 1, over=1),
    Rule(r"(.*_)?(num_|n_)?(hidden_|decoder_|encoder_)*(layers?)|n_layer|(.*_)?(depth|num_blocks)|layers|"
         r".*_layers_per_stack|num_self_attends_per_block|.*_depth", "layers", "layers", over=2),
    # ---- heads
    Rule(r"qk_rope_head_dim|qk_nope_head_dim", 8, over=8),
    Rule(r"qk_head_dim", 16, over=16),
    Rule(HEAD_SIZE.pattern, "head_dim", over=11),
    Rule(r".*(key_value_heads|kv_heads|num_query_groups)|multi_query_group_num", "kv_heads", "heads", over=2),
    Rule(r"(.*_)?(num_|n_)?(attention_|key_|value_|self_attn_|self_attention_|cross_attention_|mamba_n_)?heads?|n_head|"
         r"linear_num_(key_|value_)?heads|mamba_n(um)?_heads|num_heads_per_stage", "heads", "heads", over=4),
    Rule(r"rotary_dim", 8, over=8),
    Rule(r".*lora_rank|laurel_rank|adapter_rank|.*_lowrank|embedding_rank", 24, over=24),
    Rule(r"(mamba_)?(d_)?(ssm_)?state(_size)?|mamba_d_state|state_size|ssm_state_size", 8, over=8),
    Rule(r"query_pre_attn_scalar", 16, over=16),
    Rule(r"(mamba_)?chunk_size(_feed_forward)?", 4, over=4),
    # ---- the inner size of blocks
    Rule(r".*(intermediate_size(_mlp)?|ffn_dim|feed_?forward(_dim|_hidden_size|_size)?|linear_units|mlp_dim|"
         r"mlp_hidden_size|intermediate_dim|ffn_hidden_size)|d_ff|dff|dim_ff|n_inner|d_inner|hidden_dim|ff_dim|"
         r"inner_dim|mlp_hidden_dim|dim_feedforward|pred_intermediate_size", "ffn", "ffn", over=31),
    # ---- widths
    Rule(r"coordinate_size|shape_size", "sixth", "width"),
    Rule(r"num_pos_feats", "half", "width"),
    Rule(r"out_hidden_size", "width", "text", over=31),  # what leads from pictures to the text
    Rule(r"upsample_groups", "width", "width", over=31),
    Rule(r"(.*_)?(hidden_size(_global)?|hidden_dim|d_model|n_embd|dim|embed_dim|emb_dim|model_dim|width|embedding_size|"
         r"proj_dim|projection_dim|projection_size|hidden_channels?|embedding_dim(ension)?|output_size|d_latents|"
         r"output_channels|filter_channels|encoder_width|out_channels?|num_filters|"
         r"hidden_features|bottleneck_features|in_dim|out_dim|predictor_channels|base_channels|conv_channels|"
         r"num_channels_out_|initial_channel|postnet_units|proj_size|output_proj_dims|bottleneck_size|reassemble_hidden_size)",
         "width", "width", over=31),
)  # fmt: skip

# Which layer of the tower of pictures is read.
_FEATURE_LAYERS = ("vision_feature_layer", "vision_feature_layers")
# Never sizes, or rebuilt by the config's own class.
KEPT = frozenset(
    (
        *("id2label", "label2id", "torch_dtype", "dtype", "transformers_version", "model_type", "architectures"),
        *("quantization_config", "chunk_size_feed_forward", "num_channels", "output_hidden_states", "tdnn_dim"),
    )
)
# Lists with a number for every stage.
_STAGE_WIDTHS = re.compile(
    r".*(hidden_sizes|dims?|channels|widths|channel_list|embed_dim|hidden_size|features|per_stage)$"
)
_STAGE_HEADS = re.compile(r".*(num_heads|attention_heads|num_attention_heads.*)$")
_STAGE_DEPTHS = re.compile(r".*(depths?|num_layers|layers|num_blocks|block_repeats|stage_num_blocks|blocks_per_stage|"
                           r"n_attn_blocks|block_sizes|num_hidden_layers)$")  # fmt: skip
_LAYER_INDICES = re.compile(
    r".*(ind(ex|exes|ices)|_idxs?|layer_ids|hook_ids|_layers|target_layers|global_attention_blocks)$"
)
# Lists of the layers that are of some kind; the others above name layers whose outputs are read.
_LAYERS_OF_A_KIND = re.compile(
    r"global_attn_indexes|fullatt_block_indexes|window_block_ind(ic|ex)es|cross_attention_layers|mlp_only_layers|"
    r"subsample_layers|full_attn_idxs|moe_layers|rope_scaling_layers"
)


@dataclass(frozen=True)
class Stages:
    """The widths of stages in a config, and by what they are divided, so that those which agree still do."""

    widths: frozenset[int] = frozenset()
    unit: int = 1

    @staticmethod
    def of(values: Mapping[str, JsonValue], sizes: Sizes) -> Stages:
        widths = frozenset(x for numbers in _stage_widths(values) for x in numbers if x > 3)
        return Stages(widths, max(1, math.gcd(*widths) // sizes.channels)) if widths else Stages()

    def beside(self, value: int) -> bool:
        """Whether a width is divided as the stages are: it is one of theirs, or wide enough."""
        return value in self.widths or (self.unit > 1 and value % self.unit == 0 and value // self.unit >= 32)


def tiny(name: str, value: JsonValue, sizes: Sizes, stages: Stages | None = None) -> JsonValue:
    """The value of a field in a tiny config; the same value where the name says no size."""
    stages = stages or Stages()
    if isinstance(value, bool) or name in KEPT:
        return value
    if name in _FEATURE_LAYERS:  # of a tiny tower the last, so that all of it is read
        return -1 if isinstance(value, int) else [-1, -2]
    if isinstance(value, int):
        return _number(name, value, sizes, stages)
    if is_numbers(value):
        made = _stages(name.lower(), list(value), sizes, stages.unit)
        return tuple(made) if isinstance(value, tuple) else made
    return value


def meaning(name: str, value: JsonValue) -> str:
    """What a field is by its name: width, heads, kv_heads, ffn or depth, as the options are called; or none of these.

    >>> meaning("hidden_size", 768), meaning("depths", [2, 2, 6, 2]), meaning("vocab_size", 50257)
    ('width', 'depth', '')
    """
    if isinstance(value, int) and not isinstance(value, bool) and name not in KEPT:
        found = _rule(name, value)
        if found is None or found.moves in ("keep", ""):
            return ""
        return "depth" if found.moves == "layers" else "kv_heads" if found.to == "kv_heads" else found.moves
    if not is_numbers(value):
        return ""
    if _STAGE_DEPTHS.fullmatch(name.lower()) and all(0 < x < 100 for x in value):
        return "depth"
    return "heads" if _STAGE_HEADS.fullmatch(name.lower()) else "width" if is_stage_widths(name, value) else ""


def is_numbers(value: JsonValue) -> TypeGuard[list[int] | tuple[int, ...]]:
    """Whether a field is a list of whole numbers."""
    return isinstance(value, list | tuple) and bool(value) and all(type(x) is int for x in value)


def of_layer(name: str, value: JsonValue, sizes: Sizes, stages: Stages) -> JsonValue:
    """What a list has for one layer: a size, or something else that stays as it is."""
    rule = _rule(name, value) if type(value) is int else None
    return tiny(name, value, sizes, stages) if rule is not None and rule.moves in ("width", "heads", "ffn") else value


def _number(name: str, value: int, sizes: Sizes, stages: Stages) -> int:
    rule = _rule(name, value)
    if rule is None or rule.moves == "keep" or value <= 0:
        return value
    if rule.to == "kv_heads" and value == 1:
        return value  # one for all heads, however many
    if rule.moves in ("width", "text") and value <= rule.over and not stages.beside(value):
        return value  # of something else: a kernel, a position, a picture's colours
    to = rule.to if isinstance(rule.to, int) else getattr(sizes, rule.to)
    small = to if value > rule.over else value
    if rule.moves == "width" and stages.beside(value):
        small = value // stages.unit
    return small


def _rule(name: str, value: int) -> Rule | None:
    return next((r for r in RULES if value >= r.least and r.pattern.fullmatch(name.lower())), None)


def _stages(name: str, values: list[int], sizes: Sizes, unit: int) -> list[int]:
    if re.fullmatch(r"(image_size|img_size|input_size|pretrain_image_size)", name):
        return [min(x, IMAGE) for x in values]
    if name in ("window_size_per_stage", "stage_numb_of_layers"):  # these layers are joined, and add to nothing
        return [min(x, 2) for x in values]
    if _STAGE_DEPTHS.fullmatch(name) and all(0 < x < 100 for x in values):
        # The first block of a stage may be unlike the others, of which there is one at least.
        return [sizes.layers for _ in values] if len(values) < 8 else values
    if _STAGE_HEADS.fullmatch(name):
        return [2 * x // min(values) for x in values]
    if is_stage_widths(name, values):
        return [x // unit if x > 3 else x for x in values]
    return values


def is_stage_widths(name: str, values: Sequence[int]) -> bool:
    """Whether a field lists the widths of stages."""
    return max(values) >= 32 and _STAGE_WIDTHS.fullmatch(name.lower()) is not None


def _stage_widths(values: Mapping[str, JsonValue]) -> Iterator[list[int]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name not in KEPT:
            yield from _stage_widths(value)
        elif name not in KEPT and is_numbers(value) and is_stage_widths(str(name), value):
            yield list(value)


def is_layer_indices(name: str, values: Sequence[int]) -> bool:
    """Whether a field lists numbers of layers."""
    return min(values) >= 0 and _LAYER_INDICES.fullmatch(name.lower()) is not None


def is_layers_of_a_kind(value: JsonValue, name: str) -> TypeGuard[list[int] | tuple[int, ...]]:
    """Whether a field lists the numbers of all layers of some kind."""
    return is_numbers(value) and _LAYERS_OF_A_KIND.fullmatch(name) is not None


def layer_count(values: Mapping[str, JsonValue]) -> int | None:
    """The number of layers that a config has, if it names one."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth", "decoder_layers")
    return next((count for n in names if isinstance(count := values.get(n), int)), None)
