"""The model types of the installed transformers, the classes that its Auto classes build for them, and tiny models."""

from __future__ import annotations

from functools import cache
from typing import Any

from lemonx.inference.tiny_sizes import Sizes
from lemonx.verification.float64 import Float64
from lemonx_lab.survey.configs import tiny_config

# The tasks that are counted apart: every type is surveyed in each of these that it has a class for.
COUNTED = ("CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "CTC", "SEQ_TO_SEQ_CAUSAL_LM")
# A type that has none of those is surveyed once, in the first of these: heads before bare models, whose outputs grow.
OTHERS = (
    *("SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "MULTIMODAL_LM"),
    *("SEQUENCE_CLASSIFICATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION", "SEMANTIC_SEGMENTATION"),
    *("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "MASKED_IMAGE_MODELING", "PRETRAINING"),
    *("ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM"),
    *("TIME_SERIES_PREDICTION", "TEXT_RECOGNITION", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "POSE_ESTIMATION"),
    *("IMAGE_TO_IMAGE", "TABLE_RECOGNITION", "IMAGE_MATTING", "RNNT", "TDT", "RETRIEVAL", "IMAGE", "BACKBONE"),
)
BARE = "BARE"
# Parameters of a model that is still tiny.
MOST = 60e6


def types() -> list[str]:
    """Every model type for which some Auto class builds a model."""
    return sorted(set().union(*_mappings().values()))


def tasks(model_type: str) -> list[str]:
    """The tasks in which a type is surveyed."""
    mappings = _mappings()
    counted = [task for task in COUNTED if model_type in mappings[task]]
    return counted or [task for task in (*OTHERS, BARE) if model_type in mappings[task]][:1]


def class_for(model_type: str, task: str) -> Any:
    """The model class of a type for a task."""
    import transformers

    name = _mappings()[task][model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


@cache
def _mappings() -> dict[str, dict[str, str | tuple[str, ...]]]:
    """Task -> model type -> the name of its class, as transformers' Auto classes have it."""
    from transformers.models.auto import modeling_auto

    known = {name: value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
    found = {task: dict(known.get(f"MODEL_FOR_{task}_MAPPING_NAMES", {})) for task in (*COUNTED, *OTHERS)}
    return {**found, BARE: dict(known["MODEL_MAPPING_NAMES"])}


def build(model_class: Any, model_type: str, sizes: Sizes) -> Any:
    """A tiny model in float64 and eval mode, as its class initialises it."""
    import torch

    config = _config(model_class, model_type, sizes)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST:
        raise MemoryError(f"{size / 1e6:.0f}M parameters")
    config = _config(model_class, model_type, sizes)
    torch.manual_seed(0)
    with Float64():
        return model_class(config).double().eval()


def _config(model_class: Any, model_type: str, sizes: Sizes) -> Any:
    """A tiny config of the kind that a class wants; a model that writes on from a text does not see what follows."""
    config = _of_class(model_class, tiny_config(model_type, sizes))
    writes = class_for(model_type, "CAUSAL_LM") is model_class if model_type in _mappings()["CAUSAL_LM"] else False
    if writes and getattr(config, "is_decoder", None) is False and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    return config


def _of_class(model_class: Any, config: Any) -> Any:
    """The part of a config that a class wants: some types list a class of one of their parts."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return next((part for part in parts if isinstance(part, wanted)), config)
