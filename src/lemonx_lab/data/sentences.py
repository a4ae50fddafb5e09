"""Sentences, or pairs of them, with a label each: tables, and the tasks of GLUE."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lemonx.errors import BadData
from lemonx.guards.limits import LONGEST_TEXT
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import SIDES, Data, Example, Examples, digest, split
from lemonx_lab.data.files import UserPath, read_text, require_folder
from lemonx_lab.data.labels import Labels, classes, reals
from lemonx_lab.data.metrics import REGRESSION, Metrics
from lemonx_lab.data.model import Model
from lemonx_lab.data.vocabulary import Texts, Vocabulary, choose

# The usual names of the columns of sentences.
_USUAL = (("sentence1", "sentence2"), ("text",), ("sentence",))
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class SentenceExamples(Examples):
    """Encoded when they are read: cls, the first sentence, sep, and where there is a second, that and sep."""

    def __init__(
        self, texts: Sequence[Texts], labels: np.ndarray, vocabulary: Vocabulary, length: int, types: bool
    ) -> None:
        super().__init__(len(texts))
        self._texts, self._labels = texts, torch.from_numpy(labels)
        self._vocabulary, self._length = vocabulary, length
        self._names = ("input_ids", "token_type_ids")[: 1 + types]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        examples: list[Example] = []
        for index in indices:
            encoded = self._vocabulary.encode_sentences(self._texts[index], self._length)
            found = {name: torch.tensor(encoded[name]) for name in self._names if name in encoded}
            examples.append({**found, "labels": self._labels[index]})
        return examples


@dataclass(frozen=True)
class Pad:
    """Makes a batch of examples of different lengths, filled up to the longest one."""

    pad: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch = {"labels": torch.stack([example["labels"] for example in examples])}
        for name in examples[0].keys() - {"labels"}:
            rows = [example[name] for example in examples]
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=self.pad if name == "input_ids" else 0)
        ones = [torch.ones_like(example["input_ids"]) for example in examples]
        return {**batch, "attention_mask": pad_sequence(ones, batch_first=True)}


class Sentences(Data):
    """The options of all data of sentences."""

    length: int = Field(128, ge=8, le=LONGEST_TEXT)
    tokenizer: Literal["bytes"] | UserPath | None = None

    def sentences(
        self, sides: Sequence[Sequence[Texts]], labels: Labels, model: Model, metrics: Sequence[str]
    ) -> Prepared:
        """Examples of sentences and labels; `labels` of no classes are for regression."""
        for side, texts in zip(SIDES, sides, strict=True):
            if not texts:
                raise BadData(f"has no {side} examples", "add some, or give a validation path", file=self.where)
        vocabulary = choose(model, self.tokenizer)
        if vocabulary.pad is None:
            raise BadData(
                "the tokenizer has neither a pad nor an end token", "give it one of them, or set tokenizer: bytes"
            )
        types = (model.config.get("type_vocab_size") or 0) > 1
        head = {"num_labels": labels.classes} if labels.classes else {"num_labels": 1, "problem_type": "regression"}
        numbers = (labels.train, labels.validation)
        train, validation = (
            SentenceExamples(texts, own, vocabulary, self.length, types)
            for texts, own in zip(sides, numbers, strict=True)
        )
        return Prepared(
            train,
            validation,
            Pad(vocabulary.pad),
            digest([*("\0".join(texts) for side in sides for texts in side), *numbers]),
            {**vocabulary.model(), **head},
            Metrics(tuple(metrics)),
            self.length,
        )


class Columns(Sentences):
    """The options of sentences and labels in columns that have names."""

    text: str | Annotated[tuple[str, ...], Field(min_length=1, max_length=2)] | None = None
    label: str = "label"
    regression: bool = False
    metrics: tuple[Literal["accuracy", "f1", "matthews"], ...] = ("accuracy",)

    def columns(self, header: Sequence[str], *more: str) -> tuple[str, ...]:
        """The names of the columns of sentences, as given or the usual ones; they and `more` are in the header."""
        usual = next((each for each in _USUAL if set(each) <= set(header)), None)
        found = (self.text,) if isinstance(self.text, str) else self.text or usual
        if found is None:
            remedy = "name those with the sentences in text"
            raise BadData(f"has the columns {', '.join(header)}", remedy, file=self.where)
        self.require(header, *found, *more)
        return found

    def require(self, header: Sequence[str], *names: str) -> None:
        """Raise if a column is not in the header."""
        if missing := [name for name in names if name not in header]:
            found = f"has no column {missing[0]!r}, only {', '.join(header)}"
            raise BadData(found, "name others in text and label", file=self.where)

    def rows(
        self, sides: Sequence[Mapping[str, Iterable[Any]]], model: Model, order: Sequence[int] | None = None
    ) -> Prepared:
        """Examples of the rows of two tables, whose columns have names."""
        names = self.columns(list(sides[0]), self.label)
        texts = [[tuple(map(str, row)) for row in zip(*(side[name] for name in names), strict=True)] for side in sides]
        labels = self.labels([side[self.label] for side in sides], order)
        return self.sentences(texts, labels, model, REGRESSION if self.regression else self.metrics)

    def labels(self, sides: Sequence[Iterable[Any]], order: Sequence[int] | None = None) -> Labels:
        """The labels of both sides: real values, class numbers, or names."""
        kept = (int, float, type(None))
        found = [[each if isinstance(each, kept) else str(each) for each in side] for side in sides]
        if any(None in side for side in found):
            raise BadData(f"has rows without a {self.label}", "remove such rows", file=self.where)
        return reals(found, self.where) if self.regression else classes(found, self.where, order)


class Table(Columns):
    """CSV or TSV tables with a header: a column of labels, and one or two columns of sentences."""

    path: UserPath
    validation: UserPath | None = None

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """The rows of a table; without a validation table, a tenth of the rows is held out by the hash of the text."""
        train = self._read(self.path)
        if self.validation is not None:
            return self.rows([train, self._read(self.validation)], model)
        texts = zip(*(train[name] for name in self.columns(list(train), self.label)), strict=True)
        sides = split(map("\0".join, texts), 0.1)
        return self.rows(
            [{name: [column[row] for row in side] for name, column in train.items()} for side in sides], model
        )

    def _read(self, path: Path) -> dict[str, list[str]]:
        """The columns of a table with a header."""
        (_, header), *rows = read_rows(path, quotes=path.suffix.lower() != ".tsv")
        for line, row in rows:
            if len(row) != len(header):
                found = f"has {len(row)} columns in line {line}, but {len(header)} in its header"
                raise BadData(found, "quote the text, or correct the line", file=path)
        self.columns(header, self.label)
        return {name: [row[place] for _, row in rows] for place, name in enumerate(header)}


def read_rows(path: Path, *, quotes: bool) -> list[tuple[int, list[str]]]:
    """The rows of a CSV or TSV file, each with the number of its last line; empty lines are left out."""
    separator = _SEPARATORS.get(path.suffix.lower())
    if separator is None:
        remedy = "give it the ending of its separator, .csv (comma) or .tsv (tab)"
        raise BadData("is neither .csv nor .tsv", remedy, file=path)
    # csv splits lines itself, and only at line ends: str.splitlines would also split at U+2028 and others.
    lines = (line + "\n" for line in read_text(path).replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise BadData(f"cannot be read in line {reader.line_num} ({error})", "correct the line", file=path) from None
    if not rows:
        raise BadData("is empty", "give a table with a header", file=path)
    return rows


@dataclass(frozen=True)
class GlueTask:
    """The columns of a task's files, its labels in the order of their numbers (none: real values), and its metrics."""

    text: tuple[int, ...]
    label: int
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    header: bool = True
    validation: str = "dev.tsv"
    # The official file has a few broken lines, which everybody leaves out.
    broken_lines: bool = False


