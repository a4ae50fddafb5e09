"""What a model type needs beyond the rules of `fields`, as data, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lemonx.diagnostics.survey.fields import Sizes

# A field that its class derives from others.
DERIVED = object()


def _resnet(sizes: Sizes) -> dict[str, Any]:
    widths = [sizes.grown("width", n) for n in (16, 32, 48, 64)]
    return {"model_type": "resnet", "hidden_sizes": widths, "embedding_size": widths[0], "depths": [1, 1, 1, 1]}


def _detector(sizes: Sizes) -> dict[str, Any]:
    """Its backbone is timm's by default, which is another library."""
    stages = ["stage2", "stage3", "stage4"]
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": _resnet(sizes) | {"out_features": stages}}


def _one_map(sizes: Sizes) -> dict[str, Any]:
    """The same, for a model that takes the last map alone."""
    return {
        "use_timm_backbone": False,
        "backbone": None,
        "backbone_config": _resnet(sizes) | {"out_features": ["stage4"]},
    }


def _experts(sizes: Sizes) -> dict[str, Any]:
    """Its class leaves the experts open."""
    return {"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": sizes.grown("ffn", sizes.ffn)}  # fmt: skip


def _efficient(sizes: Sizes) -> dict[str, Any]:
    return {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": sizes.grown("width", 1280)}


def _deepstack(sizes: Sizes) -> dict[str, Any]:
    """Pictures enter as many of the first text layers as the list has entries, of which there are two."""
    return {"vision_config": {"depth": 2 + sizes.deeper, "deepstack_visual_indexes": [0, 1]}}


# Model type -> fields of its tiny config, or a function of the sizes that gives them.
OVERRIDES: dict[str, dict[str, Any] | Callable[[Sizes], dict[str, Any]]] = {
    "detr": _one_map,
    "conditional_detr": _one_map,
    "dab-detr": _one_map,
    "table-transformer": _one_map,
    "deformable_detr": _detector,
    "dots1": _experts,
    # Its last width is a fixed multiple of the stage before it, and coefficients stretch both.
    "efficientnet": _efficient,
    "align_vision_model": _efficient,
    "align": lambda s: {"vision_config": _efficient(s)},
    # Its heads make up the width, whatever head_dim says.
    **{name: {"head_dim": DERIVED} for name in ("d_fine", "deimv2", "rt_detr", "rt_detr_v2")},
    # A stage must have more blocks than its number.
    "cvt": lambda s: {"depth": [1 + s.deeper, 2 + s.deeper, 3 + s.deeper]},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "cosmos3_omni"), _deepstack),
    # It has weights for every language, and must be told one.
    "xmod": {"default_language": "en_XX"},
    # The number of patches that its projector knows is a table.
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    # Its positions are a grid of rows and columns that make up the width.
    "reformer": lambda s: {
        "axial_pos_embds_dim": [s.grown("width", s.width) // 3, s.grown("width", s.width) * 2 // 3],
        "axial_pos_shape": [8, 20],
        "is_decoder": True,
    },
    # A series of which nothing is to be foretold has no decoder.
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    # The number of its picture token is looked up by its text.
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGA": 91, "IMGIMGB": 92}},
}
# Types whose defaults transformers itself does not take, or that leave a part out -> what they are first made with.
DEFAULTS: dict[str, dict[str, Any]] = {}
