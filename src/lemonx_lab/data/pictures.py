"""Images with labels, for image classification: in folders, in MNIST's IDX files, in .npz files."""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from lemonx.errors import BadData
from lemonx.guards.limits import INFLATED, LARGEST_PICTURE, MOST_INFLATION
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import Data, Example, Examples, digest, held_out, split, spread, stack
from lemonx_lab.data.files import UserPath, open_data, read_bytes, reading, require, require_folder, visible
from lemonx_lab.data.labels import Labels, classes
from lemonx_lab.data.metrics import accuracy
from lemonx_lab.data.model import Model

if TYPE_CHECKING:
    from PIL import Image

# Gives the pixels of images in [0, 1], channels first, by their indices, five random numbers each, and what to augment.
Read = Callable[[np.ndarray, np.ndarray, Sequence[str]], torch.Tensor]
# Gives an image of PIL's for an item of the data.
Decode = Callable[[Any], "Image.Image"]
# Inception's random crop: shares of the area, and ratios of width to height.
_AREAS, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
# Small images in arrays are shifted instead, by up to this share of their size.
_SHIFT = 1 / 8
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# The names of the folder for validation beside `train`.
_VALIDATION = ("validation", "valid", "val", "test")
# MNIST's own names. Some copies have a dot in place of the last hyphen.
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# The third byte of an IDX file names the type of its numbers, which are big-endian.
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# The arrays of an .npz file: with test images, or without.
_SPLIT, _WHOLE = ("x_train", "y_train", "x_test", "y_test"), ("images", "labels")


class Images(Examples):
    """Images by index, at most `limit` of them, augmented if they are for training."""

    def __init__(
        self, read: Read, labels: np.ndarray, options: Pictures, seed: int | None, limit: int | None = None
    ) -> None:
        self._read, self._options = read, options
        self._chosen = spread(len(labels), limit)
        super().__init__(len(self._chosen), seed)
        self._labels = torch.from_numpy(labels[self._chosen])
        self._augment = options.augment if seed is not None else ()

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        pixels = self._read(self._chosen[np.asarray(indices)], self.uniforms(indices, 5), self._augment)
        pixels, labels = self._options.normalised(pixels), self._labels[torch.as_tensor(indices)]
        return [{"pixel_values": each, "labels": label} for each, label in zip(pixels, labels, strict=True)]


class Pictures(Data):
    """The options that all images have in common: pixels in [0, 1] become (pixel - mean) / std."""

    image_size: int | None = Field(None, ge=1, le=LARGEST_PICTURE)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    augment: tuple[Literal["crop", "flip"], ...] = ()
    validation_examples: int | None = Field(None, ge=1)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in [0, 1], channels third from the end, by the mean and deviation of each channel (or of all)."""
        for field, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, pixels.shape[-3]):
                raise BadData(
                    f"{field} has {len(values)} values for images of {pixels.shape[-3]} channels",
                    "give one per channel",
                )
        mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def images(self, reads: Sequence[Read], labels: Labels, seen: str, shape: Sequence[int], seed: int) -> Prepared:
        """Examples of images of one shape (channels, height, width)."""
        self.normalised(torch.empty(*shape))  # a wrong number of means is known now, not in the first step
        channels, high, wide = shape
        size = high if high == wide else [high, wide]
        fields = {"num_labels": labels.classes, "image_size": size, "num_channels": channels}
        train = Images(reads[0], labels.train, self, seed)
        validation = Images(reads[1], labels.validation, self, None, self.validation_examples)
        return Prepared(train, validation, stack, seen, fields, accuracy)

    def arrays(self, sides: Sequence[Sequence[np.ndarray]], seed: int) -> Prepared:
        """Examples of images in memory: images and labels for training, and for validation."""
        images, numbers = [], []
        for pictures, labels in sides:
            labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
            fits = labels.ndim == 1 and labels.shape == pictures.shape[:1] and labels.size
            if not fits or labels.dtype.kind not in "iu":
                raise BadData(
                    f"has images of shape {pictures.shape} and labels of {labels.dtype} and shape {labels.shape}",
                    "give some images, and one integer per image",
                    file=self.where,
                )
            images.append(_channels_first(pictures, self.where))
            numbers.append(labels.tolist())
        if images[0].shape[1:] != images[1].shape[1:]:
            shapes = f"{tuple(images[0].shape[1:])} and {tuple(images[1].shape[1:])}"
            raise BadData(
                f"has training and validation images of different shapes, {shapes}",
                "give them the same shape",
                file=self.where,
            )
        labels = classes(numbers, self.where)
        seen = digest([*(each.numpy() for each in images), labels.train, labels.validation])
        images = [_resized(each, self.image_size) for each in images]
        return self.images([partial(_in_memory, each) for each in images], labels, seen, images[0].shape[1:], seed)


def _in_memory(images: torch.Tensor, indices: np.ndarray, draws: np.ndarray, augment: Sequence[str]) -> torch.Tensor:
    pixels = _as_float(images[torch.from_numpy(indices)])
    if not augment:
        return pixels
    return torch.stack([_shifted(each, draw, augment) for each, draw in zip(pixels, draws, strict=True)])


def _shifted(pixels: torch.Tensor, draw: np.ndarray, augment: Sequence[str]) -> torch.Tensor:
    """An image, shifted over a black background and mirrored, as the random numbers say."""
    if "flip" in augment and draw[0] < 0.5:
        pixels = pixels.flip(-1)
    if "crop" in augment:
        high, wide = pixels.shape[-2:]
        far = (max(1, round(high * _SHIFT)), max(1, round(wide * _SHIFT)))
        top, left = (int(share * (2 * most + 1)) for share, most in zip(draw[1:3], far, strict=True))
        padded = F.pad(pixels, (far[1], far[1], far[0], far[0]))
        pixels = padded[:, top : top + high, left : left + wide]
    return pixels


def _channels_first(images: np.ndarray, where: str) -> torch.Tensor:
    """Images of any usual layout as (number, channels, height, width): uint8, or floats in [0, 1]."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3):
        remedy = "give images in three dimensions, or in four with 1 or 3 channels second or last"
        raise BadData(f"has images of {images.dtype} and shape {images.shape}", remedy, file=where)
    if np.issubdtype(images.dtype, np.floating):
        if images.size and not (images.min() >= 0 and images.max() <= 1):  # NaN fails both
            found = f"has images with values from {images.min()} to {images.max()}"
            raise BadData(found, "give uint8, or floats in [0, 1]", file=where)
        images = images.astype(np.float32)
    elif images.dtype != np.uint8:
        raise BadData(f"has images of {images.dtype}", "give uint8, or floats in [0, 1]", file=where)
    return torch.from_numpy(np.ascontiguousarray(images))