_ENTAILED = ("entailment", "not_entailment")
TASKS = {
    "cola": GlueTask((3,), 1, metrics=("matthews",), header=False),
    "sst-2": GlueTask((0,), 1),
    "mrpc": GlueTask((3, 4), 0, metrics=("accuracy", "f1")),
    "qqp": GlueTask((3, 4), 5, metrics=("accuracy", "f1"), broken_lines=True),
    "sts-b": GlueTask((7, 8), 9, labels=(), metrics=REGRESSION),
    # The label is the last column: the validation file has the annotators' labels before it, the training file one.
    "mnli": GlueTask((8, 9), -1, labels=("entailment", "neutral", "contradiction"), validation="dev_matched.tsv"),
    "qnli": GlueTask((1, 2), 3, labels=_ENTAILED),
    "rte": GlueTask((1, 2), 3, labels=_ENTAILED),
    "wnli": GlueTask((1, 2), 3),
}


class Glue(Sentences):
    """The tasks of GLUE, in the layout of its official TSV files."""

    name: Literal["cola", "sst-2", "mrpc", "qqp", "sts-b", "mnli", "qnli", "rte", "wnli"]
    path: UserPath
    mismatched: bool = False

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        """The training and validation files of one task (the labels of the test files are not public)."""
        layout, folder = TASKS[self.name], require_folder(self.path)
        mismatched = self.mismatched and self.name == "mnli"
        files = ("train.tsv", "dev_mismatched.tsv" if mismatched else layout.validation)
        sides = [list(zip(*_columns(folder / file, layout), strict=True)) for file in files]
        texts, labels = zip(*(side or [(), ()] for side in sides), strict=True)
        numbers = classes(labels, self.where, layout.labels) if layout.labels else reals(labels, self.where)
        return self.sentences(texts, numbers, model, layout.metrics)


def _columns(path: Path, layout: GlueTask) -> Iterable[tuple[Texts, str]]:
    """The sentences and the label of each row of a file."""
    needed = max(*layout.text, layout.label) + 1 + (layout.label < 0)
    for line, row in read_rows(path, quotes=False)[layout.header :]:
        if len(row) >= needed:
            yield tuple(row[column] for column in layout.text), row[layout.label]
        elif not layout.broken_lines:
            found = f"has {len(row)} columns in line {line}, where {needed} are needed"
            raise BadData(found, "download the official file", file=path)
