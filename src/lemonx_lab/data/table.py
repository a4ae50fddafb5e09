"""CSV or TSV tables with a header: a column of labels, and one or two columns of sentences."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LONGEST_TEXT
from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.files import UserPath, read_text
from lemonx_lab.data.labels import names, reals
from lemonx_lab.data.metrics import REGRESSION, Metrics
from lemonx_lab.data.model import Model
from lemonx_lab.data.sequences import Texts, sequences
from lemonx_lab.data.splitting import split
from lemonx_lab.data.vocabulary import choose

# What the columns of sentences are called, unless the options say.
COLUMNS = (("sentence1", "sentence2"), ("text",), ("sentence",))
FRACTION = 0.1


class Options(Strict):
    path: UserPath
    validation: UserPath | None = None
    text: str | Annotated[tuple[str, ...], Field(min_length=1, max_length=2)] | None = None
    label: str = "label"
    regression: bool = False
    metrics: tuple[Literal["accuracy", "f1", "matthews"], ...] = ("accuracy",)
    length: int = Field(128, ge=8, le=LONGEST_TEXT)
    tokenizer: Literal["bytes"] | UserPath | None = None


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """The rows of a table; without a validation table, a tenth of the rows is held out by the hash of the text."""
    texts, labels = columns(options.path, options.text, options.label)
    if options.validation is not None:
        held_texts, held_labels = columns(options.validation, options.text, options.label)
    else:
        keys = ["\0".join(each) for each in texts]
        labels, held_labels = split(keys, labels, FRACTION)
        texts, held_texts = split(keys, texts, FRACTION)
    where = str(options.path)
    return sequences(
        texts,
        held_texts,
        (reals if options.regression else names)(labels, held_labels, where),
        length=options.length,
        vocabulary=choose(model, options.tokenizer),
        model=model,
        metrics=Metrics(*(REGRESSION if options.regression else options.metrics)),
        where=where,
    )


def columns(path: Path, text: str | tuple[str, ...] | None, label: str) -> tuple[list[Texts], list[str]]:
    """The sentences and labels of a table with a header."""
    rows = read(path, quotes=path.suffix.lower() != ".tsv")
    header = rows[0][1]
    wanted = text_columns(text, header, str(path))
    places = [place(name, header, str(path)) for name in (*wanted, label)]
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise BadData(
                f"has {len(row)} columns in line {line}, but {len(header)} in its header",
                "quote the text, or correct the line",
                file=path,
            )
    values = [[row[place] for place in places] for _, row in rows[1:]]
    return [tuple(row[:-1]) for row in values], [row[-1] for row in values]


def text_columns(text: str | tuple[str, ...] | None, header: Sequence[str], where: str) -> tuple[str, ...]:
    """The names of the columns of sentences: as given, or the usual ones."""
    if text is not None:
        return (text,) if isinstance(text, str) else text
    for usual in COLUMNS:
        if set(usual) <= set(header):
            return usual
    raise BadData(f"has the columns {', '.join(header)}", "name those with the sentences in text", file=where)


def place(name: str, header: Sequence[str], where: str) -> int:
    """The position of a column."""
    if name not in header:
        raise BadData(f"has no column {name!r}, only {', '.join(header)}", "name others in text and label", file=where)
    return list(header).index(name)


def read(path: Path, *, quotes: bool) -> list[tuple[int, list[str]]]:
    """The rows of a CSV or TSV file, each with the number of its last line; empty lines are left out."""
    separators = {".csv": ",", ".tsv": "\t"}
    separator = separators.get(path.suffix.lower())
    if separator is None:
        raise BadData(
            "is neither .csv nor .tsv", "give it the ending of its separator, .csv (comma) or .tsv (tab)", file=path
        )
    # csv splits lines itself, and only at line ends: str.splitlines would also split at U+2028 and others.
    text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    lines = (line + "\n" for line in text.split("\n"))
    reader = csv.reader(
        lines, delimiter=separator, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE, strict=True
    )
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise BadData(f"cannot be read in line {reader.line_num} ({error})", "correct the line", file=path) from None
    if not rows:
        raise BadData("is empty", "give a table with a header", file=path)
    return rows
