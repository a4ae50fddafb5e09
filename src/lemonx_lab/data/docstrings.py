"""English sentences that every machine has, from the standard library's docstrings, as three classification tasks.

`subject`: does the first sentence of a docstring describe a class or a function? (Like SST-2, one sentence with many
clues: a model with two layers of width 64 learns it.)
`order`: is the sentence as it was written, or have two of its words been swapped? (Like CoLA.)
`adjacent`: does the second sentence follow the first in its paragraph, or is it from elsewhere? (Pairs, like RTE.)
Labels are balanced, and the sentences of whole modules are held out for validation.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from typing import Literal

import numpy as np
from pydantic import Field

from lemonx.errors import BadData
from lemonx.guards.limits import LONGEST_TEXT
from lemonx.training.strict import Strict
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import uniforms
from lemonx_lab.data.files import UserPath
from lemonx_lab.data.labels import integers
from lemonx_lab.data.metrics import Metrics
from lemonx_lab.data.model import Model
from lemonx_lab.data.sequences import Texts, sequences
from lemonx_lab.data.splitting import held_out, spread
from lemonx_lab.data.stdlib import sources
from lemonx_lab.data.vocabulary import choose

_FRACTION = 0.15
# Tables of characters and a copy of the manual, which are not docstrings.
_LEFT_OUT = ("encodings/", "pydoc_data/")
_STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_WORD = r"[A-Za-z][A-Za-z'-]*"
# Words alone, so that a sentence in another order has nothing but the order to give it away.
_PLAIN = re.compile(rf"[A-Z][a-z]*( {_WORD},?){{3,}} {_WORD}\.")
_SENTENCE = re.compile(r"[A-Z][^\n]{20,118}\.")
_LARGEST = 100
_HEADER = re.compile(r"^[ \t]*(?:async )?(class|def) ", re.MULTILINE)
_WORDS = (("class", "def"), ("def", "class"))


class Options(Strict):
    question: Literal["subject", "order", "adjacent"] = "subject"
    length: int = Field(128, ge=32, le=LONGEST_TEXT)
    tokenizer: Literal["bytes"] | UserPath | None = None


@functools.cache
def paragraphs() -> dict[str, list[list[str]]]:
    """The paragraphs of each module's docstrings, as lists of sentences.

    A string at the start of a line is nearly always a docstring, and other strings do not look like sentences. Parsing
    the modules would take fifty times as long.
    """
    found: dict[str, list[list[str]]] = {}
    for name, source in sources().items():
        if not name.startswith(_LEFT_OUT):
            text = source.decode("ascii")
            strings = [match[1] for match in _STRING.finditer(text) if _starts_line(text, match.start())]
            parts = (part for string in strings for part in re.split(r"\n\s*\n", string))
            found[name] = [re.split(r"(?<=[.!?]) ", " ".join(part.split())) for part in parts]
    return found


def _starts_line(text: str, place: int) -> bool:
    """Whether only blanks, or the r of a raw string, are before this place in its line."""
    return text[text.rfind("\n", 0, place) + 1 : place].strip() in ("", "r")


def subject() -> list[tuple[str, Texts, int]]:
    """First sentences with their modules, as many about functions (label 1) as about classes (label 0).

    A sentence that occurs with both is left out.
    """
    found: dict[str, dict[str, str]] = {"class": {}, "def": {}}
    for name, source in sources().items():
        text = source.decode("ascii")
        headers = [(match.start(), match[1]) for match in _HEADER.finditer(text)]
        starts = [start for start, _ in headers]
        for match in _STRING.finditer(text):
            number = bisect.bisect(starts, match.start()) - 1
            paragraph = re.split(r"\n\s*\n", match[1].strip())[0]
            sentence = re.split(r"(?<=[.!?]) ", " ".join(paragraph.split()))[0]
            if number >= 0 and _SENTENCE.fullmatch(sentence) and _is_docstring(text, starts[number], match.start()):
                found[headers[number][1]][sentence] = name
    modules = found["class"] | found["def"]
    classes, functions = ([each for each in found[word] if each not in found[other]] for word, other in _WORDS)
    rows: list[tuple[str, Texts, int]] = []
    for held in (False, True):
        sides = [[each for each in side if _is_held(modules[each]) == held] for side in (classes, functions)]
        kept = [[side[place] for place in spread(len(side), min(map(len, sides)))] for side in sides]
        rows += [(modules[each], (each,), label) for label, side in enumerate(kept) for each in side]
    return rows


def _is_docstring(text: str, header: int, place: int) -> bool:
    """Whether the string at `place` is the first thing after the header."""
    return _starts_line(text, place) and text[header:place].rstrip(" \nr").endswith(":")


def order() -> list[tuple[str, Texts, int]]:
    """Sentences with their modules, every second one with two words swapped; label 1 means unchanged."""
    sentences = {
        sentence: module
        for module, parts in paragraphs().items()
        for part in parts
        for sentence in part
        if len(sentence) <= _LARGEST and _PLAIN.fullmatch(sentence) and _swaps(sentence)
    }
    rows = []
    for number, ((sentence, module), draw) in enumerate(zip(sentences.items(), _draws(len(sentences)), strict=True)):
        rows.append((module, (sentence if number % 2 else _swapped(sentence, draw),), number % 2))
    return rows


def _swaps(sentence: str) -> list[tuple[int, int]]:
    """The pairs of words that can change places: not the first, none with a comma, and not the same word twice."""
    words = sentence[:-1].split(" ")
    free = [place for place, word in enumerate(words) if place and not word.endswith(",")]
    return [(i, j) for i in free for j in free if i < j and words[i].lower() != words[j].lower()]


def _swapped(sentence: str, draw: float) -> str:
    """The sentence with two of its words in each other's place.

    >>> _swapped("This is a test of order.", 0.0)
    'This a is test of order.'
    """
    pairs = _swaps(sentence)
    i, j = pairs[int(draw * len(pairs))]
    words = sentence[:-1].split(" ")
    words[i], words[j] = words[j], words[i]
    return " ".join(words) + "."


def adjacent() -> list[tuple[str, Texts, int]]:
    """Pairs of sentences and their modules; every second one has another second sentence; label 1: it follows."""
    found = {
        (first, second): module
        for module, parts in paragraphs().items()
        for part in parts
        for first, second in itertools.pairwise(part)
        if _SENTENCE.fullmatch(first) and _SENTENCE.fullmatch(second)
    }
    sides = {held: [pair for pair, module in found.items() if _is_held(module) == held] for held in (False, True)}
    rows = []
    for number, ((pair, module), draw) in enumerate(zip(found.items(), _draws(len(found)), strict=True)):
        if number % 2 == 0:
            # From its own side, or validation sentences would be seen in training.
            side = sides[_is_held(module)]
            turned = itertools.chain(side[int(draw * len(side)) :], side)
            other = next((other for other in turned if found[other] != module), None)
            if other is None:
                continue
            pair = (pair[0], other[1])
        rows.append((module, pair, number % 2))
    return rows


def _is_held(module: str) -> bool:
    return held_out(module, _FRACTION)


def _draws(count: int) -> np.ndarray:
    """A number in [0, 1) for each of `count` rows, the same in every run."""
    return uniforms((count,), [0], count)[0]


def prepare(task: str, options: Options, model: Model, seed: int) -> Prepared:
    """The sentences of one question."""
    rows = {"subject": subject, "order": order, "adjacent": adjacent}[options.question]()
    train, validation = ([row for row in rows if _is_held(row[0]) == held] for held in (False, True))
    if not train or not validation:
        raise BadData(
            "this Python's standard library has no docstrings", "use a Python that has them, or data of kind table"
        )
    labels = [np.array([label for _, _, label in side], np.int64) for side in (train, validation)]
    return sequences(
        [texts for _, texts, _ in train],
        [texts for _, texts, _ in validation],
        integers(labels[0], labels[1], "docstrings"),
        length=options.length,
        vocabulary=choose(model, options.tokenizer),
        model=model,
        metrics=Metrics("matthews", "accuracy") if options.question == "order" else Metrics("accuracy"),
        where="docstrings",
    )
