"""From labels as they are stored to 0, 1, 2 ..., the same for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lemonx.errors import BadData
from lemonx.guards.limits import MOST_LABELS


class Labels(NamedTuple):
    """Labels of the training and validation examples, and the number of classes (0: real values)."""

    train: np.ndarray
    validation: np.ndarray
    classes: int


def integers(train: np.ndarray, validation: np.ndarray, where: str, classes: int | None = None) -> Labels:
    """Labels that are class numbers already; `classes` is their number, unless the training labels tell it."""
    for side, labels in (("training", train), ("validation", validation)):
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise BadData(
                f"has {side} labels of {labels.dtype} and shape {labels.shape}",
                "give one integer per example",
                file=where,
            )
        if len(labels) and labels.min() < 0:
            raise BadData(
                f"has the {side} label {labels.min()}, which is negative", "number the classes from 0", file=where
            )
    require_classes(len(np.unique(train)), where)
    count = int(train.max()) + 1 if classes is None else classes
    if count > MOST_LABELS:
        raise BadData(f"has the label {count - 1}", f"use labels below {MOST_LABELS}", file=where)
    for side, labels in (("training", train), ("validation", validation)):
        if len(labels) and labels.max() >= count:
            raise BadData(
                f"has the {side} label {labels.max()}, but only {count} classes",
                "number the classes from 0, and give training examples of each",
                file=where,
            )
    return Labels(train.astype(np.int64), validation.astype(np.int64), count)


def names(train: Sequence[str], validation: Sequence[str], where: str, order: Sequence[str] | None = None) -> Labels:
    """Labels that are names, numbered in `order` if given, else by value where all are integers, else by alphabet.

    >>> names(["10", "9", "10"], ["9"], "x").train.tolist()
    [1, 0, 1]
    """
    found = set(train)
    require_classes(len(found), where)
    if order is None:
        order = sorted(found, key=int) if all(_is_integer(name) for name in found) else sorted(found)
    numbers = {name: number for number, name in enumerate(order)}
    for side, labels in (("training", train), ("validation", validation)):
        unknown = next((name for name in labels if name not in numbers), None)
        if unknown is not None:
            raise BadData(
                f"has the {side} label {unknown!r}, which is none of {', '.join(order)}",
                "correct it, or give training examples of it",
                file=where,
            )
    left, right = (np.array([numbers[name] for name in side], np.int64) for side in (train, validation))
    return Labels(left, right, len(order))


def reals(train: Sequence[str] | Sequence[float], validation: Sequence[str] | Sequence[float], where: str) -> Labels:
    """Labels that are real values."""
    sides = []
    for side, labels in (("training", train), ("validation", validation)):
        try:
            values = np.array([float(label) for label in labels], np.float32)
        except ValueError as error:
            raise BadData(
                f"has a {side} label that is not a number ({error})", "remove regression: true", file=where
            ) from None
        if not np.isfinite(values).all():
            raise BadData(f"has a {side} label that is not finite", "remove that example", file=where)
        sides.append(values)
    return Labels(sides[0], sides[1], 0)


def require_classes(count: int, where: str) -> None:
    """Raise if there is only one class."""
    if count < 2:
        raise BadData(
            f"has training examples of {count} class{'es' * (count != 1)}", "give examples of at least 2", file=where
        )


def _is_integer(name: str) -> bool:
    try:
        int(name)
    except ValueError:
        return False
    return True
