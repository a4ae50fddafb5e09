"""The kinds of data, one row each: for which tasks, and the class whose fields are the options."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lemonx.errors import BadData

if TYPE_CHECKING:
    from lemonx_lab.data.examples import Data

TASKS = ("causal-lm", "masked-lm", "image-classification", "sequence-classification")
LANGUAGE, IMAGES, SEQUENCES = TASKS[:2], TASKS[2:3], TASKS[3:]


@dataclass(frozen=True)
class Kind:
    """One kind of data. `embedded` data needs no file of the user's; `place` is the module and name of its class."""

    tasks: tuple[str, ...]
    place: tuple[str, str]
    text: str
    embedded: bool = False

    def data_class(self) -> type[Data]:
        """The class of this kind."""
        module, name = self.place
        return getattr(importlib.import_module(f"lemonx_lab.data.{module}"), name)


# The table is apart from the classes so that help needs no torch.
KINDS = {
    "stdlib": Kind(LANGUAGE, ("language", "Stdlib"), "the Python standard library's own source, as bytes", True),
    "digits": Kind(IMAGES, ("digits", "Digits"), "scikit-learn's digits, distorted afresh on a larger canvas", True),
    "docstrings": Kind(
        SEQUENCES,
        ("docstrings", "Docstrings"),
        "sentences of the standard library's docstrings: of a class? in order? adjacent?",
        True,
    ),
    "text": Kind(LANGUAGE, ("language", "Text"), "UTF-8 text, a file or a folder"),
    "tokens": Kind(LANGUAGE, ("language", "Tokens"), "token ids in .npy files"),
    "images": Kind(IMAGES, ("pictures", "Folder"), "a folder of images, one folder per class"),
    "idx": Kind(IMAGES, ("pictures", "Idx"), "a folder of IDX files, as MNIST's, gzipped or not"),
    "npz": Kind(IMAGES, ("pictures", "Npz"), "images and labels in an .npz file"),
    "glue": Kind(SEQUENCES, ("sentences", "Glue"), "a task of GLUE in its official TSV files"),
    "table": Kind(SEQUENCES, ("sentences", "Table"), "a CSV or TSV table with a header"),
    "hf": Kind(TASKS, ("hf", "Saved"), "a Hugging Face dataset saved on disk"),
}


def describe(*, embedded: bool = True) -> dict[str, str]:
    """A line about each kind of data that comes with lemonx, or about each that is read from files.

    >>> list(describe())[0]
    'stdlib'
    """
    return {name: f"{kind.text} ({', '.join(kind.tasks)})" for name, kind in KINDS.items() if kind.embedded == embedded}


def options(task: str, data: Mapping[str, Any]) -> Data:
    """The checked options of a data section; nothing is read."""
    from pydantic import ValidationError

    from lemonx.training.strict import first_problem

    if task not in TASKS:
        raise BadData(f"there is no task {task!r}", f"choose {', '.join(TASKS)}")
    if not isinstance(data, Mapping):
        raise BadData(f"data is {data!r}, not a section of keys and values", f"write data: {{kind: {data}}}")
    name = data.get("kind")
    fitting = f"choose {', '.join(n for n, kind in KINDS.items() if task in kind.tasks)}"
    if not isinstance(name, str) or name not in KINDS:
        raise BadData("data has no kind" if name is None else f"there is no data of kind {name!r}", fitting)
    if task not in KINDS[name].tasks:
        raise BadData(f"data of kind {name!r} is for {', '.join(KINDS[name].tasks)}, not for {task}", fitting)
    kind = KINDS[name].data_class()
    try:
        return kind.model_validate({key: value for key, value in data.items() if key != "kind"})
    except ValidationError as error:
        found, remedy = first_problem(error, kind)
        raise BadData(f"data of kind {name!r}: {found}", remedy or "correct it") from None
