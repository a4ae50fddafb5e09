"""The kinds of data, one row each: for which tasks, and the module whose `Options` and `prepare` serve it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lemonx.errors import BadData

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

TASKS = ("causal-lm", "masked-lm", "image-classification", "sequence-classification")
LANGUAGE = TASKS[:2]
IMAGES = TASKS[2:3]
SEQUENCES = TASKS[3:]


@dataclass(frozen=True)
class Kind:
    """One kind of data; `embedded` data needs no file of the user's."""

    tasks: tuple[str, ...]
    text: str
    embedded: bool = False


# The module of a kind has the kind's name. The table is apart from the modules so that help needs no torch.
KINDS = {
    "stdlib": Kind(LANGUAGE, "the Python standard library's own source, as bytes", embedded=True),
    "digits": Kind(IMAGES, "scikit-learn's digits, distorted afresh on a larger canvas", embedded=True),
    "docstrings": Kind(
        SEQUENCES, "sentences of the standard library's docstrings: of a class? in order? adjacent?", embedded=True
    ),
    "text": Kind(LANGUAGE, "UTF-8 text, a file or a folder"),
    "tokens": Kind(LANGUAGE, "token ids in .npy files"),
    "images": Kind(IMAGES, "a folder of images, one folder per class"),
    "idx": Kind(IMAGES, "a folder of IDX files, as MNIST's, gzipped or not"),
    "npz": Kind(IMAGES, "images and labels in an .npz file"),
    "glue": Kind(SEQUENCES, "a task of GLUE in its official TSV files"),
    "table": Kind(SEQUENCES, "a CSV or TSV table with a header"),
    "hf": Kind(TASKS, "a Hugging Face dataset saved on disk"),
}


def describe(*, embedded: bool = True) -> dict[str, str]:
    """A line about each kind of data: those that come with lemonx, or those that are read from files.

    >>> list(describe())[0]
    'stdlib'
    """
    return {name: f"{kind.text} ({', '.join(kind.tasks)})" for name, kind in KINDS.items() if kind.embedded == embedded}


def module(kind: str) -> ModuleType:
    """The module that serves a kind of data."""
    return importlib.import_module(f"lemonx_lab.data.{kind}")


def options(task: str, data: Mapping[str, Any]) -> BaseModel:
    """The checked options of a data section; nothing is read."""
    from pydantic import ValidationError

    if task not in TASKS:
        raise BadData(f"there is no task {task!r}", f"choose {', '.join(TASKS)}")
    if not isinstance(data, Mapping):
        raise BadData(f"data is {data!r}, not a section of keys and values", f"write data: {{kind: {data}}}")
    name = data.get("kind")
    if not isinstance(name, str) or name not in KINDS:
        found = "data has no kind" if name is None else f"there is no data of kind {name!r}"
        raise BadData(found, f"choose {', '.join((n for n, k in KINDS.items() if task in k.tasks))}")
    if task not in KINDS[name].tasks:
        raise BadData(
            f"data of kind {name!r} is for {', '.join(KINDS[name].tasks)}, not for {task}",
            f"choose {', '.join((n for n, k in KINDS.items() if task in k.tasks))}",
        )
    try:
        return module(name).Options.model_validate({key: value for key, value in data.items() if key != "kind"})
    except ValidationError as error:
        raise _first(name, error) from None


def _first(kind: str, error: ValidationError) -> BadData:
    """The first complaint of pydantic, with the options there are."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "options"
    known = ", ".join(module(kind).Options.model_fields)
    found = f"data of kind {kind!r} has a wrong {where} ({first['msg'].removeprefix('Value error, ')})"
    return BadData(found, f"its options are {known}")