def _as_float(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images


def _resized(images: torch.Tensor, size: int | None) -> torch.Tensor:
    """The images in size x size pixels."""
    if size is None or tuple(images.shape[-2:]) == (size, size):
        return images
    return F.interpolate(_as_float(images), (size, size), mode="bilinear", antialias=True).clamp(0, 1)


class Idx(Pictures):
    """A folder with the four IDX files of MNIST and its successors, gzipped or not; its test files are validation."""

    path: UserPath

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        train, train_labels, test, test_labels = (read_idx(self._find(name)) for name in _IDX)
        return self.arrays([(train, train_labels), (test, test_labels)], seed)

    def _find(self, name: str) -> Path:
        """The file of this name, under any of its spellings."""
        spelled = [f"{each}{end}" for each in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
        for each in spelled:
            if (require_folder(self.path) / each).is_file():
                return self.path / each
        raise BadData(f"has no {name} (or {name}.gz)", f"put {', '.join(_IDX)} there", file=self.path)


def read_idx(path: Path) -> np.ndarray:
    """The array of an IDX file: two zero bytes, type, number of dimensions, 4 bytes for each dimension, numbers."""
    data = read_bytes(path)
    if data[:2] == b"\x1f\x8b":
        most = max(MOST_INFLATION * len(data), INFLATED)
        with reading(path, "download it again"):
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)
        _require_size("", len(data), most, path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES or data[3] not in range(1, 5):
        found = f"is not an IDX file (it starts with {data[:4].hex() or 'nothing'})"
        raise BadData(found, "download it again", file=path)
    start, dtype = 4 + 4 * data[3], np.dtype(_TYPES[data[2]])
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, start, 4)]
    expected = start + math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        found = f"has {len(data)} bytes, but its header promises {expected} (shape {tuple(shape)})"
        raise BadData(found, "download it again", file=path)
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _require_size(subject: str, size: int, most: int, path: Path) -> None:
    """Raise if a compressed file grows more than images do."""
    if size > most:
        found = f"{subject}grows to more than {MOST_INFLATION} times its size, as no images do"
        raise BadData(found, "download it again", file=path)


class Npz(Pictures):
    """Images and labels in an .npz file: x_train, y_train, x_test, y_test, or images and labels."""

    path: UserPath

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """The images of the file; without test images a tenth, by the hash of their index, is for validation."""
        found = self._read()
        if len(found) == len(_SPLIT):
            return self.arrays([found[:2], found[2:]], seed)
        images, labels = found
        if not images.ndim or images.shape[:1] != labels.shape[:1]:
            found = f"has images of shape {images.shape} and labels of shape {labels.shape}"
            raise BadData(found, "give one label per image", file=self.path)
        sides = split((f"image {number}" for number in range(len(images))), 0.1)
        return self.arrays([(images[side], labels[side]) for side in sides], seed)

    def _read(self) -> list[np.ndarray]:
        """The arrays of the file that are wanted; pickled objects are never loaded."""
        with open_data(self.path) as file, reading(self.path, "write it with numpy.savez"):
            archive: Any = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it holds one array, without a name")
            wanted = next((names for names in (_SPLIT, _WHOLE) if set(names) <= set(archive.files)), None)
            if wanted is None:
                raise BadData(
                    f"holds the arrays {', '.join(archive.files) or 'none'}",
                    f"name them {', '.join(_SPLIT)}, or {', '.join(_WHOLE)}",
                    file=self.path,
                )
            for info in archive.zip.infolist():
                most = max(MOST_INFLATION * info.compress_size, INFLATED)
                _require_size(f"holds {info.filename}, which ", info.file_size, most, self.path)
            return [archive[name] for name in wanted]


