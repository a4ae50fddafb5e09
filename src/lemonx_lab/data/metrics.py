"""Metrics, by scikit-learn and scipy: from a model's outputs and the labels to named numbers.

A correlation with a constant is undefined. It counts as 0, since there is no information.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

REGRESSION = ("pearson", "spearman")
_KNOWN = ("accuracy", "f1", "matthews", *REGRESSION)


def _figure(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    """One metric; for classes, of the label of the largest output, and F1 of label 1."""
    from scipy import stats
    from sklearn import metrics

    if name in REGRESSION:
        values, labels = outputs.astype(np.float64).reshape(len(outputs)), labels.astype(np.float64)
        if np.ptp(values) == 0 or np.ptp(labels) == 0:
            return 0.0
        found: Any = stats.pearsonr(values, labels) if name == "pearson" else stats.spearmanr(values, labels)
        return float(found.statistic)
    classes = outputs.argmax(-1)
    if name == "accuracy":
        return float(metrics.accuracy_score(labels, classes))
    if name == "f1":
        return float(metrics.f1_score(labels == 1, classes == 1, zero_division=0))  # pyright: ignore[reportArgumentType]
    return float(metrics.matthews_corrcoef(labels, classes))


@dataclass(frozen=True)
class Metrics:
    """Maps (predictions, labels) to the figures of these names.

    >>> Metrics("accuracy", "f1")([[2.0, 1.0], [0.0, 3.0]], [1, 1])
    {'accuracy': 0.5, 'f1': 0.6666666666666666}
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if unknown := set(names) - set(_KNOWN):
            raise ValueError(f"no metric {', '.join(sorted(unknown))}: choose {', '.join(_KNOWN)}")
        object.__setattr__(self, "names", names)

    def __call__(self, predictions: Any, labels: Any) -> dict[str, float]:
        # A model can return more than its logits, and these come first.
        logits = predictions[0] if isinstance(predictions, tuple) else predictions
        return {name: _figure(name, np.asarray(logits), np.asarray(labels)) for name in self.names}


accuracy = Metrics("accuracy")
