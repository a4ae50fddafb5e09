"""From text to token ids: bytes, or the tokenizer of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lemonx.errors import BadData
from lemonx.models import door
from lemonx.models.foreign import foreign
from lemonx_lab.data.model import Model

# Any of these in a folder makes AutoTokenizer find a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")
# Characters handed to a tokenizer at once; the text is cut at the end of a line.
_CHUNK = 1 << 20

Texts = tuple[str, ...]
"""One sentence, or two."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids, and what turns text into them; a token that does not exist is None.

    `tokenizer` None means bytes.
    """

    size: int
    pad: int | None = None
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    special: frozenset[int] = frozenset()
    tokenizer: Any = None

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest of numpy's unsigned types, from 16 bits on, that holds every id."""
        return np.uint16 if self.size <= 1 << 16 else np.uint32

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, without special tokens."""
        if self.tokenizer is None:
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)
        with foreign("split the text into tokens", "give another tokenizer", BadData):
            parts = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in _chunks(text)]
            return np.concatenate([np.empty(0, self.dtype), *(np.asarray(part, self.dtype) for part in parts)])

    def encode_sentences(self, texts: Texts, length: int) -> Mapping[str, list[int]]:
        """Token ids and token types of one or two sentences, the longer one cut until all fits into `length`."""
        if self.tokenizer is not None:
            with foreign("split the text into tokens", "give another tokenizer", BadData):
                return self.tokenizer(*texts, truncation=True, max_length=length, return_token_type_ids=True)
        assert self.cls is not None and self.sep is not None  # the bytes have both
        ids, types = [self.cls], [0]
        parts = [text.encode() for text in texts]
        for number, (part, kept) in enumerate(zip(parts, _shares(list(map(len, parts)), length), strict=True)):
            ids += [*part[:kept], self.sep]
            types += [number] * (kept + 1)
        return {"input_ids": ids, "token_type_ids": types}

    def model(self) -> dict[str, int]:
        """The config fields that the vocabulary decides."""
        ids = {"pad_token_id": self.pad, "bos_token_id": self.cls, "eos_token_id": self.sep}
        return {"vocab_size": self.size, **{name: token for name, token in ids.items() if token is not None}}


# One vocabulary for all text that is read as bytes, so that a model can go from one corpus to another.
BYTES = Vocabulary(size=260, pad=256, mask=257, cls=258, sep=259, special=frozenset(range(256, 260)))


def _shares(sizes: list[int], length: int) -> list[int]:
    """Numbers of tokens of each sentence that fit beside cls and the seps: the longer of two is cut first.

    >>> _shares([100, 3], 16), _shares([100, 100], 16), _shares([100], 16)
    ([10, 3], [7, 6], [14])
    """
    room = length - 1 - len(sizes)
    if len(sizes) == 1:
        return [min(sizes[0], room)]
    first = min(sizes[0], max(room - sizes[1], room - room // 2))
    return [first, min(sizes[1], room - first)]


def has_tokenizer(folder: Path | None) -> bool:
    """Return True if a checkpoint's folder contains a tokenizer."""
    return folder is not None and any((folder / name).is_file() for name in _TOKENIZER_FILES)


def from_folder(folder: Path) -> Vocabulary:
    """The vocabulary of a checkpoint's own tokenizer; only local files are read, and none of their code is run."""
    if not has_tokenizer(folder):
        raise BadData(f"has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})", "set tokenizer: bytes", file=folder)
    tokenizer = door.load_tokenizer(folder)
    with foreign(f"use the tokenizer in {str(folder)!r}", "save it again", BadData):
        ids = (tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
        pad, mask, cls, sep = (None if token is None else int(token) for token in ids)
        return Vocabulary(
            size=len(tokenizer),
            pad=pad if pad is not None else tokenizer.eos_token_id,
            mask=mask,
            cls=cls if cls is not None else tokenizer.bos_token_id,
            sep=sep if sep is not None else tokenizer.eos_token_id,
            special=frozenset(tokenizer.all_special_ids),
            tokenizer=tokenizer,
        )


def choose(model: Model, tokenizer: Path | Literal["bytes"] | None) -> Vocabulary:
    """The requested vocabulary; by default the one in the model's folder, or else bytes."""
    if isinstance(tokenizer, Path):
        return from_folder(tokenizer)
    if tokenizer is None and model.folder is not None and has_tokenizer(model.folder):
        return from_folder(model.folder)
    # Bytes would fit into any larger vocabulary, and mean something else there.
    size = model.config.get("vocab_size")
    if tokenizer is None and size not in (None, BYTES.size):
        raise BadData(
            f"the model has a vocabulary of {size} and no tokenizer in its folder, and bytes need {BYTES.size}",
            "set tokenizer to a folder that has one, or to bytes if you mean bytes",
        )
    return BYTES


def _chunks(text: str) -> Iterator[str]:
    """The text in pieces of about a million characters, each up to the end of a line."""
    start = 0
    while start < len(text):
        end = len(text) if len(text) - start <= _CHUNK else text.find("\n", start + _CHUNK) + 1 or len(text)
        yield text[start:end]
        start = end
