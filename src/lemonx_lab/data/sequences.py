"""Sentences, or pairs of them, with a label each: the examples of sequence classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lemonx.errors import BadData
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import Example, Examples, digest
from lemonx_lab.data.labels import Labels
from lemonx_lab.data.metrics import Metrics
from lemonx_lab.data.model import Model
from lemonx_lab.data.vocabulary import Vocabulary

Texts = tuple[str, ...]
"""One sentence, or two."""


class Sentences(Examples):
    """Encoded when they are read: cls, the first sentence, sep, and where there is a second, that and sep."""

    def __init__(
        self, texts: Sequence[Texts], labels: np.ndarray, vocabulary: Vocabulary, length: int, types: bool
    ) -> None:
        super().__init__()
        self._texts, self._labels = texts, torch.from_numpy(labels)
        self._vocabulary, self._length, self._types = vocabulary, length, types

    def __len__(self) -> int:
        return len(self._texts)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self._example(index) for index in indices]

    def _example(self, index: int) -> Example:
        encoded = encode(self._texts[index], self._vocabulary, self._length)
        if not self._types:
            encoded.pop("token_type_ids", None)
        return {**{name: torch.tensor(ids) for name, ids in encoded.items()}, "labels": self._labels[index]}


def encode(texts: Texts, vocabulary: Vocabulary, length: int) -> dict[str, list[int]]:
    """Token ids and token types of one or two sentences, the longer one cut until all fits into `length`."""
    if vocabulary.tokenizer is not None:
        encoded = vocabulary.encode_pair(texts, length)
        return {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}
    parts = [vocabulary.encode(text).tolist() for text in texts]
    assert vocabulary.cls is not None and vocabulary.sep is not None  # the bytes have both
    ids, types = [vocabulary.cls], [0]
    for number, (part, kept) in enumerate(zip(parts, _shares(list(map(len, parts)), length), strict=True)):
        ids += [*part[:kept], vocabulary.sep]
        types += [number] * (kept + 1)
    return {"input_ids": ids, "token_type_ids": types}


def _shares(sizes: list[int], length: int) -> list[int]:
    """How many tokens of each sentence fit beside cls and the seps: the longer of two is cut first.

    >>> _shares([100, 3], 16), _shares([100, 100], 16), _shares([100], 16)
    ([10, 3], [7, 6], [14])
    """
    room = length - 1 - len(sizes)
    if len(sizes) == 1:
        return [min(sizes[0], room)]
    first = min(sizes[0], max(room - sizes[1], room - room // 2))
    return [first, min(sizes[1], room - first)]


@dataclass(frozen=True)
class Pad:
    """Makes a batch of examples of different lengths, filled up to the longest one."""

    pad: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        batch: dict[str, Tensor] = {"labels": torch.stack([example["labels"] for example in examples])}
        for name in examples[0]:
            if name != "labels":
                batch[name] = torch.full((len(examples), longest), self.pad if name == "input_ids" else 0)
        batch["attention_mask"] = torch.zeros((len(examples), longest), dtype=torch.int64)
        for row, example in enumerate(examples):
            size = len(example["input_ids"])
            batch["attention_mask"][row, :size] = 1
            for name in example.keys() - {"labels"}:
                batch[name][row, :size] = example[name]
        return batch


def sequences(
    train: Sequence[Texts],
    validation: Sequence[Texts],
    labels: Labels,
    *,
    length: int,
    vocabulary: Vocabulary,
    model: Model,
    metrics: Metrics,
    where: str,
) -> Prepared:
    """Examples of sentences and labels; `labels` of no classes are for regression."""
    for side, texts in (("training", train), ("validation", validation)):
        if not texts:
            raise BadData(f"has no {side} examples", "add some, or give a validation path", file=where)
    if vocabulary.pad is None:
        raise BadData(
            "the tokenizer has neither a pad nor an end token", "give it one of them, or set tokenizer: bytes"
        )
    types = (model.get("type_vocab_size") or 0) > 1
    regression = {"num_labels": 1, "problem_type": "regression"}
    return Prepared(
        Sentences(train, labels.train, vocabulary, length, types),
        Sentences(validation, labels.validation, vocabulary, length, types),
        Pad(vocabulary.pad),
        digest(["\0".join(texts) for side in (train, validation) for texts in side] + [*labels[:2]]),
        {**vocabulary.model(), **({"num_labels": labels.classes} if labels.classes else regression)},
        metrics,
        length,
    )
