"""IDX files, the format of MNIST and its successors, gzipped or not."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from lemonx.errors import BadData
from lemonx.guards.limits import INFLATED, MOST_INFLATION
from lemonx_lab.data import Prepared
from lemonx_lab.data.files import UserPath, read_bytes, require_folder
from lemonx_lab.data.labels import integers
from lemonx_lab.data.model import Model
from lemonx_lab.data.pixels import ImageOptions, arrays

# The third byte of the file names the type of its numbers, which are big-endian.
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PIECE = 1 << 20
# MNIST's own names. Some copies have a dot where these have the last hyphen.
_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class Options(ImageOptions):
    path: UserPath


def read(path: Path) -> np.ndarray:
    """The array of an IDX file: two zero bytes, type, number of dimensions, 4 bytes for each dimension, numbers."""
    data = read_bytes(path)
    if data[:2] == b"\x1f\x8b":
        data = _unzipped(data, path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES or not data[3]:
        raise BadData(
            f"is not an IDX file (it starts with {data[:4].hex() or 'nothing'})", "download it again", file=path
        )
    dtype, start = np.dtype(_TYPES[data[2]]), 4 + 4 * data[3]
    shape = tuple(int(size) for size in np.frombuffer(data[4:start][: len(data[4:start]) // 4 * 4], ">u4"))
    expected = start + math.prod(shape) * dtype.itemsize
    if len(shape) != data[3] or len(data) != expected:
        raise BadData(
            f"has {len(data)} bytes, but its header promises {expected} (shape {shape})", "download it again", file=path
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _unzipped(data: bytes, path: Path) -> bytes:
    """The content of a gzipped file, unless it expands far more than images do."""
    most, found = max(MOST_INFLATION * len(data), INFLATED), bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while piece := file.read(_PIECE):
                found += piece
                if len(found) > most:
                    raise BadData(
                        f"grows to more than {MOST_INFLATION} times its size, as no images do",
                        "download it again",
                        file=path,
                    )
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"cannot be decompressed ({error})", "download it again", file=path) from None
    return bytes(found)


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """The images of a folder with MNIST's four files; its test files are used for validation."""
    train, train_labels, test, test_labels = (read(_find(require_folder(options.path), name)) for name in _NAMES)
    return arrays(
        _images(train, options.path / _NAMES[0]),
        _images(test, options.path / _NAMES[2]),
        integers(train_labels, test_labels, str(options.path)),
        options,
        seed,
        str(options.path),
    )


def _find(folder: Path, name: str) -> Path:
    """The file of this name, under any of its spellings."""
    dotted = name.replace("-idx", ".idx")
    for each in (name, dotted, f"{name}.gz", f"{dotted}.gz"):
        if (folder / each).is_file():
            return folder / each
    raise BadData(f"has no {name} (or {name}.gz)", f"put {', '.join(_NAMES)} there", file=folder)


def _images(images: np.ndarray, path: Path) -> torch.Tensor:
    """The images with a channel."""
    if images.ndim != 3 or images.dtype != np.uint8:
        raise BadData(
            f"holds {images.dtype} of shape {images.shape}", "give images as uint8 in three dimensions", file=path
        )
    return torch.from_numpy(images).unsqueeze(1)
