"""From images to what a vision model reads: cropped, scaled, normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from lemonx.errors import BadData
from lemonx.guards.limits import LARGEST_PICTURE
from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import Example, Examples, digest, stack
from lemonx_lab.data.files import open_data, reason
from lemonx_lab.data.labels import Labels
from lemonx_lab.data.metrics import accuracy
from lemonx_lab.data.splitting import spread

if TYPE_CHECKING:
    from PIL import Image

Augmentation = Literal["crop", "flip"]
# Inception's random crop: shares of the area, and ratios of width to height.
_AREAS, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
# Small images in arrays are shifted instead, by up to this share of their size.
_SHIFT = 1 / 8


class ImageOptions(Strict):
    """What all images have in common: pixels in [0, 1] become (pixel - mean) / std."""

    image_size: int | None = Field(None, ge=1, le=LARGEST_PICTURE)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    augment: tuple[Augmentation, ...] = ()
    validation_examples: int | None = Field(None, ge=1)


def normalise(pixels: torch.Tensor, options: ImageOptions) -> torch.Tensor:
    """Pixels in [0, 1], channels third from the end, by the mean and deviation of each channel (or of all)."""
    for field, values in (("mean", options.mean), ("std", options.std)):
        if len(values) not in (1, pixels.shape[-3]):
            raise BadData(
                f"{field} has {len(values)} values for images of {pixels.shape[-3]} channels", "give one per channel"
            )
    mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (options.mean, options.std))
    return (pixels - mean) / std


class ArrayImages(Examples):
    """Images held in memory, of shape (number, channels, height, width): uint8, or floats in [0, 1]."""

    def __init__(self, images: torch.Tensor, labels: np.ndarray, options: ImageOptions, seed: int | None) -> None:
        super().__init__(seed)
        self._images, self._labels, self._options = images, torch.from_numpy(labels), options
        self._augment = options.augment if seed is not None else ()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        chosen = torch.as_tensor(indices)
        pixels = self._images[chosen]
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        if self._augment:
            draws = self.uniforms(indices, 3)
            pixels = torch.stack([self._drawn(each, draw) for each, draw in zip(pixels, draws, strict=True)])
        pixels = normalise(pixels, self._options)
        return [
            {"pixel_values": each, "labels": label} for each, label in zip(pixels, self._labels[chosen], strict=True)
        ]

    def _drawn(self, pixels: torch.Tensor, draw: np.ndarray) -> torch.Tensor:
        """The image, shifted over a black background and mirrored, as the random numbers say."""
        if "flip" in self._augment and draw[0] < 0.5:
            pixels = pixels.flip(-1)
        if "crop" in self._augment:
            high, wide = pixels.shape[-2:]
            far = (max(1, round(high * _SHIFT)), max(1, round(wide * _SHIFT)))
            top, left = (int(share * (2 * most + 1)) for share, most in zip(draw[1:], far, strict=True))
            padded = F.pad(pixels, (far[1], far[1], far[0], far[0]))
            pixels = padded[:, top : top + high, left : left + wide]
        return pixels


def arrays(
    train: torch.Tensor, validation: torch.Tensor, labels: Labels, options: ImageOptions, seed: int, where: str
) -> Prepared:
    """Examples of images in memory."""
    for side, images, numbers in (("training", train, labels.train), ("validation", validation, labels.validation)):
        if len(images) != len(numbers):
            raise BadData(
                f"has {len(images)} {side} images and {len(numbers)} labels", "give one label per image", file=where
            )
        if not len(images):
            raise BadData(f"has no {side} images", "add some", file=where)
    if train.shape[1:] != validation.shape[1:]:
        shapes = f"{tuple(train.shape[1:])} and {tuple(validation.shape[1:])}"
        raise BadData(
            f"has training and validation images of different shapes, {shapes}", "give them the same shape", file=where
        )
    seen = digest([train.numpy(), validation.numpy(), *labels[:2]])
    train, validation = (_resized(images, options.image_size) for images in (train, validation))
    normalise(torch.empty(train.shape[1:]), options)  # a wrong number of means is known now, not in the first step
    high, wide = train.shape[-2:]
    fields = {
        "num_labels": labels.classes,
        "image_size": high if high == wide else [high, wide],
        "num_channels": train.shape[1],
    }
    kept = spread(len(validation), options.validation_examples)
    return Prepared(
        ArrayImages(train, labels.train, options, seed),
        ArrayImages(validation[torch.from_numpy(kept)], labels.validation[kept], options, None),
        stack,
        seen,
        fields,
        accuracy,
    )


def _resized(images: torch.Tensor, size: int | None) -> torch.Tensor:
    """The images in size x size pixels."""
    if size is None or tuple(images.shape[-2:]) == (size, size):
        return images
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images
    return F.interpolate(pixels, (size, size), mode="bilinear", antialias=True).clamp(0, 1)


def pixels(
    image: Image.Image, size: int, channels: int, augment: Sequence[Augmentation], draw: np.ndarray
) -> torch.Tensor:
    """An image of PIL's in size x size pixels, in [0, 1]: its middle square, or a crop as drawn."""
    from PIL import Image as Pillow

    image = image.convert("RGB" if channels == 3 else "L")
    box = _crop(image.width, image.height, draw) if "crop" in augment else _middle(image.width, image.height)
    image = image.resize((size, size), Pillow.Resampling.BICUBIC, box=box)
    array = torch.from_numpy(np.array(image, np.float32) / 255).reshape(size, size, channels).permute(2, 0, 1)
    return array.flip(-1) if "flip" in augment and draw[4] < 0.5 else array.contiguous()


def _middle(wide: int, high: int) -> tuple[float, float, float, float]:
    """The largest square in the middle."""
    side = min(wide, high)
    left, top = (wide - side) / 2, (high - side) / 2
    return left, top, left + side, top + side


def _crop(wide: int, high: int, draw: np.ndarray) -> tuple[float, float, float, float]:
    """A box of random area, ratio and place; its sides are cut where they exceed the image's."""
    area = wide * high * (_AREAS[0] + (_AREAS[1] - _AREAS[0]) * draw[0])
    ratio = math.exp(math.log(_RATIOS[0]) + math.log(_RATIOS[1] / _RATIOS[0]) * draw[1])
    width, height = min(wide, math.sqrt(area * ratio)), min(high, math.sqrt(area / ratio))
    left, top = (wide - width) * draw[2], (high - height) * draw[3]
    return left, top, left + width, top + height


def open_image(path: Path) -> Image.Image:
    """The decoded image of a file."""
    from PIL import Image as Pillow

    try:
        with open_data(path) as file, Pillow.open(file) as image:
            image.load()
            return image
    except BadData:
        raise
    except Exception as error:  # a broken file can raise nearly anything in a decoder
        raise BadData(f"is not an image that can be read ({reason(error)})", "remove it", file=path) from None


def require_pillow() -> None:
    """Raise if pillow, which decodes images, is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise BadData("images need pillow", "pip install lemonx[lab]") from None
