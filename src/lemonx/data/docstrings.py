"""Real English sentences that every machine has: those of the standard library's docstrings, with two questions.

`order`: is the sentence as it was written, or have two of its words changed places? (As CoLA asks.)
`adjacent`: does the second sentence follow the first in its paragraph, or is it from elsewhere? (A task of pairs, as
RTE.) Labels are balanced, and the sentences of whole modules are held out for validation.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Literal

import numpy as np
from pydantic import Field

from lemonx.data import Prepared
from lemonx.data.examples import Strict, uniforms
from lemonx.data.files import UserPath
from lemonx.data.labels import integers
from lemonx.data.metrics import Metrics
from lemonx.data.model import Model
from lemonx.data.sequences import Texts, sequences
from lemonx.data.splitting import held_out
from lemonx.data.stdlib import sources
from lemonx.data.vocabulary import choose
from lemonx.errors import BadData

_FRACTION = 0.15
# Tables of characters and a copy of the manual, which are not docstrings.
_LEFT_OUT = ("encodings/", "pydoc_data/")
_STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_WORD = r"[A-Za-z][A-Za-z'-]*"
# Words alone, so that a sentence in another order has nothing but the order to give it away.
_PLAIN = re.compile(rf"[A-Z][a-z]*( {_WORD},?){{3,}} {_WORD}\.")
_SENTENCE = re.compile(r"[A-Z][^\n]{20,118}\.")
_LARGEST = 100


class Options(Strict):
    question: Literal["order", "adjacent"] = "order"
    length: int = Field(128, ge=32)
    tokenizer: Literal["bytes"] | UserPath | None = None


@functools.cache
def paragraphs() -> dict[str, list[list[str]]]:
    """The paragraphs of each module's docstrings, as lists of sentences.

    A string that starts a line is a docstring, nearly always, and what else there is does not look like sentences;
    parsing the modules would take fifty times as long.
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


def order() -> list[tuple[str, Texts, int]]:
    """Sentences with their modules, every second one with two words swapped: label 1 means as it was written."""
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
    """Pairs of sentences with their modules; every second one has another pair's second sentence: label 1 follows."""
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
    rows = {"order": order, "adjacent": adjacent}[options.question]()
    train, validation = ([row for row in rows if _is_held(row[0]) == held] for held in (False, True))
    if not train or not validation:
        raise BadData("this Python's standard library has no docstrings: use one that has, or data of kind table")
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