class Decoded(Pictures):
    """The options of images that are decoded when they are read."""

    image_size: int = Field(224, ge=1, le=LARGEST_PICTURE)  # pyright: ignore[reportIncompatibleVariableOverride]
    channels: Literal[1, 3] = 3

    def stored(self, sides: Sequence[Any], decode: Decode, labels: Labels, seen: str, seed: int) -> Prepared:
        """Examples of images that `decode` makes of the items of both sides."""
        shape = (self.channels, self.image_size, self.image_size)
        reads = [partial(_from_files, stored, decode, self.image_size, self.channels) for stored in sides]
        return self.images(reads, labels, seen, shape, seed)


def _from_files(
    stored: Any,
    decode: Decode,
    size: int,
    channels: int,
    indices: np.ndarray,
    draws: np.ndarray,
    augment: Sequence[str],
) -> torch.Tensor:
    pairs = zip(indices.tolist(), draws, strict=True)
    return torch.stack([pixels(decode(stored[index]), size, channels, augment, draw) for index, draw in pairs])


class Folder(Decoded):
    """A folder of images, one folder per class, read when they are needed."""

    path: UserPath
    validation: UserPath | None = None

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """The images of path/train and path/val, or of `path` with a twentieth held out by the hash of the path.

        The digest covers paths and sizes: reading every image of a large folder would take longer than a short run.
        """
        require("PIL", "data of images")
        root = require_folder(self.path)
        train_root = root / "train" if (root / "train").is_dir() else root
        inside = next((root / name for name in _VALIDATION if (root / name).is_dir()), None)
        validation_root = self.validation or (inside if train_root != root else None)
        train = _by_class(train_root)
        if validation_root is not None:
            held = _by_class(validation_root)
        else:
            held = {path: name for path, name in train.items() if held_out(path.relative_to(root).as_posix())}
            train = {path: name for path, name in train.items() if path not in held}
        labels = classes([[*train.values()], [*held.values()]], self.where, sorted({*train.values()}))
        if not held:
            raise BadData("has too few images to hold some out", "give a validation folder", file=root)
        sides = ((train_root, train), (validation_root or root, held))
        names = [f"{path.relative_to(base).as_posix()} {path.stat().st_size}" for base, side in sides for path in side]
        made = self.stored([[*train], [*held]], open_image, labels, digest(names), seed)
        # One of each class, so that a folder of something else is known now, not in the middle of a run.
        firsts = np.unique(labels.train, return_index=True)[1]
        made.train.__getitems__(firsts.tolist())
        made.validation.__getitems__([0])
        return made


def _by_class(root: Path) -> dict[Path, str]:
    """The images below a folder, each with its class: the name of the folder inside `root` that holds it."""
    found: dict[Path, str] = {}
    folders = (each for each in require_folder(root).iterdir() if each.is_dir() and not each.name.startswith("."))
    for folder in sorted(folders):
        images = [path for path in visible(folder) if path.suffix.lower() in _SUFFIXES]
        if not images:
            known = ", ".join(sorted(_SUFFIXES))
            raise BadData(f"has no image ({known})", "add some, or remove the folder", file=folder)
        found |= dict.fromkeys(images, folder.name)
    return found


def pixels(image: Image.Image, size: int, channels: int, augment: Sequence[str], draw: np.ndarray) -> torch.Tensor:
    """An image of PIL's in size x size pixels, in [0, 1]: its middle square, or a crop as drawn."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    image = image.convert("RGB" if channels == 3 else "L")
    if "crop" in augment:
        box = _crop(image.width, image.height, draw)
        image = image.resize((size, size), Pillow.Resampling.BICUBIC, box=box)
    else:
        image = ImageOps.fit(image, (size, size), Pillow.Resampling.BICUBIC)
    array = torch.from_numpy(np.array(image, np.float32) / 255).reshape(size, size, channels).permute(2, 0, 1)
    return array.flip(-1) if "flip" in augment and draw[4] < 0.5 else array.contiguous()


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

    with open_data(path) as file, reading(path, "remove it"), Pillow.open(file) as image:
        image.load()
        return image
