"""Metrics: from a model's outputs and the labels to named numbers.

A correlation with a constant is undefined; it counts as 0, since there is no information.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


def _classes(predictions: Any) -> np.ndarray:
    """The label of the largest output of each example."""
    return np.asarray(predictions).argmax(-1)


def _values(predictions: Any) -> np.ndarray:
    """The one output of each example."""
    return np.asarray(predictions, np.float64).reshape(len(predictions))


def _accuracy(predictions: Any, labels: np.ndarray) -> float:
    return float((_classes(predictions) == labels).mean())


def _f1(predictions: Any, labels: np.ndarray) -> float:
    """The harmonic mean of precision and recall of label 1."""
    found, true = _classes(predictions) == 1, labels == 1
    total = found.sum() + true.sum()
    return float(2 * (found & true).sum() / total) if total else 0.0


def _matthews(predictions: Any, labels: np.ndarray) -> float:
    """The correlation of predicted and true labels as indicator variables, of two classes or more."""
    found = _classes(predictions)
    count = max(int(found.max()), int(labels.max())) + 1
    one_hot = np.eye(count)
    found, true = one_hot[found], one_hot[labels]
    found, true = found - found.mean(0), true - true.mean(0)
    return _ratio((found * true).sum(), (found**2).sum(), (true**2).sum())


def _pearson(predictions: Any, labels: np.ndarray) -> float:
    return _correlation(_values(predictions), np.asarray(labels, np.float64))


def _spearman(predictions: Any, labels: np.ndarray) -> float:
    return _correlation(_ranks(_values(predictions)), _ranks(labels))


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    # Of a constant, what is left after its mean is taken off is rounding.
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    return _ratio((a * b).sum(), (a**2).sum(), (b**2).sum())


def _ratio(product: float, left: float, right: float) -> float:
    """A covariance over two deviations."""
    scale = math.sqrt(left) * math.sqrt(right)
    return float(product / scale) if scale > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse.reshape(-1)]


_METRICS: dict[str, Callable[[Any, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}
REGRESSION = ("pearson", "spearman")


@dataclass(frozen=True)
class Metrics:
    """Maps (predictions, labels) to the figures of these names.

    >>> Metrics("accuracy", "f1")([[2.0, 1.0], [0.0, 3.0]], [1, 1])
    {'accuracy': 0.5, 'f1': 0.6666666666666666}
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        unknown = set(names) - set(_METRICS)
        if unknown:
            raise ValueError(f"no metric {', '.join(sorted(unknown))}: choose {', '.join(_METRICS)}")
        object.__setattr__(self, "names", names)

    def __call__(self, predictions: Any, labels: Any) -> dict[str, float]:
        # A model can return more than its logits, and these come first.
        logits = predictions[0] if isinstance(predictions, tuple) else predictions
        return {name: _METRICS[name](logits, np.asarray(labels)) for name in self.names}


accuracy = Metrics("accuracy")
