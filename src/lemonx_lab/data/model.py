"""The model as the data sees it, and a check that the two fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.errors import BadData

if TYPE_CHECKING:
    from lemonx_lab.data import Prepared

# Where configs keep the number of positions they can tell apart.
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Model:
    """The model to train, as far as it exists: its config (or nothing), and its folder."""

    config: Mapping[str, Any]
    folder: Path | None


def require_fit(prepared: Prepared, config: Mapping[str, Any]) -> None:
    """Raises unless a model of `config` can read the examples and has an output for each label."""
    needs = prepared.model
    vocabulary = config.get("vocab_size")
    if vocabulary is not None and vocabulary < needs.get("vocab_size", 0):
        raise BadData(
            f"the model has a vocabulary of {vocabulary}, but the data needs {needs['vocab_size']}",
            "use the tokenizer that the model was trained with, or train another model",
        )
    for field in _POSITIONS:
        positions = config.get(field)
        if isinstance(positions, int) and positions < (prepared.length or 0):
            raise BadData(
                f"the model has {positions} positions ({field}), but the data has examples of {prepared.length} tokens",
                f"set length to {positions} or less",
            )
    # A model of text and images has the sizes of its images in a part of its config.
    images = config.get("vision_config") or config
    for field, remedy in (("image_size", "set image_size"), ("num_channels", "choose other images")):
        if field in needs and images.get(field) is not None and _pair(images[field]) != _pair(needs[field]):
            raise BadData(f"the model has {field} = {images[field]}, but the data has {needs[field]}", remedy)
    # A model that is no classifier yet has no labels. transformers writes none where there are two.
    if any("Classification" in name for name in config.get("architectures") or ()):
        labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))
        if labels != needs.get("num_labels", labels):
            raise BadData(
                f"the model has {labels} labels, but the data has {needs['num_labels']}",
                f"choose a checkpoint without a head, or with a head for {needs['num_labels']} labels",
            )


def _pair(size: Any) -> tuple[Any, ...]:
    """A size as height and width."""
    return tuple(size) if isinstance(size, list | tuple) else (size, size)
