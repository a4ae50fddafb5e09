"""Token ids in .npy files: a corpus that is already tokenized."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LARGEST, LONGEST_TEXT
from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.files import UNREADABLE_ARRAY, UserPath, open_data, reason
from lemonx_lab.data.model import Model
from lemonx_lab.data.splitting import FRACTION
from lemonx_lab.data.vocabulary import Vocabulary, from_folder, has_tokenizer
from lemonx_lab.data.windows import language


class Options(Strict):
    path: UserPath
    validation: UserPath | None = None
    length: int = Field(128, ge=8, le=LONGEST_TEXT)
    vocab_size: int | None = Field(None, ge=1, le=LARGEST)
    mask_token_id: int | None = Field(None, ge=0, lt=LARGEST)
    validation_examples: int | None = Field(None, ge=1)


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """Windows of the ids; validation is a separate file, or the end of the file."""
    train = _read(options.path)
    if options.validation is not None:
        validation = _read(options.validation)
    else:
        cut = round(len(train) * (1 - FRACTION))
        train, validation = train[:cut], train[cut:]
    largest = max((int(ids.max()) for ids in (train, validation) if len(ids)), default=0)
    return language(
        task,
        train,
        validation,
        length=options.length,
        vocabulary=_vocabulary(largest, options, model),
        seed=seed,
        limit=options.validation_examples,
        where=str(options.path),
    )


def _read(path: Path) -> np.ndarray:
    """The ids of a file, mapped into memory."""
    try:
        with open_data(path) as file:
            ids = _mapped(file)
    except UNREADABLE_ARRAY as error:
        raise BadData(
            f"is not an .npy file of numbers ({reason(error)})", "write it with numpy.save", file=path
        ) from None
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
        found = f"{ids.dtype} of shape {ids.shape}"
        raise BadData(f"holds {found}", "give token ids as integers in one dimension, or in rows", file=path)
    if ids.size and ids.min() < 0:
        raise BadData(f"holds the negative token id {ids.min()}", "number the tokens from 0", file=path)
    return ids.reshape(-1)


def _mapped(file: BinaryIO) -> np.ndarray:
    """The memory-mapped array of an open .npy file; numpy can map only files that it opens itself."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"version {version} of the format")
    shape, by_column, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds objects")
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if by_column else "C")


def _vocabulary(largest: int, options: Options, model: Model) -> Vocabulary:
    """The vocabulary that the ids are from, as far as it is known."""
    known = from_folder(model.folder) if model.folder is not None and has_tokenizer(model.folder) else Vocabulary(0)
    mask = known.mask if options.mask_token_id is None else options.mask_token_id
    size = options.vocab_size or max(largest + 1, known.size, 0 if mask is None else mask + 1)
    if size > LARGEST:
        raise BadData(f"holds the token id {largest}", f"use token ids below {LARGEST}", file=options.path)
    if size <= max(largest, mask or 0):
        raise BadData(
            f"needs a vocabulary of {max(largest, mask or 0) + 1}, but vocab_size is {size}",
            "set vocab_size to that or more",
            file=options.path,
        )
    # Windows are as they are in the file: no cls and sep around them.
    return Vocabulary(size, known.pad, mask, special=known.special | (set() if mask is None else {mask}))
