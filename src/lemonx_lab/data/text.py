"""Text files, or a folder of them, in UTF-8: as bytes, or through the checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LONGEST_TEXT
from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.files import UserPath, read_text, visible
from lemonx_lab.data.model import Model
from lemonx_lab.data.splitting import FILES, FRACTION, split
from lemonx_lab.data.vocabulary import Vocabulary, choose
from lemonx_lab.data.windows import language


class Options(Strict):
    path: UserPath
    validation: UserPath | None = None
    pattern: str = "*"
    length: int = Field(128, ge=8, le=LONGEST_TEXT)
    tokenizer: Literal["bytes"] | UserPath | None = None
    errors: Literal["strict", "replace"] = "strict"
    validation_examples: int | None = Field(None, ge=1)


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """Windows of the text; validation is a separate path, or held-out files, or the end of each file."""
    vocabulary = choose(model, options.tokenizer)
    names, texts = _read(options.path, options)
    if options.validation is not None:
        train, validation = texts, _read(options.validation, options)[1]
    else:
        train, validation = _split(names, texts)
    return language(
        task,
        join(train, vocabulary),
        join(validation, vocabulary),
        length=options.length,
        vocabulary=vocabulary,
        seed=seed,
        limit=options.validation_examples,
        where=str(options.path),
    )


def _read(path: Path, options: Options) -> tuple[list[str], list[str]]:
    """The relative paths and the texts of all files."""
    paths = visible(path, options.pattern) if path.is_dir() else [path]
    if not paths:
        raise BadData(f"has no file that matches {options.pattern!r}", "check path and pattern", file=path)
    names = [each.relative_to(path).as_posix() if path.is_dir() else each.name for each in paths]
    return names, [read_text(each, replace=options.errors == "replace") for each in paths]


def _split(names: list[str], texts: list[str]) -> tuple[list[str], list[str]]:
    """Whole files where there are enough of them, else the end of each."""
    if len(names) >= FILES:
        train, validation = split(names, texts)
        if train and validation:
            return train, validation
    cuts = [round(len(text) * (1 - FRACTION)) for text in texts]
    return (
        [text[:cut] for text, cut in zip(texts, cuts, strict=True)],
        [text[cut:] for text, cut in zip(texts, cuts, strict=True)],
    )


def join(texts: Iterable[str], vocabulary: Vocabulary) -> np.ndarray:
    """The ids of all texts, one after the other, each closed by the vocabulary's sep."""
    end = np.array([] if vocabulary.sep is None else [vocabulary.sep], vocabulary.dtype)
    parts = [part for text in texts if text for part in (vocabulary.encode(text), end)]
    return np.concatenate(parts) if parts else np.empty(0, vocabulary.dtype)
