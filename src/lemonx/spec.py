"""Specs: an architecture as a table of rows, keyed by the module's name on disk.

A name may hold `*` for the index of a block in a stack (a number where only that block has it, `-1` for the last),
and `{space}` for the index of a unit of a space (`experts.{experts}.up_proj`). Each fact is written once: what is
silenced in an added block, the scale of a tied decoder, eta and eps are derived (check.py, depth.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lemonx.errors import BadCheckpoint, raise_first
from lemonx.limits import LARGEST, LARGEST_PRODUCT, MOST_BLOCKS
from lemonx.rows import Row
from lemonx.signature import Side
from lemonx.spaces import Space

# The place of a block's index in the name of a row that belongs to the last block alone.
LAST = "-1"
# The config field that says whether a decoder is the embedding.
TIED = "tie_word_embeddings"
# The ends of the names of classes whose head makes no tokens.
SILENT = ("Classification", "ForQuestionAnswering", "ForMultipleChoice")


@dataclass(frozen=True)
class Stack:
    """Blocks that repeat, adding to one stream.

    `period`: original blocks keep their index modulo this (shifted windows alternate). `pinned`: so many
    first blocks are unlike the rest and are never copied. `lists`: config fields with one entry a block; `implied`:
    transformers derives those that config.json leaves out from a block's index. `counts`: config fields that say how
    many first blocks are of one kind. `sets`: the blocks have so many sets of weights, each for a run of
    blocks (0: one a block); `sets_in` is the config field of it. `numbered`: config fields that point at blocks by
    number, counted from 1: `[3, 6]`, or `["stage3", "stage6"]`. `still`: why no block can be added, if none can.
    """

    size: int
    stream: str
    period: int = 1
    pinned: int = 0
    lists: tuple[str, ...] = ()
    implied: bool = False
    counts: tuple[str, ...] = ()
    sets: int = 0
    sets_in: str = ""
    numbered: tuple[str, ...] = ()
    still: str = ""

    @property
    def stored(self) -> int:
        """How many sets of weights there are on disk."""
        return self.sets or self.size

    def set_of(self, block: int) -> int:
        """The set of weights that a block uses, as transformers computes it."""
        return int(block / (self.size / self.stored))


@dataclass(frozen=True)
class Spec:
    """What a checkpoint with a given config is made of.

    `eps` is the config field that norms read unless their row says otherwise. `prefix` may be absent from
    every name in a file (a base model's). `acts` names spaces under a nonlinearity although a norm reads
    them; spaces that no norm touches are taken to be under one. `config` is what config.json must say
    besides the sizes. `follows`: config fields that stay equal to another one. `still`: why a fixed size cannot grow.
    `pointers`: fields of generation_config.json that list [block, unit], with the stack and the space of these.
    `shown`: spaces that leave the model as they are, and so cannot be scaled.
    """

    rows: Mapping[str, Row]
    spaces: Mapping[str, Space]
    stacks: Mapping[str, Stack]
    fixed: Mapping[str, int] = field(default_factory=dict)
    eps: str | None = None
    prefix: str = ""
    acts: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    still: Mapping[str, str] = field(default_factory=dict)
    pointers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    shown: tuple[str, ...] = ()

    def rooted(self, prefix: str) -> Spec:
        """The spec of a class that calls its base model by another name, which every name then begins with."""

        def renamed(name: str) -> str:
            return prefix + name.removeprefix(self.prefix) if name.startswith(self.prefix) else name

        rows = {renamed(name): replace(row, tied=renamed(tied)) if (tied := getattr(row, "tied", None)) else row
                for name, row in self.rows.items()}  # fmt: skip
        stacks = {renamed(name): stack for name, stack in self.stacks.items()}
        return replace(self, rows=rows, stacks=stacks, prefix=prefix)

    def axis_size(self, name: str) -> int | None:
        """The size of one axis, or None for `_`."""
        if name == "_":
            return None
        if name.isdigit():
            return int(name)
        return self.spaces[name].size if name in self.spaces else self.fixed[name]

    @property
    def ties(self) -> bool:
        """Whether a decoder is the embedding."""
        return any(getattr(row, "tied", None) for row in self.rows.values())

    def stack_of(self, row: str) -> str | None:
        """The stack that a row's module is in."""
        return next((stack for stack in self.stacks if row.startswith(f"{stack}.")), None)

    def behind(self, stack: str, index: int) -> str:
        """The space of the stream behind a block; a norm of the last block's own may write another one."""
        stream, own = self.stacks[stack].stream, f"{stack}.{LAST}."
        if index + 1 < self.stacks[stack].size:
            return stream
        norms = [row for name, row in self.rows.items() if name.startswith(own) and row.is_norm]
        return norms[-1].writes.axes[0] if norms else stream

    def side_size(self, side: Side) -> int | None:
        total = 0
        for part in side.parts:
            sizes = [self.axis_size(name) for name in part]
            if None in sizes:
                return None
            total += math.prod(size or 0 for size in sizes)
        return total


def is_bare(name: Any) -> bool:
    """The name of a class without a head: LlamaModel, or a backbone."""
    return str(name).endswith(("Model", "Backbone")) and "Head" not in str(name)


class Config(Mapping[str, Any]):
    """config.json with the defaults of its class; it remembers which fields were asked for.

    A dot leads into a part of it: `vision_config.hidden_size`. `seconds`: second name -> field; transformers reads
    either, and if a file has both and they disagree, it depends on the class which.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], seconds: Mapping[str, str] | None = None
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
            raise BadCheckpoint(f"config.json says {said}, which are names of one size: remove the one that is wrong")
        if not given and name not in self.defaults:
            raise BadCheckpoint(
                f"config.json has no field {name!r}, which this architecture needs: load the model with transformers "
                "and save it again, which writes every field"
            )
        if isinstance(value, list) and len(value) > MOST_BLOCKS:
            raise BadCheckpoint(f"config.json: {name} has {len(value)} entries: at most {MOST_BLOCKS} are allowed")
        return value

    def count(self, name: str) -> int:
        """A field that says how many of something there are, each of which the spec names."""
        value = self[name]
        if type(value) is not int or not 0 < value <= MOST_BLOCKS:
            raise BadCheckpoint(f"config.json: {name} is {value!r}: want a whole number from 1 to {MOST_BLOCKS}")
        return value

    def _given(self, name: str) -> dict[str, Any]:
        """Every name that config.json has for a field, with its value."""
        names = (name, *(second for second, first in self.seconds.items() if first == name))
        parts = {known: self._part(known) for known in names}
        return {known: where[last] for known, (where, last) in parts.items() if last in where}

    def maybe(self, name: str) -> Any:
        """A field that is no size and that config.json may lack: None then."""
        return next(iter(self._given(name).values()), None)

    def _part(self, name: str) -> tuple[Mapping[str, Any], str]:
        """The part of config.json that a field is in, and its name there."""
        *parts, last = name.split(".")
        where = self.values_on_disk
        for part in parts:
            where = where.get(part) or {}
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
        return self.values_on_disk.get("architectures") or []

    def __iter__(self) -> Iterator[str]:
        return iter({**self.defaults, **self.values_on_disk})

    def __len__(self) -> int:
        return len({**self.defaults, **self.values_on_disk})


def with_fields(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with other values for these fields, of which a dot leads into a part.

    >>> with_fields({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 4, "b.c": 5})
    {'a': 4, 'b': {'c': 5, 'd': 3}}
    """
    new = dict(values)
    for name, value in fields.items():
        *parts, last = name.split(".")
        where = new
        for part in parts:
            where[part] = dict(where.get(part) or {})
            where = where[part]
        where[last] = value
    return new


def flat_fields(values: Mapping[str, Any], within: str = "") -> dict[str, Any]:
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


@dataclass(frozen=True)
class Dense:
    """A family without experts, read as one with a single expert.

    `config`: its config as the other family's. `names`: parts of its tensors' names, and what they are called there.
    """

    config: Callable[[Config], dict[str, Any]]
    names: Mapping[str, str]

    def renamed(self, name: str) -> str:
        """A tensor's name in the family with experts."""
        for old, new in self.names.items():
            name = name.replace(old, new)
        return name


@dataclass(frozen=True)
class Architecture:
    """A family: its spec, the config fields behind each option, and its kind, `vision` or `language`.

    `dense`: model types that can become this one, experts of which are copies of their MLP. `aliases`: second names of
    config fields.
    """

    model_types: tuple[str, ...]
    build: Callable[[Config], Spec]
    sizes: Mapping[str, tuple[str, ...]]
    kind: str
    defaults: Mapping[str, Any]
    dense: Mapping[str, Dense] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    # config.json with what a name in it implies, or None if it is not this family's: for files without a model_type.
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] | None = None

    def owns(self, values: Mapping[str, Any]) -> bool:
        """Whether a config.json is this family's: by its model_type, or by what else it says."""
        if "model_type" in values:
            return values["model_type"] in self.model_types
        return self.completed is not None and self.completed(values) is not None

    @property
    def title(self) -> str:
        """The first sentence of the spec's docstring."""
        return (self.build.__doc__ or "").strip().split("\n")[0].rstrip(".")

    def config(self, values: Mapping[str, Any]) -> Config:
        whole = self.completed(values) if self.completed else None
        return Config(whole or values, self.defaults, self.aliases)

    def asks_class(self, values: Mapping[str, Any]) -> bool:
        """Whether the spec of a config depends on the class that it names."""
        self.build(config := self.config(values))
        return config.asked_class

    def as_named(self, values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """These fields under every name that a config.json has for them, so that no old value is left to win."""
        result = {}
        for name, value in fields.items():
            known = [n for n in (name, *self.aliases) if n in values and self.aliases.get(n, n) == name]
            result |= dict.fromkeys(known or [name], value)
        return result

    def spec(self, values: Mapping[str, Any]) -> Spec:
        """The spec of a config; BadCheckpoint where a field that is a size is not one."""
        config = self.config(values)
        try:
            spec = self.build(config)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise BadCheckpoint(
                f"config.json has a field that makes no sense ({reason}): save the model again"
            ) from None
        raise_first(self._field_problems(config))
        raise_first(_size_problems(spec))
        return spec

    def _field_problems(self, config: Config) -> Iterator[BadCheckpoint]:
        """A complaint for every field that is a size by its name and not by its value, whatever a spec made of it."""
        for name in sorted(name for names in self.sizes.values() for name in names if name in config.asked):
            if not (is_ratio if self.has_ratio(name) else is_size)(config[name]):
                want = "a number" if self.has_ratio(name) else "a whole number"
                yield BadCheckpoint(f"config.json: {name} is {config[name]!r}: want {want} above 0")

    def has_ratio(self, name: str) -> bool:
        """Whether a field is a size in widths, which need not be whole."""
        return name in self.sizes.get("ffn_ratio", ())


def is_ratio(value: Any) -> bool:
    """A number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_size(value: Any) -> bool:
    """A whole number above 0, perhaps written 4.0, or a list of them; None is a size that follows another."""
    numbers = value if isinstance(value, list) and value else [value]
    return value is None or all(
        isinstance(v, int | float) and not isinstance(v, bool) and v > 0 and v == v // 1 for v in numbers
    )


def _size_problems(spec: Spec) -> Iterator[BadCheckpoint]:
    """A complaint for every size that is none, or larger than that of any model."""
    axes = {**{n: s.size for n, s in spec.spaces.items()}, **spec.fixed}
    stacks = {
        **{n: s.size for n, s in spec.stacks.items()},
        **{f"the sets of {n}": s.stored for n, s in spec.stacks.items()},
    }
    for sizes, most in ((axes, LARGEST), (stacks, MOST_BLOCKS)):
        for name, size in sizes.items():
            if type(size) is not int or not 0 < size <= most:
                yield BadCheckpoint(f"config.json makes the size of {name} {size!r}: want a whole number up to {most}")
    for name, space in spec.spaces.items():
        parts = {"units chosen": (space.chosen, space.size), "entries that turn": (space.rotary, space.size)}
        for what, (number, most) in {**parts, "positions": (space.positions, LARGEST)}.items():
            if type(number) is not int or not 0 <= number <= most:
                yield BadCheckpoint(f"config.json gives {name} {number!r} {what}: want a whole number up to {most}")
        if not 0 < abs(space.scale) < math.inf:
            yield BadCheckpoint(f"config.json multiplies {name} by {space.scale}: want a number")
    for name, row in spec.rows.items():
        for side in (row.reads, row.writes):
            if (spec.side_size(side) or 0) > LARGEST_PRODUCT:
                yield BadCheckpoint(
                    f"config.json makes {name} {spec.side_size(side)} wide: at most {LARGEST_PRODUCT} are allowed"
                )


REGISTRY: dict[str, Architecture] = {}


def architecture(
    *model_types: str,
    kind: str,
    defaults: Mapping[str, Any] | None = None,
    # As in Architecture; Any, because a dict of sizes could name them, for all that a type checker knows.
    dense: Any = None,
    aliases: Any = None,
    completed: Any = None,
    **sizes: str | tuple[str, ...],
) -> Callable[[Callable[[Config], Spec]], Callable[[Config], Spec]]:
    """Register a spec for these model types; `width=...`, `heads=...` name the config fields that are sizes.

    `defaults` are the values of fields that config.json may leave out, as transformers has them; `completed` adds what
    a name in it implies. `dense`: families without experts that can become this one. `aliases`: second name -> field.
    """

    def register(build: Callable[[Config], Spec]) -> Callable[[Config], Spec]:
        fields = {option: (names,) if isinstance(names, str) else names for option, names in sizes.items()}
        family = Architecture(model_types, build, fields, kind, defaults or {}, dense or {}, aliases or {}, completed)
        for model_type in model_types:
            REGISTRY[model_type] = family
        return build

    return register
