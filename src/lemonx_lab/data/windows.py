"""Windows of a stream of token ids, for causal and for masked language modelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lemonx.errors import BadData
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import Example, Examples, digest, stack
from lemonx_lab.data.splitting import spread
from lemonx_lab.data.vocabulary import Vocabulary

# The share of the tokens that a masked LM predicts, and of these the shares shown as the mask and as another token;
# the rest are shown as they are (BERT's).
MASKED, AS_MASK, AS_RANDOM = 0.15, 0.8, 0.1
IGNORED = -100


class CausalWindows(Examples):
    """Windows that do not overlap; the labels are the ids (the model shifts them)."""

    def __init__(self, ids: np.ndarray, length: int, limit: int | None = None) -> None:
        super().__init__()
        self._ids, self._length = ids, length
        self._windows = spread(len(ids) // length, limit)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        starts = self._windows[np.asarray(indices)] * self._length
        batch = torch.from_numpy(self._ids[starts[:, None] + np.arange(self._length)].astype(np.int64))
        return [{"input_ids": row, "labels": row} for row in batch]


class MaskedWindows(Examples):
    """Windows between the vocabulary's cls and sep, 15 % of the tokens to be predicted."""

    def __init__(
        self, ids: np.ndarray, length: int, vocabulary: Vocabulary, seed: int | None, limit: int | None = None
    ) -> None:
        super().__init__(seed)
        if vocabulary.mask is None:
            raise BadData("the vocabulary has no mask token, which masked-lm needs", "choose another tokenizer")
        self._ids, self._mask = ids, vocabulary.mask
        self._before = [] if vocabulary.cls is None else [vocabulary.cls]
        self._after = [] if vocabulary.sep is None else [vocabulary.sep]
        self._inner = length - len(self._before) - len(self._after)
        self._windows = spread(len(ids) // self._inner, limit)
        self._special = np.zeros(vocabulary.size, bool)
        self._special[sorted(vocabulary.special)] = True
        self._ordinary = np.flatnonzero(~self._special)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        starts = self._windows[np.asarray(indices)] * self._inner
        ids = np.empty((len(indices), len(self._before) + self._inner + len(self._after)), np.int64)
        ids[:, : len(self._before)] = self._before
        ids[:, len(ids[0]) - len(self._after) :] = self._after
        ids[:, len(self._before) :][:, : self._inner] = self._ids[starts[:, None] + np.arange(self._inner)]
        draws = self.uniforms(indices, 3 * ids.shape[1])
        shown, labels = mask(ids, self._special[ids], self._mask, self._ordinary, draws)
        rows = zip(torch.from_numpy(shown), torch.from_numpy(labels), strict=True)
        return [{"input_ids": row, "labels": label} for row, label in rows]


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
    ranks = np.empty(ids.shape, np.int64)
    np.put_along_axis(ranks, order.argsort(axis=1), np.arange(ids.shape[1])[None], axis=1)
    candidates = (~special).sum(axis=1, keepdims=True)
    wanted = np.maximum(np.rint(MASKED * candidates), 1)
    chosen = (ranks < wanted) & ~special
    others = ordinary[(other * len(ordinary)).astype(np.int64)]
    replaced = np.where(fate < AS_MASK, mask_id, np.where(fate < AS_MASK + AS_RANDOM, others, ids))
    return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORED)


def language(
    task: str,
    train: np.ndarray,
    validation: np.ndarray,
    *,
    length: int,
    vocabulary: Vocabulary,
    seed: int,
    limit: int | None,
    where: str,
    model: Mapping[str, Any] | None = None,
) -> Prepared:
    """Windows of two streams of ids, for a causal or a masked language model."""
    for side, ids in (("training", train), ("validation", validation)):
        if len(ids) < length:
            raise BadData(
                f"has {len(ids)} tokens for {side}, less than one window of {length}", "give more text", file=where
            )
    if task == "causal-lm":
        sets = CausalWindows(train, length), CausalWindows(validation, length, limit)
    else:
        sets = (
            MaskedWindows(train, length, vocabulary, seed),
            MaskedWindows(validation, length, vocabulary, None, limit),
        )
    return Prepared(
        *sets, stack, digest([train, validation]), vocabulary.model() if model is None else model, None, length
    )
