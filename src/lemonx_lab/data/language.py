"""Windows of token ids, for causal and masked language modelling: of text, of ids, of Python's own library."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from lemonx.checkpoints.opening import name_of
from lemonx.errors import BadData
from lemonx.guards.limits import LARGEST, LONGEST_TEXT
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import FRACTION, SIDES, Data, Example, Examples, digest, split, spread, stack
from lemonx_lab.data.files import UserPath, open_data, read_text, reading, visible
from lemonx_lab.data.model import Model
from lemonx_lab.data.vocabulary import BYTES, Vocabulary, choose, from_folder, has_tokenizer

# The share of the tokens that a masked LM predicts, and of these the shares shown as the mask and as another token;
# the rest are shown as they are (BERT's).
MASKED, AS_MASK, AS_RANDOM = 0.15, 0.8, 0.1
IGNORED = -100
# With fewer files than this, whole files are too coarse a share.
_FILES = 20
# Tests, what was installed beside the library, and what the machine's build wrote into it.
_LEFT_OUT = re.compile(
    r"tests?|idle_test|(site|dist)-packages|__pycache__|config-.*|_sysconfigdata.*|sitecustomize\.py"
)
# ASCII's own "substitute" stands for every byte that is not ASCII.
SUBSTITUTE = 0x1A
_TABLE = bytes(byte if byte < 128 else SUBSTITUTE for byte in range(256))


class CausalWindows(Examples):
    """Windows that do not overlap; the labels are the ids (the model shifts them)."""

    def __init__(self, ids: np.ndarray, length: int, limit: int | None = None, seed: int | None = None) -> None:
        self._ids, self._length = ids, length
        self._windows = spread(len(ids) // length, limit)
        super().__init__(len(self._windows), seed)

    def ids(self, indices: Sequence[int]) -> np.ndarray:
        """The ids of some windows, a row each."""
        starts = self._windows[np.asarray(indices)] * self._length
        return self._ids[starts[:, None] + np.arange(self._length)].astype(np.int64)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [{"input_ids": row, "labels": row} for row in torch.from_numpy(self.ids(indices))]


class MaskedWindows(CausalWindows):
    """Windows between the vocabulary's cls and sep, 15 % of the tokens to be predicted."""

    def __init__(
        self, ids: np.ndarray, length: int, vocabulary: Vocabulary, seed: int | None, limit: int | None = None
    ) -> None:
        if vocabulary.mask is None:
            raise BadData("the vocabulary has no mask token, which masked-lm needs", "choose another tokenizer")
        self._mask = vocabulary.mask
        ends = (vocabulary.cls, vocabulary.sep)
        self._before, self._after = (np.array([end][: end is not None], np.int64) for end in ends)
        super().__init__(ids, length - len(self._before) - len(self._after), limit, seed)
        self._special = np.zeros(vocabulary.size, bool)
        self._special[sorted(vocabulary.special)] = True
        self._ordinary = np.flatnonzero(~self._special)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        rows = (len(indices), 1)
        ids = np.hstack([np.tile(self._before, rows), self.ids(indices), np.tile(self._after, rows)])
        draws = self.uniforms(indices, 3 * ids.shape[1])
        shown, labels = mask(ids, self._special[ids], self._mask, self._ordinary, draws)
        pairs = zip(torch.from_numpy(shown), torch.from_numpy(labels), strict=True)
        return [{"input_ids": row, "labels": label} for row, label in pairs]


