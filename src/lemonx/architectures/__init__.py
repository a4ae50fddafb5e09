"""The families, one file each; a file registers itself where it is defined."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint, UnknownArchitecture
from lemonx.specs.family import REGISTRY, Architecture

# Fields by which a model is not what the other fields of config.json, and the files beside it, say it is.
_ELSEWHERE = {
    "quantization_config": "dequantise the model and save it again first",
    "configuration_files": "load the model with transformers and save it again, as another file replaces this one",
    "transformers_weights": "load the model with transformers and save it again, as another file replaces its weights",
    "fusion_config": "remove it, as it replaces modules of the model",
    "distributed_config": "remove it, as it spreads the model over processes",
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
            "names neither a model_type of transformers nor an architecture of timm that lemonx supports",
            "give a folder that transformers saved",
            file=CONFIG,
        )
    if model_type not in known:
        near = difflib.get_close_matches(model_type[:80], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`lemonx architectures` lists what is supported"
        raise UnknownArchitecture(f"has model_type {model_type!r}, which lemonx does not support", hint, file=CONFIG)
    refuse_code(config)
    return known[model_type]


def refuse_elsewhere(config: Mapping[str, Any]) -> None:
    """BadCheckpoint if config.json sends whoever reads it elsewhere."""
    for name, remedy in _ELSEWHERE.items():
        if config.get(name):
            raise BadCheckpoint(f"has a {name}", remedy, file=CONFIG)


def refuse_code(config: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> None:
    """UnknownArchitecture if config.json, or a part of it, says that the model is code of its own."""
    whole = whole or config
    if config.get("auto_map"):
        raise UnknownArchitecture(
            "has an auto_map, so the model brings its own code, which lemonx never runs",
            f"if transformers' own {model_type_of(whole)!r} has the same weights, remove auto_map",
            file=CONFIG,
        )
    for part in config.values():
        if isinstance(part, Mapping):
            refuse_code(part, whole)
