"""Hugging Face datasets that were saved on disk (save_to_disk), for every task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LARGEST_PICTURE, LONGEST_TEXT
from lemonx.models import door
from lemonx.models.foreign import foreign
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import Example, Examples, digest, stack
from lemonx_lab.data.files import UserPath, read_bytes, require_folder, require_regular
from lemonx_lab.data.labels import Labels, integers, names, reals
from lemonx_lab.data.metrics import REGRESSION, Metrics, accuracy
from lemonx_lab.data.model import Model
from lemonx_lab.data.pixels import ImageOptions, normalise, pixels, require_pillow
from lemonx_lab.data.sequences import sequences
from lemonx_lab.data.splitting import FRACTION, held_out, spread
from lemonx_lab.data.table import place, text_columns
from lemonx_lab.data.text import join
from lemonx_lab.data.vocabulary import choose
from lemonx_lab.data.windows import language


class Options(ImageOptions):
    path: UserPath
    train: str = "train"
    validation: str | None = None
    text: str | Annotated[tuple[str, ...], Field(min_length=1, max_length=2)] | None = None
    image: str = "image"
    label: str = "label"
    regression: bool = False
    metrics: tuple[Literal["accuracy", "f1", "matthews"], ...] = ("accuracy",)
    length: int = Field(128, ge=8, le=LONGEST_TEXT)
    tokenizer: Literal["bytes"] | UserPath | None = None
    image_size: int = Field(224, ge=1, le=LARGEST_PICTURE)  # pyright: ignore[reportIncompatibleVariableOverride]
    channels: Literal[1, 3] = 3


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """The examples of two splits; if there is no validation split, a twentieth of the rows is held out."""
    train, validation = _splits(options)
    for side, rows in (("training", train), ("validation", validation)):
        if not len(rows):
            raise BadData(f"has no {side} rows", "name other splits in train and validation", file=options.path)
    if task == "image-classification":
        return _images(train, validation, options, seed)
    if task == "sequence-classification":
        return _sequences(train, validation, options, model)
    columns = text_columns(options.text, train.column_names, str(options.path))
    place(columns[0], train.column_names, str(options.path))
    vocabulary = choose(model, options.tokenizer)
    sides = [join((str(text) for text in rows[columns[0]]), vocabulary) for rows in (train, validation)]
    return language(
        task,
        sides[0],
        sides[1],
        length=options.length,
        vocabulary=vocabulary,
        seed=seed,
        limit=options.validation_examples,
        where=str(options.path),
    )


def _splits(options: Options) -> tuple[Any, Any]:
    """The training and validation rows."""
    loaded = door.load_dataset(require_regular(require_folder(options.path)))
    if isinstance(loaded, dict):
        if options.train not in loaded:
            raise BadData(
                f"has no split {options.train!r}, only {', '.join(loaded)}",
                "set train to one of them",
                file=options.path,
            )
        train, name = loaded[options.train], options.validation
        if name is None and "validation" in loaded:
            name = "validation"
        if name is not None:
            if name not in loaded:
                raise BadData(
                    f"has no split {name!r}, only {', '.join(loaded)}",
                    "set validation to one of them",
                    file=options.path,
                )
            return train, loaded[name]
    elif options.validation is not None:
        raise BadData("has no splits", "remove validation, or save a DatasetDict", file=options.path)
    else:
        train = loaded
    out = np.array([held_out(f"row {number}", FRACTION) for number in range(len(train))], bool)
    return train.select(np.flatnonzero(~out)), train.select(np.flatnonzero(out))


def _labels(train: Any, validation: Any, options: Options) -> Labels:
    """The labels of both sides: class numbers, names, or real values."""
    from datasets import ClassLabel

    where = str(options.path)
    place(options.label, train.column_names, where)
    sides = [list(rows[options.label]) for rows in (train, validation)]
    if any(label is None for side in sides for label in side):
        raise BadData(f"has rows without a {options.label}", "remove such rows", file=where)
    if options.regression:
        return reals(sides[0], sides[1], where)
    feature = train.features[options.label]
    if all(isinstance(label, int) and not isinstance(label, bool) for side in sides for label in side):
        classes = len(feature.names) if isinstance(feature, ClassLabel) else None
        return integers(np.array(sides[0], np.int64), np.array(sides[1], np.int64), where, classes)
    if any(isinstance(label, float) for side in sides for label in side):
        raise BadData(
            f"holds real numbers in its column {options.label}",
            "set regression: true, or name another column in label",
            file=where,
        )
    return names([str(label) for label in sides[0]], [str(label) for label in sides[1]], where)


def _sequences(train: Any, validation: Any, options: Options, model: Model) -> Prepared:
    where = str(options.path)
    columns = text_columns(options.text, train.column_names, where)
    for name in columns:
        place(name, train.column_names, where)
    texts = [
        [tuple(str(text) for text in row) for row in zip(*(rows[name] for name in columns), strict=True)]
        for rows in (train, validation)
    ]
    return sequences(
        texts[0],
        texts[1],
        _labels(train, validation, options),
        length=options.length,
        vocabulary=choose(model, options.tokenizer),
        model=model,
        metrics=Metrics(*(REGRESSION if options.regression else options.metrics)),
        where=where,
    )


class RowImages(Examples):
    """Images of a dataset's rows, decoded when they are read."""

    def __init__(self, rows: Any, labels: np.ndarray, options: Options, seed: int | None) -> None:
        from datasets import Image

        super().__init__(seed)
        # Left as they are stored: datasets would fetch an image that is an address.
        self._rows = rows.cast_column(options.image, Image(decode=False))
        self._labels, self._options = torch.from_numpy(labels), options
        self._augment = options.augment if seed is not None else ()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        size, channels = self._options.image_size, self._options.channels
        stored = self._rows[[int(index) for index in indices]][self._options.image]
        examples = []
        for index, value, draw in zip(indices, stored, self.uniforms(indices, 5), strict=True):
            read = normalise(pixels(_decoded(value), size, channels, self._augment, draw), self._options)
            examples.append({"pixel_values": read, "labels": self._labels[index]})
        return examples


