"""English sentences that every machine has, from the standard library's docstrings, as three classification tasks.

- `subject`: does the first sentence of a docstring describe a class or a function? One sentence has many clues, as in
  SST-2. A model with two layers of width 64 learns it.
- `order`: is the sentence as it was written, or have two of its words been swapped? It is like CoLA.
- `adjacent`: does the second sentence follow the first in its paragraph, or is it from elsewhere? Pairs, as in RTE.

Labels are balanced, and the sentences of whole modules are held out for validation.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Literal

import numpy as np

from lemonx.errors import BadData
from lemonx_lab.data import Prepared
from lemonx_lab.data.examples import held_out, spread, uniforms
from lemonx_lab.data.labels import classes
from lemonx_lab.data.language import sources
from lemonx_lab.data.model import Model
from lemonx_lab.data.sentences import Sentences
from lemonx_lab.data.vocabulary import Texts

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

# The module that a row is from, its sentences, and its label.
Row = tuple[str, Texts, int]


def _strings(text: str) -> Iterator[re.Match[str]]:
    """The strings at the start of a line, with nothing but blanks or the r of a raw string before them.

    Nearly all of them are docstrings, and others do not look like sentences. Parsing would take fifty times as long.
    """
    for match in _STRING.finditer(text):
        if text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip() in ("", "r"):
            yield match


def _sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", " ".join(paragraph.split()))


@functools.cache
def paragraphs() -> dict[str, list[list[str]]]:
    """The paragraphs of each module's docstrings, as lists of sentences."""
    texts = {name: source.decode("ascii") for name, source in sources().items() if not name.startswith(_LEFT_OUT)}
    return {
        name: [_sentences(part) for match in _strings(text) for part in re.split(r"\n\s*\n", match[1])]
        for name, text in texts.items()
    }


def subject() -> list[Row]:
    """First sentences with their modules, as many about functions (label 1) as about classes (label 0).

    A sentence that occurs with both is left out.
    """
    found: dict[str, dict[str, str]] = {"class": {}, "def": {}}
    for name, source in sources().items():
        text = source.decode("ascii")
        headers = [(match.start(), match[1]) for match in _HEADER.finditer(text)]
        starts = [start for start, _ in headers]
        for match in _strings(text):
            number = bisect.bisect(starts, match.start()) - 1
            sentence = _sentences(re.split(r"\n\s*\n", match[1].strip())[0])[0]
            # A docstring is the first thing after its header.
            is_first = number >= 0 and text[starts[number] : match.start()].rstrip(" \nr").endswith(":")
            if is_first and _SENTENCE.fullmatch(sentence):
                found[headers[number][1]][sentence] = name
    modules = found["class"] | found["def"]
    sides = [[each for each in found[word] if each not in found[other]] for word, other in _WORDS]
    rows: list[Row] = []
    for held in (False, True):
        kept = [[each for each in side if _is_held(modules[each]) == held] for side in sides]
        for label, side in enumerate(kept):
            chosen = [side[place] for place in spread(len(side), min(map(len, kept)))]
            rows += [(modules[each], (each,), label) for each in chosen]
    return rows


def order() -> list[Row]:
    """Sentences with their modules, every second one with two words swapped; label 1 means unchanged."""
    sentences = {
        sentence: module
        for module, parts in paragraphs().items()
        for sentence in itertools.chain(*parts)
        if len(sentence) <= _LARGEST and _PLAIN.fullmatch(sentence) and _swaps(sentence)
    }
    return [
        (module, (sentence if number % 2 else _swapped(sentence, draw),), number % 2)
        for number, ((sentence, module), draw) in enumerate(zip(sentences.items(), _draws(sentences), strict=True))
    ]


def _swaps(sentence: str) -> list[tuple[int, int]]:
    """The pairs of words that can change places: not the first, none with a comma, and not the same word twice."""
    words = sentence[:-1].split(" ")
    free = [place for place, word in enumerate(words) if place and not word.endswith(",")]
    return [(i, j) for i, j in itertools.combinations(free, 2) if words[i].lower() != words[j].lower()]


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


def adjacent() -> list[Row]:
    """Pairs of sentences and their modules; every second one has another second sentence; label 1: it follows."""
    found = {
        (first, second): module
        for module, parts in paragraphs().items()
        for part in parts
        for first, second in itertools.pairwise(part)
        if _SENTENCE.fullmatch(first) and _SENTENCE.fullmatch(second)
    }
    sides = {held: [pair for pair, module in found.items() if _is_held(module) == held] for held in (False, True)}
    rows: list[Row] = []
    for number, ((pair, module), draw) in enumerate(zip(found.items(), _draws(found), strict=True)):
        if number % 2:
            rows.append((module, pair, 1))
            continue
        # From its own side, or validation sentences would be seen in training.
        side = sides[_is_held(module)]
        turned = itertools.chain(side[int(draw * len(side)) :], side)
        if other := next((other for other in turned if found[other] != module), None):
            rows.append((module, (pair[0], other[1]), 0))
    return rows


def _is_held(module: str) -> bool:
    return held_out(module, _FRACTION)


def _draws(rows: dict[Texts, str] | dict[str, str]) -> np.ndarray:
    """A number in [0, 1) for each of the rows, the same in every run."""
    return uniforms((len(rows),), [0], len(rows))[0]


class Docstrings(Sentences):
    """The sentences of one question."""

    question: Literal["subject", "order", "adjacent"] = "subject"

    def prepare(self, task: str, model: Model, seed: int) -> Prepared:
        rows = {"subject": subject, "order": order, "adjacent": adjacent}[self.question]()
        sides = [[row for row in rows if _is_held(row[0]) == held] for held in (False, True)]
        if not all(sides):
            raise BadData(
                "this Python's standard library has no docstrings", "use a Python that has them, or data of kind table"
            )
        metrics = ("matthews", "accuracy") if self.question == "order" else ("accuracy",)
        numbers = classes([[label for _, _, label in side] for side in sides], self.where)
        return self.sentences([[texts for _, texts, _ in side] for side in sides], numbers, model, metrics)
