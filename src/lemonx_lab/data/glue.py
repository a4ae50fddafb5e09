"""The tasks of GLUE, in the layout of its official TSV files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LONGEST_TEXT
from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.files import UserPath, require_folder
from lemonx_lab.data.labels import names, reals
from lemonx_lab.data.metrics import REGRESSION, Metrics
from lemonx_lab.data.model import Model
from lemonx_lab.data.sequences import Texts, sequences
from lemonx_lab.data.table import read
from lemonx_lab.data.vocabulary import choose

_YES_NO = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask:
    """The columns of a task's files, its labels in the order of their numbers (none: real values), and its metrics."""

    text: tuple[int, ...]
    label: int
    labels: tuple[str, ...] = _YES_NO
    metrics: tuple[str, ...] = ("accuracy",)
    header: bool = True
    validation: str = "dev.tsv"
    # The official file has a few broken lines, which everybody leaves out.
    broken_lines: bool = False


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


class Options(Strict):
    name: Literal["cola", "sst-2", "mrpc", "qqp", "sts-b", "mnli", "qnli", "rte", "wnli"]
    path: UserPath
    mismatched: bool = False
    length: int = Field(128, ge=8, le=LONGEST_TEXT)
    tokenizer: Literal["bytes"] | UserPath | None = None


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """The training and validation files of one task (the labels of the test files are not public)."""
    layout = TASKS[options.name]
    folder = require_folder(options.path)
    texts, labels = _rows(folder / "train.tsv", layout)
    mismatched = options.mismatched and options.name == "mnli"
    held_texts, held_labels = _rows(folder / ("dev_mismatched.tsv" if mismatched else layout.validation), layout)
    where = f"{options.path} ({options.name})"
    return sequences(
        texts,
        held_texts,
        names(labels, held_labels, where, layout.labels) if layout.labels else reals(labels, held_labels, where),
        length=options.length,
        vocabulary=choose(model, options.tokenizer),
        model=model,
        metrics=Metrics(*layout.metrics),
        where=where,
    )


def _rows(path: Path, layout: GlueTask) -> tuple[list[Texts], list[str]]:
    """The sentences and labels of a file."""
    texts: list[Texts] = []
    labels: list[str] = []
    needed = max(*layout.text, layout.label) + 1 + (layout.label < 0)
    for line, row in read(path, quotes=False)[layout.header :]:
        if len(row) >= needed:
            texts.append(tuple(row[column] for column in layout.text))
            labels.append(row[layout.label])
        elif not layout.broken_lines:
            raise BadData(
                f"has {len(row)} columns in line {line}, where {needed} are needed",
                "download the official file",
                file=path,
            )
    return texts, labels
