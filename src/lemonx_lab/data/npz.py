"""Images and labels in an .npz file: x_train, y_train, x_test, y_test, or images and labels."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lemonx.errors import BadData
from lemonx.guards.limits import INFLATED, MOST_INFLATION
from lemonx_lab.data import Prepared
from lemonx_lab.data.files import UNREADABLE_ARRAY, UserPath, open_data, reason
from lemonx_lab.data.labels import integers
from lemonx_lab.data.model import Model
from lemonx_lab.data.pixels import ImageOptions, arrays
from lemonx_lab.data.splitting import held_out

_SPLIT = ("x_train", "y_train", "x_test", "y_test")
_WHOLE = ("images", "labels")
_FRACTION = 0.1


class Options(ImageOptions):
    path: UserPath


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """The images of the file; if it has no test images, a tenth, by the hash of their index, is for validation."""
    found, where = _read(options.path), str(options.path)
    if set(_SPLIT) <= set(found):
        labels, test_labels = found["y_train"], found["y_test"]
        train, test = _images(found["x_train"], where), _images(found["x_test"], where)
    else:
        images, numbers = _images(found["images"], where), found["labels"]
        if images.shape[:1] != numbers.shape[:1]:
            raise BadData(
                f"has {len(images)} images and labels of shape {numbers.shape}", "give one label per image", file=where
            )
        out = np.array([held_out(f"image {number}", _FRACTION) for number in range(len(images))], bool)
        train, labels, test, test_labels = images[~out], numbers[~out], images[out], numbers[out]
    labels, test_labels = (
        each[:, 0] if each.ndim == 2 and each.shape[1] == 1 else each for each in (labels, test_labels)
    )
    return arrays(train, test, integers(labels, test_labels, where), options, seed, where)


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the file that are wanted; pickled objects are never loaded."""
    try:
        with open_data(path) as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadData("is not an .npz file", "write it with numpy.savez", file=path)
            wanted = next((names for names in (_SPLIT, _WHOLE) if set(names) <= set(archive.files)), None)
            if wanted is None:
                raise BadData(
                    f"holds the arrays {', '.join(archive.files) or 'none'}",
                    f"name them {', '.join(_SPLIT)}, or {', '.join(_WHOLE)}",
                    file=path,
                )
            _check_sizes(archive, path)
            return {name: archive[name] for name in wanted}
    except (*UNREADABLE_ARRAY, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise BadData(
            f"is not an .npz file of numbers ({reason(error)})", "write it with numpy.savez", file=path
        ) from None


def _check_sizes(archive: Any, path: Path) -> None:
    """BadData if an array would expand far more than compressed images do."""
    for info in archive.zip.infolist():
        if info.file_size > max(MOST_INFLATION * info.compress_size, INFLATED):
            raise BadData(
                f"holds {info.filename}, which grows to more than {MOST_INFLATION} times its size, as no images do",
                "write it again",
                file=path,
            )


def _images(images: np.ndarray, where: str) -> torch.Tensor:
    """Images of any usual layout as (number, channels, height, width): uint8, or floats in [0, 1]."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3):
        raise BadData(
            f"has images of shape {images.shape}",
            "give (number, height, width), with 1 or 3 channels second or last",
            file=where,
        )
    if np.issubdtype(images.dtype, np.floating):
        if images.size and not (images.min() >= 0 and images.max() <= 1):  # NaN fails both
            raise BadData(
                f"has images with values from {images.min()} to {images.max()}",
                "give uint8, or floats in [0, 1]",
                file=where,
            )
        images = images.astype(np.float32)
    elif images.dtype != np.uint8:
        raise BadData(f"has images of {images.dtype}", "give uint8, or floats in [0, 1]", file=where)
    return torch.from_numpy(np.ascontiguousarray(images))
