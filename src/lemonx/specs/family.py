"""A family of models: its table, the config fields that are sizes, and the registry of all families."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, raise_first
from lemonx.guards.limits import LARGEST, LARGEST_PRODUCT, MOST_BLOCKS
from lemonx.specs.config import Config
from lemonx.specs.spec import Spec


@dataclass(frozen=True)
class Dense:
    """A family without experts, read as one with a single expert.

    `config`: its config as the other family's. `names`: parts of its tensors' names, and what they are called there.
    """

    config: Callable[[Config], dict[str, JsonValue]]
    names: Mapping[str, str]

    def renamed(self, name: str) -> str:
        """A tensor's name in the family with experts."""
        for old, new in self.names.items():
            name = name.replace(old, new)
        return name


@dataclass(frozen=True)
class Architecture:
    """A family: its spec, the config fields behind each option, and its kind: `vision`, `language` or `other`.

    `dense`: model types that can become this one, experts of which are copies of their MLP. `aliases`: second names of
    config fields.
    """

    model_types: tuple[str, ...]
    build: Callable[[Config], Spec]
    sizes: Mapping[str, tuple[str, ...]]
    kind: str
    defaults: Mapping[str, JsonValue]
    dense: Mapping[str, Dense] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Where the table is from, if it is not one of lemonx's own; and what shows that it holds for the configs of a
    # source and a target: it raises Refused otherwise.
    table: str = ""
    confirm: Callable[[Mapping[str, JsonValue], Mapping[str, JsonValue]], None] | None = None
    # config.json with what a name in it implies, or None if it is not this family's: for files without a model_type.
    completed: Callable[[Mapping[str, JsonValue]], Mapping[str, JsonValue] | None] | None = None

    def owns(self, values: Mapping[str, JsonValue]) -> bool:
        """Whether a config.json is this family's: by its model_type, or by what else it says."""
        if "model_type" in values:
            return values["model_type"] in self.model_types
        return self.completed is not None and self.completed(values) is not None

    @property
    def title(self) -> str:
        """The first sentence of the spec's docstring."""
        return (self.build.__doc__ or "").strip().split("\n")[0].rstrip(".")

    def config(self, values: Mapping[str, JsonValue]) -> Config:
        whole = self.completed(values) if self.completed else None
        return Config(whole or values, self.defaults, self.aliases)

    def asks_class(self, values: Mapping[str, JsonValue]) -> bool:
        """Whether the spec of a config depends on the class that it names."""
        self.build(config := self.config(values))
        return config.asked_class

    def as_named(self, values: Mapping[str, JsonValue], fields: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """These fields under every name that a config.json has for them, so that no old value is left to win."""
        result = {}
        for name, value in fields.items():
            known = [n for n in (name, *self.aliases) if n in values and self.aliases.get(n, n) == name]
            result |= dict.fromkeys(known or [name], value)
        return result

    def spec(self, values: Mapping[str, JsonValue]) -> Spec:
        """The spec of a config; BadCheckpoint where a field that is a size is not one."""
        config = self.config(values)
        try:
            spec = self.build(config)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise BadCheckpoint(
                f"has a field that makes no sense ({reason})",
                "correct it, or save the model again with transformers",
                file=CONFIG,
            ) from None
        raise_first(self._field_problems(config))
        raise_first(_size_problems(spec))
        return spec

    def _field_problems(self, config: Config) -> Iterator[BadCheckpoint]:
        """A complaint for every field that is a size by its name and not by its value, whatever a spec made of it."""
        for name in sorted(name for names in self.sizes.values() for name in names if name in config.asked):
            if not (is_ratio if self.has_ratio(name) else is_size)(config[name]):
                want = "a number" if self.has_ratio(name) else "a whole number"
                yield BadCheckpoint(f"has {name} = {config[name]!r}", f"use {want} above 0", file=CONFIG)

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
                yield BadCheckpoint(
                    f"gives {name} the size {size!r}", f"use a whole number from 1 to {most}", file=CONFIG
                )
    for name, space in spec.spaces.items():
        yield from space.problems(name)
    for name, row in spec.rows.items():
        for side in (row.reads, row.writes):
            if (spec.side_size(side) or 0) > LARGEST_PRODUCT:
                yield BadCheckpoint(
                    f"makes {name} {spec.side_size(side)} wide",
                    f"use sizes that make it at most {LARGEST_PRODUCT}",
                    file=CONFIG,
                )


# A size in config.json, or one for every stage.
FieldSize = int | list[int]

REGISTRY: dict[str, Architecture] = {}


@contextmanager
def registered() -> Generator[dict[str, Architecture]]:
    """A context that gives the families which are registered in it, once it ends; the registry is then as before."""
    before, new = dict(REGISTRY), dict[str, Architecture]()
    try:
        yield new
    finally:
        new |= {name: family for name, family in REGISTRY.items() if before.get(name) is not family}
        REGISTRY.clear()
        REGISTRY.update(before)


def architecture(
    *model_types: str,
    kind: str,
    defaults: Mapping[str, JsonValue] | None = None,
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
        family = Architecture(
            model_types,
            build,
            fields,
            kind,
            defaults or {},
            dense=dense or {},
            aliases=aliases or {},
            completed=completed,
        )
        for model_type in model_types:
            REGISTRY[model_type] = family
        return build

    return register