def mask(
    ids: np.ndarray, special: np.ndarray, mask_id: int, ordinary: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The model's input for rows of `ids`, and the labels: the ids of the chosen tokens, and none elsewhere.

    In each row, 15 % of the tokens that are not special are chosen, rounded, and at least one, so that every example
    has a loss. `draws` has three numbers in [0, 1) per token: whether it is chosen, what replaces it, and which other
    token that is.
    """
    order, fate, other = np.split(draws, 3, axis=1)
    order = np.where(special, 2.0, order)  # behind all that can be chosen
    ranks = order.argsort(axis=1).argsort(axis=1)
    wanted = np.maximum(np.rint(MASKED * (~special).sum(axis=1, keepdims=True)), 1)
    chosen = (ranks < wanted) & ~special
    others = ordinary[(other * len(ordinary)).astype(np.int64)]
    replaced = np.where(fate < AS_MASK, mask_id, np.where(fate < AS_MASK + AS_RANDOM, others, ids))
    return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORED)


class Windows(Data):
    """The options of all data for language models."""

    length: int = Field(128, ge=8, le=LONGEST_TEXT)
    validation_examples: int | None = Field(None, ge=1)

    def windows(self, task: str, sides: Sequence[np.ndarray], vocabulary: Vocabulary, seed: int) -> Prepared:
        """Windows of two streams of ids, for a causal or a masked language model."""
        for side, ids in zip(SIDES, sides, strict=True):
            if len(ids) < self.length:
                raise BadData(
                    f"has {len(ids)} tokens for {side}, less than one window of {self.length}",
                    "give more text",
                    file=self.where,
                )
        (train, validation), limit = sides, self.validation_examples
        if task == "causal-lm":
            sets = CausalWindows(train, self.length), CausalWindows(validation, self.length, limit)
        else:
            sets = (
                MaskedWindows(train, self.length, vocabulary, seed),
                MaskedWindows(validation, self.length, vocabulary, None, limit),
            )
        return Prepared(*sets, stack, digest(sides), vocabulary.model(), None, self.length)


def join(texts: Iterable[str], vocabulary: Vocabulary) -> np.ndarray:
    """The ids of all texts, one after the other, each closed by the vocabulary's sep."""
    end = np.array([] if vocabulary.sep is None else [vocabulary.sep], vocabulary.dtype)
    parts = [part for text in texts if text for part in (vocabulary.encode(text), end)]
    return np.concatenate([np.empty(0, vocabulary.dtype), *parts])


class Stdlib(Windows):
    """The source code of the Python standard library: real text that every machine has, as bytes."""

    length: int = Field(64, ge=8, le=LONGEST_TEXT)
    validation_examples: int | None = Field(256, ge=1)

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """Windows of the library's bytes; whole modules are held out for validation."""
        files = sources()
        names = list(files)
        sides = [b"".join(files[names[number]] for number in side) for side in split(names)]
        return self.windows(task, [np.frombuffer(side, np.uint8) for side in sides], BYTES, seed)


@functools.cache
def sources(root: Path | None = None) -> dict[str, bytes]:
    """The library's modules by path, as ASCII."""
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    kept = sorted(name for name in paths if not any(_LEFT_OUT.fullmatch(part) for part in name.split("/")))
    if not kept:
        raise BadData(
            "has no source of the standard library", "use a Python that has it, or data of kind text", file=root
        )
    return {name: paths[name].read_bytes().translate(_TABLE) for name in kept}


class Text(Windows):
    """Text files, or a folder of them, in UTF-8: as bytes, or through the checkpoint's tokenizer."""

    path: UserPath
    validation: UserPath | None = None
    pattern: str = "*"
    tokenizer: Literal["bytes"] | UserPath | None = None
    errors: Literal["strict", "replace"] = "strict"

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """Windows of the text; validation is a separate path, or held-out files, or the end of each file."""
        vocabulary = choose(model, self.tokenizer)
        texts = self._read(self.path)
        if self.validation is not None:
            sides = [texts.values(), self._read(self.validation).values()]
        else:
            sides = _halves(texts)
        return self.windows(task, [join(side, vocabulary) for side in sides], vocabulary, seed)

    def _read(self, path: Path) -> dict[str, str]:
        """The texts of all files, by their relative paths."""
        paths = visible(path, self.pattern) if path.is_dir() else [path]
        if not paths:
            raise BadData(f"has no file that matches {self.pattern!r}", "check path and pattern", file=path)
        return {each.relative_to(path).as_posix(): read_text(each, self.errors) for each in paths}


def _halves(texts: dict[str, str]) -> list[list[str]]:
    """Whole files where there are enough of them, else the end of each."""
    whole = list(texts.values())
    sides = [[whole[number] for number in side] for side in split(texts)]
    if len(whole) >= _FILES and all(sides):
        return sides
    cuts = [(text, round(len(text) * (1 - FRACTION))) for text in whole]
    return [[text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]]


class Tokens(Windows):
    """Token ids in .npy files: a corpus that is already tokenized."""

    path: UserPath
    validation: UserPath | None = None
    vocab_size: int | None = Field(None, ge=1, le=LARGEST)
    mask_token_id: int | None = Field(None, ge=0, lt=LARGEST)

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """Windows of the ids; validation is a separate file, or the end of the file."""
        ids = _ids(self.path)
        own = None if self.validation is None else _ids(self.validation)
        sides = np.split(ids, [round(len(ids) * (1 - FRACTION))]) if own is None else [ids, own]
        largest = max((int(ids.max()) for ids in sides if len(ids)), default=0)
        return self.windows(task, sides, self._vocabulary(largest, model), seed)

    def _vocabulary(self, largest: int, model: Model) -> Vocabulary:
        """The vocabulary that the ids are from, as far as it is known."""
        known = from_folder(model.folder) if model.folder and has_tokenizer(model.folder) else Vocabulary(0)
        mask = known.mask if self.mask_token_id is None else self.mask_token_id
        needed = max(largest, mask or 0) + 1
        size = self.vocab_size or max(needed, known.size)
        if not needed <= size <= LARGEST:
            raise BadData(
                f"needs a vocabulary of {needed}, but vocab_size is {size} (at most {LARGEST})",
                "set vocab_size to that or more, or give other ids",
                file=self.path,
            )
        # Windows are as they are in the file: no cls and sep around them.
        return Vocabulary(size, known.pad, mask, special=known.special | (set() if mask is None else {mask}))


def _ids(path: Path) -> np.ndarray:
    """The ids of a file, mapped into memory."""
    with open_data(path) as file, reading(path, "write it with numpy.save"):
        ids = np.lib.format.open_memmap(name_of(file.fileno()), "r")
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
        found = f"{ids.dtype} of shape {ids.shape}"
        raise BadData(f"holds {found}", "give token ids as integers in one dimension, or in rows", file=path)
    if ids.size and ids.min() < 0:
        raise BadData(f"holds the negative token id {ids.min()}", "number the tokens from 0", file=path)
    return ids.reshape(-1)