def _decoded(value: Any) -> Any:
    """The image of a row: its bytes, or a file on this machine."""
    from datasets import Image

    address = value.get("path") if value.get("bytes") is None else None
    if isinstance(address, str) and "://" in address:
        raise BadData(
            f"a row's image is the address {address[:200]!r}, and lemonx downloads nothing", "store the image's bytes"
        )
    if isinstance(address, str):  # datasets would open whatever is there, and wait for a pipe
        value = {"bytes": read_bytes(Path(address)), "path": None}
    with foreign("decode a row's image", "leave such rows out", BadData, who="datasets"):
        return Image().decode_example(value)


def _images(train: Any, validation: Any, options: Options, seed: int) -> Prepared:
    """The images of two splits; the digest is of the labels and of the files' names and sizes."""
    from datasets import Image

    require_pillow()
    place(options.image, train.column_names, str(options.path))
    if not isinstance(train.features[options.image], Image):
        raise BadData(
            f"holds no images in its column {options.image!r}", "cast it to datasets.Image", file=options.path
        )
    labels = _labels(train, validation, options)
    files = sorted(options.path.rglob("*.arrow"))
    kept = spread(len(validation), options.validation_examples)
    return Prepared(
        RowImages(train, labels.train, options, seed),
        RowImages(validation.select(kept), labels.validation[kept], options, None),
        stack,
        digest(
            [*labels[:2], *(f"{file.relative_to(options.path).as_posix()} {file.stat().st_size}" for file in files)]
        ),
        {"num_labels": labels.classes, "image_size": options.image_size, "num_channels": options.channels},
        accuracy,
    )
