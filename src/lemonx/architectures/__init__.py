"""The families, one file each; a file registers itself where it is defined.

Installed packages may bring more, by entry points of the group `lemonx.architectures`. For the length of a job a user's
own table, or an inferred one, can stand in for a model type (`using`).
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint, UnknownArchitecture
from lemonx.specs.family import REGISTRY, Architecture, registered

# Fields by which a model is not what the other fields of config.json, and the files beside it, say it is.
_ELSEWHERE = {
    "quantization_config": "dequantise the model and save it again first",
    "configuration_files": "load the model with transformers and save it again, as another file replaces this one",
    "transformers_weights": "load the model with transformers and save it again, as another file replaces its weights",
    "fusion_config": "remove it, as it replaces modules of the model",
    "distributed_config": "remove it, as it spreads the model over processes",
}


# The entry points by which packages bring families.
GROUP = "lemonx.architectures"
_STAND_INS: ContextVar[Mapping[str, Architecture] | None] = ContextVar("stand_ins", default=None)


def families() -> Mapping[str, Architecture]:
    """Every registered family by model type."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {**_installed(), **REGISTRY, **(_STAND_INS.get() or {})}


@contextmanager
def using(family: Architecture) -> Generator[None]:
    """A context in which this is the family of its model types."""
    token = _STAND_INS.set({**(_STAND_INS.get() or {}), **dict.fromkeys(family.model_types, family)})
    try:
        yield
    finally:
        _STAND_INS.reset(token)


@cache
def _installed() -> Mapping[str, Architecture]:
    """The families that installed packages bring; one that lemonx has itself stays as it is."""
    found: dict[str, Architecture] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found |= {name: replace(family, table=_package(point)) for name, family in _loaded(point).items()}
    return found


def _loaded(point: EntryPoint) -> Mapping[str, Architecture]:
    with registered() as new:
        try:
            point.load()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UnknownArchitecture(
                f"the tables of the package {_package(point)} cannot be loaded ({reason})", "mend it, or uninstall it"
            ) from error
    return new


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


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
