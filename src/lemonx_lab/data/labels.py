"""From labels as they are stored to 0, 1, 2 ..., the same for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lemonx.errors import BadData
from lemonx.guards.limits import MOST_LABELS
from lemonx_lab.data.examples import SIDES
from lemonx_lab.data.files import reading

# How many classes a message names.
_SHOWN = 20


class Labels(NamedTuple):
    """Labels of the training and validation examples, and the number of classes (0: real values)."""

    train: np.ndarray
    validation: np.ndarray
    classes: int


def classes(sides: Sequence[Sequence[Any]], where: str, order: Sequence[Any] | None = None) -> Labels:
    """Classes, numbered in `order` if given. Without it integers stay, and names are sorted (by value if they can be).

    >>> classes([["10", "9", "10"], ["9"]], "x").train.tolist()
    [1, 0, 1]
    """
    found = set(sides[0])
    if len(found) < 2:
        raise BadData(
            f"has training examples of {len(found)} class{'es' * (len(found) != 1)}",
            "give examples of at least 2",
            file=where,
        )
    order = _order(found, where) if order is None else order
    numbers = {label: number for number, label in enumerate(order)}
    for side, labels in zip(SIDES, sides, strict=True):
        unknown = next((label for label in labels if label not in numbers), None)
        if unknown is not None:
            known = ", ".join(map(str, order[:_SHOWN])) + ", ..." * (len(order) > _SHOWN)
            raise BadData(
                f"has the {side} label {unknown!r}, which is none of {known}",
                "correct it, or give training examples of it",
                file=where,
            )
    train, validation = (np.array([numbers[label] for label in side], np.int64) for side in sides)
    return Labels(train, validation, len(order))


def _order(found: set[Any], where: str) -> Sequence[Any]:
    if any(isinstance(label, float) for label in found):
        raise BadData("has real numbers as labels", "set regression: true, or give one integer per example", file=where)
    if not all(isinstance(label, int) for label in found):
        try:
            return sorted(found, key=int)
        except ValueError:
            return sorted(found)
    if odd := [label for label in found if not 0 <= label < MOST_LABELS]:
        raise BadData(f"has the label {odd[0]}", f"number the classes from 0, below {MOST_LABELS}", file=where)
    return range(max(found) + 1)


def reals(sides: Sequence[Sequence[Any]], where: str) -> Labels:
    """Labels that are real values."""
    with reading(where, "give a number for each example, or remove regression: true"):
        train, validation = (np.array([float(label) for label in side], np.float32) for side in sides)
    if not (np.isfinite(train).all() and np.isfinite(validation).all()):
        raise BadData("has a label that is not finite", "remove that example", file=where)
    return Labels(train, validation, 0)
