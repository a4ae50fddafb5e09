"""The scaled rotary frequencies of a GGUF file, as config.json says them; transformers' reader leaves them out.

A file names the rule and its numbers (linear, yarn), or holds the factor of every frequency (`rope_freqs.weight`, Llama
3.1 and later). Factors are taken for llama3's rule if that rule gives these factors, and are refused otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lemonx.checkpoints.gguf_file import GgufHeader, Setting
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint

FREQUENCIES = "rope_freqs.weight"
_SETTING = "rope.scaling."
# The settings that a rule reads, and what config.json calls them.
_RULES: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
# What decides nothing: that a model was trained further, and with which length, where the rule does not ask.
_SAID = ("type", "finetuned", "original_context_length")
# The numbers of every published llama3 rule but its factor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Factors are stored in float32.
_NEAR = 1e-5


def is_scaling(setting: str) -> bool:
    """Whether a setting, without the name of its architecture, belongs to a rule of rotary frequencies."""
    return setting.startswith(_SETTING)


def rope_rule(
    header: GgufHeader, kind: str, theta: float, factors: np.ndarray | None, remedy: str, path: Path
) -> dict[str, JsonValue] | None:
    """The rule of the rotary frequencies with base `theta`; None where they are not scaled."""
    given = {
        name.removeprefix(f"{kind}.{_SETTING}"): value
        for name, value in header.settings.items()
        if name.startswith(f"{kind}.{_SETTING}")
    }
    rule = _by_settings(given, kind, remedy, path)
    if factors is None:
        return {**rule, "rope_theta": theta} if rule else None
    if rule:
        raise BadCheckpoint(
            f"scales rotary frequencies twice, by {rule['rope_type']} and by factors", remedy, file=path
        )
    factor = float(factors.max())
    if (factors == 1).all():
        return None
    if not np.allclose(factors, _llama3_factors(len(factors), theta, factor), rtol=_NEAR, atol=0):
        raise BadCheckpoint(f"holds {FREQUENCIES}, and llama3's rule does not give these factors", remedy, file=path)
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3, "rope_theta": theta}


def _by_settings(given: Mapping[str, Setting], kind: str, remedy: str, path: Path) -> dict[str, JsonValue]:
    """The rule that settings name; empty if they name none."""
    named = given.get("type", "none" if given.get("factor", 1.0) == 1.0 else "linear")
    if not isinstance(named, str) or named not in _RULES:
        raise BadCheckpoint(f"scales rotary frequencies by {str(named)[:40]!r}", remedy, file=path)
    known = _RULES[named]
    if named == "none":  # then nothing reads the others
        return {}
    if odd := sorted(given.keys() - known.keys() - set(_SAID)):
        raise BadCheckpoint(f"sets {kind}.{_SETTING}{odd[0]}, which {named} does not read", remedy, file=path)
    rule: dict[str, JsonValue] = {"rope_type": named}
    for setting, field in known.items():
        if (value := given.get(setting)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise BadCheckpoint(f"has {str(value)[:40]} as {kind}.{_SETTING}{setting}", "download it again", file=path)
        rule[field] = value
    if "factor" not in rule:
        raise BadCheckpoint(f"does not say by how much {named} scales rotary frequencies", remedy, file=path)
    return rule


def _llama3_factors(count: int, theta: float, factor: float) -> np.ndarray:
    """By how much llama3's rule slows every frequency down."""
    speeds = theta ** (-np.arange(count) / count)
    original, low, high = (_LLAMA3[name] for name in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"
    ))  # fmt: skip
    turns = original * speeds / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
