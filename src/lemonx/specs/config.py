"""config.json with the defaults of its class, and its fields by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lemonx.checkpoints.config import class_names
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint
from lemonx.guards.limits import MOST_BLOCKS
from lemonx.specs.spec import is_bare

# The config field that says whether a decoder is the embedding.
TIED = "tie_word_embeddings"


# The ends of the names of classes whose head makes no tokens.
SILENT = ("Classification", "ForQuestionAnswering", "ForMultipleChoice")


class Config(Mapping[str, Any]):
    """config.json with the defaults of its class; it remembers which fields were asked for.

    A dot leads into a part of it: `vision_config.hidden_size`. `seconds`: second name -> field; transformers reads
    either, and if a file has both and they disagree, it depends on the class which.
    """

    def __init__(
        self,
        values: Mapping[str, JsonValue],
        defaults: Mapping[str, JsonValue],
        seconds: Mapping[str, str] | None = None,
    ) -> None:
        self.values_on_disk, self.defaults, self.asked = values, defaults, set[str]()
        self.asked_class = False
        self.seconds = seconds or {}

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        given = self._given(name)
        value, *others = given.values() or [self.defaults.get(name)]
        if any(other != value for other in others):
            said = " and ".join(f"{known} = {value}" for known, value in given.items())
            raise BadCheckpoint(
                f"says {said}, which are two names of one size", "remove the one that is wrong", file=CONFIG
            )
        if not given and name not in self.defaults:
            raise BadCheckpoint(
                f"has no field {name!r}, which this architecture needs",
                "load the model with transformers and save it again, which writes every field",
                file=CONFIG,
            )
        if isinstance(value, list) and len(value) > MOST_BLOCKS:
            raise BadCheckpoint(f"has {len(value)} entries in {name}", f"use at most {MOST_BLOCKS}", file=CONFIG)
        return value

    def count(self, name: str) -> int:
        """A field that says how many of something there are, each of which the spec names."""
        value = self[name]
        if type(value) is not int or not 0 < value <= MOST_BLOCKS:
            raise BadCheckpoint(f"has {name} = {value!r}", f"use a whole number from 1 to {MOST_BLOCKS}", file=CONFIG)
        return value

    def _given(self, name: str) -> dict[str, JsonValue]:
        """Every name that config.json has for a field, with its value."""
        names = (name, *(second for second, first in self.seconds.items() if first == name))
        parts = {known: self._part(known) for known in names}
        return {known: where[last] for known, (where, last) in parts.items() if last in where}

    def maybe(self, name: str) -> Any:
        """A field that is no size and that config.json may lack: None then."""
        return next(iter(self._given(name).values()), None)

    def _part(self, name: str) -> tuple[Mapping[str, JsonValue], str]:
        """The part of config.json that a field is in, and its name there."""
        *parts, last = name.split(".")
        where = self.values_on_disk
        for part in parts:
            where = _inner(where, part)
        return where, last

    @property
    def headless(self) -> bool:
        """The class that config.json names is a bare model (LlamaModel), so its last stream is its output."""
        return all(is_bare(name) for name in self._classes or [""])

    def tied(self, embedding: str) -> str | None:
        """The embedding that the head of this model shares its weight with, if it has a head and shares one."""
        return embedding if self[TIED] and not self.headless and not self.is_a(*SILENT) else None

    def is_a(self, *ends: str) -> bool:
        """The class that config.json names ends in one of these: `ForImageClassification`."""
        return any(name.endswith(ends) for name in self._classes)

    @property
    def _classes(self) -> list[str]:
        self.asked_class = True
        return class_names(self.values_on_disk)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.defaults, **self.values_on_disk})

    def __len__(self) -> int:
        return len({**self.defaults, **self.values_on_disk})


def _inner(values: Mapping[str, JsonValue], part: str) -> Mapping[str, JsonValue]:
    """A part of config.json, which may be missing."""
    inner = values.get(part) or {}
    if not isinstance(inner, dict):
        raise BadCheckpoint(f"has {part} = {inner!r:.60}", "write it as an object with its own fields", file=CONFIG)
    return inner


def field_at(values: Mapping[str, JsonValue], name: str) -> JsonValue:
    """A field of config.json, of which a dot leads into a part; None if it is not there.

    >>> field_at({"b": {"c": 2}}, "b.c")
    2
    """
    *parts, last = name.split(".")
    for part in parts:
        values = _inner(values, part)
    return values.get(last)


def with_fields(values: Mapping[str, JsonValue], fields: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """config.json with other values for these fields, of which a dot leads into a part.

    >>> with_fields({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 4, "b.c": 5})
    {'a': 4, 'b': {'c': 5, 'd': 3}}
    """
    new = dict(values)
    for name, value in fields.items():
        *parts, last = name.split(".")
        where = new
        for part in parts:
            copied = dict(_inner(where, part))
            where[part] = copied
            where = copied
        where[last] = value
    return new


def flat_fields(values: Mapping[str, JsonValue], within: str = "") -> dict[str, JsonValue]:
    """Every field of config.json by its name, those of a part (`vision_config`) behind the part's and a dot.

    >>> flat_fields({"a": 1, "text_config": {"c": 2}})
    {'a': 1, 'text_config.c': 2}
    """
    result = {}
    for name, value in values.items():
        if name.endswith(("_config", "_args")) and isinstance(value, Mapping):
            result |= flat_fields(value, f"{within}{name}.")
        else:
            result[within + name] = value
    return result
