"""A folder of images, one folder per class, read when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LARGEST_PICTURE
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import Example, Examples, digest, stack
from lemonx_lab.data.files import UserPath, require_folder, visible
from lemonx_lab.data.labels import require_classes
from lemonx_lab.data.metrics import accuracy
from lemonx_lab.data.model import Model
from lemonx_lab.data.pixels import ImageOptions, normalise, open_image, pixels, require_pillow
from lemonx_lab.data.splitting import FRACTION, held_out, spread

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# What the folder for validation is called beside `train`.
_VALIDATION = ("validation", "valid", "val", "test")


class Options(ImageOptions):
    path: UserPath
    validation: UserPath | None = None
    image_size: int = Field(224, ge=1, le=LARGEST_PICTURE)  # pyright: ignore[reportIncompatibleVariableOverride]
    channels: Literal[1, 3] = 3


class Labelled(NamedTuple):
    """A file and the number of its class."""

    path: Path
    label: int


class FileImages(Examples):
    """Images decoded when they are read."""

    def __init__(self, files: Sequence[Labelled], options: Options, seed: int | None) -> None:
        super().__init__(seed)
        self._files, self._options = files, options
        self._augment = options.augment if seed is not None else ()

    def __len__(self) -> int:
        return len(self._files)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        size, channels = self._options.image_size, self._options.channels
        examples = []
        for index, draw in zip(indices, self.uniforms(indices, 5), strict=True):
            image = pixels(open_image(self._files[index].path), size, channels, self._augment, draw)
            label = torch.tensor(self._files[index].label)
            examples.append({"pixel_values": normalise(image, self._options), "labels": label})
        return examples


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """The images of path/train and path/val, or of `path` with a twentieth held out by the hash of the path.

    The digest covers paths and sizes: reading every image of a large folder would take longer than a short run.
    """
    require_pillow()
    root = require_folder(options.path)
    train_root = root / "train" if (root / "train").is_dir() else root
    inside = next((root / name for name in _VALIDATION if (root / name).is_dir()), None)
    validation_root = options.validation or (inside if train_root != root else None)
    classes = _classes(train_root)
    files = _labelled(train_root, classes)
    if validation_root is not None:
        held = _labelled(require_folder(validation_root), classes)
    else:
        out = [held_out(each.path.relative_to(root).as_posix(), FRACTION) for each in files]
        held = [each for each, is_out in zip(files, out, strict=True) if is_out]
        files = [each for each, is_out in zip(files, out, strict=True) if not is_out]
        validation_root = root
    if not held:
        raise BadData("has too few images to hold some out", "give a validation folder", file=options.path)
    held = [held[place] for place in spread(len(held), options.validation_examples)]
    # One of each class, so that a folder of something else is known now, not in the middle of a run.
    for first in [*{each.label: each for each in reversed(files)}.values(), held[0]]:
        normalise(pixels(open_image(first.path), options.image_size, options.channels, (), np.zeros(5)), options)
    sides = ((train_root, files), (validation_root, held))
    names = [
        f"{each.path.relative_to(base).as_posix()} {each.path.stat().st_size}" for base, side in sides for each in side
    ]
    return Prepared(
        FileImages(files, options, seed),
        FileImages(held, options, None),
        stack,
        digest(names),
        {"num_labels": len(classes), "image_size": options.image_size, "num_channels": options.channels},
        accuracy,
    )


def _classes(root: Path) -> dict[str, int]:
    """The classes of a folder, numbered in alphabetical order."""
    names = sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
    require_classes(len(names), f"{root}, which must hold a folder for each class")
    return {name: number for number, name in enumerate(names)}


def _labelled(root: Path, classes: dict[str, int]) -> list[Labelled]:
    """The images of all classes; a class without any is an error."""
    unknown = sorted(each.name for each in root.iterdir() if each.is_dir() and each.name not in classes)
    unknown = [name for name in unknown if not name.startswith(".")]
    if unknown:
        raise BadData(
            f"has the class {unknown[0]!r}, which has no training images", "remove it, or give some", file=root
        )
    files = []
    for name, number in classes.items():
        found = visible(root / name) if (root / name).is_dir() else []
        kept = [path for path in found if path.suffix.lower() in _SUFFIXES]
        if not kept:
            raise BadData(
                f"has no image ({', '.join(sorted(_SUFFIXES))})", "add some, or remove the folder", file=root / name
            )
        files += [Labelled(path, number) for path in kept]
    return files
