"""scikit-learn's handwritten digits on a larger canvas, with random rotation, shift, scale, shear and noise.

At 8x8 a small model is soon perfect, and all methods look the same; with distortions there is always more to learn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from lemonx.guards.limits import MOST_EXAMPLES
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import Data, Example, Examples, digest, normals, split, stack
from lemonx_lab.data.files import require
from lemonx_lab.data.metrics import accuracy
from lemonx_lab.data.model import Model

# The largest distortions, drawn uniformly: radians, pixels of the canvas per 16, factors; and the noise's deviation.
ROTATION, SHIFT, SCALE, SHEAR, NOISE = math.radians(15), 1.5, (0.8, 1.2), 0.2, 0.1
_VALIDATION = 0.2
# An original is 8x8; the canvas leaves room around it for the shift.
_MARGIN = 0.75


class Originals(NamedTuple):
    """Images in [0, 1], and what they show."""

    images: torch.Tensor
    labels: torch.Tensor


class DistortedDigits(Examples):
    """`count` examples; number i shows original i (modulo their number), distorted by its draws."""

    def __init__(self, digits: Originals, size: int, count: int, seed: int | None) -> None:
        super().__init__(count, seed)
        self._digits, self._size = digits, size

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        shape = [len(indices), 1, self._size, self._size]
        pixels = self._size**2
        draws = self.uniforms(indices, 6 + pixels + pixels % 2)
        # In float32 a number below 1 can round to 1, whose normal is infinite: rounded last.
        noise = torch.from_numpy(normals(draws[:, 6:])[:, :pixels].astype(np.float32)).view(shape)
        chosen = torch.as_tensor(indices) % len(self._digits.labels)
        grid = F.affine_grid(affine(torch.from_numpy(draws[:, :6].astype(np.float32))), shape, align_corners=False)
        images = F.grid_sample(self._digits.images[chosen].unsqueeze(1), grid, align_corners=False)
        images = (images + NOISE * noise) * 2 - 1
        labels = self._digits.labels[chosen]
        return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def affine(draws: torch.Tensor) -> torch.Tensor:
    """The maps from the canvas to the original, a 2x3 matrix for each row of six numbers in [0, 1)."""
    angle, right, down, shear = (2 * draws[:, :4] - 1).T
    wide, high = (SCALE[0] + (SCALE[1] - SCALE[0]) * draws[:, 4:]).T
    cos, sin = torch.cos(ROTATION * angle), torch.sin(ROTATION * angle)
    skew = SHEAR * shear
    # Canvas to original: the larger the matrix, the smaller the digit.
    rows = torch.stack([cos / wide, (skew * cos - sin) / high, sin / wide, (skew * sin + cos) / high], dim=1)
    matrix = rows.view(-1, 2, 2) / _MARGIN
    shift = torch.stack([right, down], dim=1) * (2 * SHIFT / 16)  # the canvas is 2 wide in these coordinates
    return torch.cat([matrix, -(matrix @ shift.unsqueeze(2))], dim=2)


@functools.cache
def originals() -> tuple[Originals, Originals]:
    """Training and validation digits, split by the hash of their numbers."""
    require("sklearn.datasets", "data of kind digits")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(np.asarray(images, np.float32).reshape(-1, 8, 8) / 16)
    labels = torch.from_numpy(np.asarray(labels, np.int64))
    sides = split((f"digit {number}" for number in range(len(labels))), _VALIDATION)
    train, validation = (Originals(images[side], labels[side]) for side in sides)
    return train, validation


class Digits(Data):
    """Distorted digits: an endless supply for training, and fixed ones from other originals for validation."""

    image_size: int = Field(16, ge=8, le=64)
    examples: int = Field(60_000, ge=1, le=MOST_EXAMPLES)
    validation_examples: int = Field(1024, ge=1, le=MOST_EXAMPLES)

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        train, validation = originals()
        return Prepared(
            DistortedDigits(train, self.image_size, self.examples, seed),
            DistortedDigits(validation, self.image_size, self.validation_examples, None),
            stack,
            digest(tensor.numpy() for digits in (train, validation) for tensor in digits),
            {"num_labels": 10, "image_size": self.image_size, "num_channels": 1},
            accuracy,
        )
