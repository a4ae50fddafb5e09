"""Figures of merit: from a model's outputs and the labels to numbers by name."""

from __future__ import annotations

from typing import Any

import numpy as np


def classes(predictions: Any) -> np.ndarray:
    """The label of the largest output of each example."""
    return np.asarray(predictions).argmax(-1)


def accuracy(predictions: Any, labels: Any) -> dict[str, float]:
    """The share of the examples whose largest output is that of their label."""
    return {"accuracy": float((classes(predictions) == np.asarray(labels)).mean())}
