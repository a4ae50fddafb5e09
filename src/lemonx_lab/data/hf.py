"""Hugging Face datasets that were saved on disk (save_to_disk), for every task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lemonx.errors import BadData
from lemonx.models import door
from lemonx.models.foreign import foreign
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import SIDES, digest, split
from lemonx_lab.data.files import UserPath, read_bytes, require, require_folder
from lemonx_lab.data.language import Windows, join
from lemonx_lab.data.model import Model
from lemonx_lab.data.pictures import Decoded
from lemonx_lab.data.sentences import Columns
from lemonx_lab.data.vocabulary import choose


class Saved(Columns, Decoded, Windows):
    """A dataset on disk: the columns of two splits."""

    path: UserPath
    train: str = "train"
    validation: str | None = None
    image: str = "image"

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """The examples of two splits; if there is no validation split, a twentieth of the rows is held out."""
        train, validation = self._splits()
        for side, rows in zip(SIDES, (train, validation), strict=True):
            if not len(rows):
                raise BadData(f"has no {side} rows", "name other splits in train and validation", file=self.path)
        order = getattr(train.features.get(self.label), "names", None)
        order = None if order is None else range(len(order))
        if task == "image-classification":
            return self._images(train, validation, order, seed)
        if task == "sequence-classification":
            sides = [{name: rows[name] for name in rows.column_names} for rows in (train, validation)]
            return self.rows(sides, model, order)
        column, vocabulary = self.columns(train.column_names)[0], choose(model, self.tokenizer)
        sides = [join(map(str, rows[column]), vocabulary) for rows in (train, validation)]
        return self.windows(task, sides, vocabulary, seed)

    def _splits(self) -> tuple[Any, Any]:
        """The training and validation rows."""
        loaded = door.load_dataset(_require_regular(require_folder(self.path)))
        if isinstance(loaded, dict):
            usual = "validation" if "validation" in loaded else None
            train, validation = (self._split(loaded, name) for name in (self.train, self.validation or usual))
            if validation is not None:
                return train, validation
        elif self.validation is not None:
            raise BadData("has no splits", "remove validation, or save a DatasetDict", file=self.path)
        else:
            train = loaded
        left, out = split(f"row {number}" for number in range(len(train)))
        return train.select(left), train.select(out)

    def _split(self, loaded: dict[str, Any], name: str | None) -> Any:
        if name is None:
            return None
        if name not in loaded:
            found = f"has no split {name!r}, only {', '.join(loaded)}"
            raise BadData(found, "name others in train and validation", file=self.path)
        return loaded[name]

    def _images(self, train: Any, validation: Any, order: Any, seed: int) -> Prepared:
        """The images of two splits; the digest is of the labels and of the files' names and sizes."""
        from datasets import Image

        require("PIL", "data of images")
        self.require(train.column_names, self.image, self.label)
        if not isinstance(train.features[self.image], Image):
            raise BadData(f"holds no images in its column {self.image!r}", "cast it to datasets.Image", file=self.path)
        labels = self.labels([rows[self.label] for rows in (train, validation)], order)
        files = sorted(self.path.rglob("*.arrow"))
        names = [f"{file.relative_to(self.path).as_posix()} {file.stat().st_size}" for file in files]
        seen = digest([labels.train, labels.validation, *names])
        # Left as they are stored: datasets would fetch an image that is an address.
        sides = [
            rows.select_columns([self.image]).cast_column(self.image, Image(decode=False))
            for rows in (train, validation)
        ]
        return self.stored(sides, _decoded, labels, seen, seed)


def _require_regular(folder: Path) -> Path:
    """The folder, if it contains no pipe or device, which would hang a library that opens every file."""
    for path in (Path(root, name) for root, _, names in os.walk(folder) for name in names):
        if path.exists() and not path.is_file():
            raise BadData("is not a regular file", "remove it", file=path)
    return folder


def _decoded(row: dict[str, Any]) -> Any:
    """The image of a row: its bytes, or a file on this machine."""
    from datasets import Image

    (value,) = row.values()
    address = value.get("path") if value.get("bytes") is None else None
    if isinstance(address, str) and "://" in address:
        raise BadData(
            f"a row's image is the address {address[:200]!r}, and lemonx downloads nothing", "store the image's bytes"
        )
    if isinstance(address, str):  # datasets would open whatever is there, and wait for a pipe
        value = {"bytes": read_bytes(Path(address)), "path": None}
    with foreign("decode a row's image", "leave such rows out", BadData, who="datasets"):
        return Image().decode_example(value)
