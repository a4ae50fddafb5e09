"""Data to train on: what a task reads, split into training and validation, as a model's forward takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

TASKS = ("causal-lm", "masked-lm", "image-classification", "sequence-classification")


@dataclass(frozen=True)
class Prepared:
    """What a Trainer needs: examples are dicts of tensors that the model's forward takes, labels included.

    `collate` makes a batch of them; `digest` is a sha256 of the data as read; `model` holds the config fields that
    the data decides (vocab_size, num_labels, image_size ...); `metrics` maps (predictions, labels) to figures.
    """

    train: Dataset[Mapping[str, torch.Tensor]]
    validation: Dataset[Mapping[str, torch.Tensor]]
    collate: Callable[[list[Mapping[str, torch.Tensor]]], dict[str, torch.Tensor]]
    digest: str
    model: Mapping[str, Any]
    metrics: Callable[[Any, Any], dict[str, float]] | None = None
