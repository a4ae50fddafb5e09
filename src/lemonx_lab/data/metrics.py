"""Metrics, by scikit-learn and scipy: from a model's outputs and the labels to named numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES, REGRESSION = ("accuracy", "f1", "matthews"), ("pearson", "spearman")


def _figure(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    """One metric. Classes are those of the largest output, and F1 is of label 1."""
    from scipy import stats
    from sklearn import metrics

    if name in REGRESSION:
        values = outputs.astype(np.float64).reshape(len(outputs))
        # A correlation with a constant is undefined. It counts as 0, since there is no information.
        if np.ptp(values) == 0 or np.ptp(labels) == 0:
            return 0.0
        correlation: Any = stats.pearsonr if name == "pearson" else stats.spearmanr
        return float(correlation(values, labels.astype(np.float64)).statistic)
    found = outputs.argmax(-1)
    if name == "f1":
        return float(metrics.f1_score(labels == 1, found == 1, zero_division=0))  # pyright: ignore[reportArgumentType]
    return float((metrics.accuracy_score if name == "accuracy" else metrics.matthews_corrcoef)(labels, found))


@dataclass(frozen=True)
class Metrics:
    """Maps (predictions, labels) to the figures of these names.

    >>> Metrics(("accuracy", "f1"))([[2.0, 1.0], [0.0, 3.0]], [1, 1])
    {'accuracy': 0.5, 'f1': 0.6666666666666666}
    """

    names: tuple[str, ...]

    def __call__(self, predictions: Any, labels: Any) -> dict[str, float]:
        # A model can return more than its logits, and these come first.
        logits = predictions[0] if isinstance(predictions, tuple) else predictions
        return {name: _figure(name, np.asarray(logits), np.asarray(labels)) for name in self.names}


accuracy = Metrics(("accuracy",))
