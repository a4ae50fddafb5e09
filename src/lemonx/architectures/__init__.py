"""The families, one file each; a file registers itself where it is defined."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from lemonx.errors import BadCheckpoint, UnknownArchitecture
from lemonx.specs.family import REGISTRY, Architecture

# Fields by which a model is not what the other fields of config.json, and the files beside it, say it is.
_ELSEWHERE = {
    "quantization_config": "dequantise the model and save it again first",
    "configuration_files": "another file stands in for it; load the model with transformers and save it again",
    "transformers_weights": "another file stands in for its weights; load the model with transformers, save it again",
    "fusion_config": "other modules stand in for the model's own; take it out",
    "distributed_config": "the model would be spread over processes; take it out",
}


def families() -> Mapping[str, Architecture]:
    """Every registered family by model type."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return REGISTRY


def model_type_of(config: Mapping[str, Any]) -> str | None:
    """What config.json calls its family, or the family that knows it without; None if none does."""
    if "model_type" in config:
        return config["model_type"] if isinstance(config["model_type"], str) else None
    return next((name for name, family in families().items() if family.owns(config)), None)


def find(config: Mapping[str, Any]) -> Architecture:
    """The family of a config.json."""
    known, model_type = families(), model_type_of(config)
    if model_type is None:
        raise BadCheckpoint(
            "config.json does not say its model_type, nor an architecture of timm's that has a spec: give a folder "
            "that transformers saved"
        )
    if model_type not in known:
        near = difflib.get_close_matches(model_type[:80], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`lemonx architectures` lists what is supported"
        raise UnknownArchitecture(f"no spec for model_type {model_type!r}: {hint}")
    refuse_code(config)
    return known[model_type]


def refuse_elsewhere(config: Mapping[str, Any]) -> None:
    """BadCheckpoint if config.json sends whoever reads it elsewhere."""
    for name, remedy in _ELSEWHERE.items():
        if config.get(name):
            raise BadCheckpoint(f"config.json has a {name}: {remedy}")


def refuse_code(config: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> None:
    """UnknownArchitecture if config.json, or a part of it, says that the model is code of its own."""
    whole = whole or config
    if config.get("auto_map"):
        raise UnknownArchitecture(
            "config.json has an auto_map: the model is code of its own, which is never run; if transformers' own "
            f"{model_type_of(whole)!r} has the same weights, take auto_map out of config.json"
        )
    for part in config.values():
        if isinstance(part, Mapping):
            refuse_code(part, whole)
