"""Specs: an architecture as a table of rows, keyed by the module's name on disk.

A name may hold `*` for the index of a block in a stack (a number where only that block has it, `-1` for the last),
and `{space}` for the index of a unit of a space (`experts.{experts}.up_proj`). Each fact is written once: what is
silenced in an added block, the scale of a tied decoder, eta and eps are derived (check.py, depth.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lemonx.errors import BadCheckpoint
from lemonx.modules import Row
from lemonx.signature import Side
from lemonx.vectors import Space

# The place of a block's index in the name of a row that belongs to the last block alone.
LAST = "-1"
# Larger than any axis of any model: a typing error is told before memory runs out.
LARGEST = 2**24


@dataclass(frozen=True)
class Stack:
    """Blocks that repeat, adding to one stream.

    `period`: original blocks keep their index modulo this (shifted windows alternate). `pinned`: so many
    first blocks are unlike the rest and are never copied. `lists`: config fields with one entry a block. `sets`: the
    blocks have so many sets of weights, each for a run of blocks (0: one a block); `sets_in` is the config field of it.
    """

    size: int
    stream: str
    period: int = 1
    pinned: int = 0
    lists: tuple[str, ...] = ()
    sets: int = 0
    sets_in: str = ""

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

    def axis_size(self, name: str) -> int | None:
        """The size of one axis, or None for `_`."""
        if name == "_":
            return None
        if name.isdigit():
            return int(name)
        return self.spaces[name].size if name in self.spaces else self.fixed[name]

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


class Config(Mapping[str, Any]):
    """config.json with the defaults of its class; it remembers which fields were asked for."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values_on_disk, self.defaults, self.asked = values, defaults, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        if name in self.values_on_disk:
            return self.values_on_disk[name]
        if name in self.defaults:
            return self.defaults[name]
        raise BadCheckpoint(f"config.json has no field {name!r}, which this architecture needs")

    def maybe(self, name: str) -> Any:
        """A field that is no size and that config.json may lack: None then."""
        return self.values_on_disk.get(name)

    def either(self, old: str, new: str) -> Any:
        """A field that has been renamed, under the name that config.json has."""
        return self[old if old in self.values_on_disk else new]

    def aliases(self, **names: str) -> dict[str, str]:
        """Second name -> field, of those that config.json has: transformers lets the second name win."""
        return {second: first for second, first in names.items() if second in self.values_on_disk}

    @property
    def headless(self) -> bool:
        """The class that config.json names is a bare model (LlamaModel), so its last stream is its output."""
        names = self.values_on_disk.get("architectures") or [""]
        return all(name.endswith("Model") and "Head" not in name for name in names)

    def is_a(self, *ends: str) -> bool:
        """The class that config.json names ends in one of these (ForTokenClassification)."""
        names = self.values_on_disk.get("architectures") or [""]
        return all(name.endswith(ends) for name in names)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.defaults, **self.values_on_disk})

    def __len__(self) -> int:
        return len({**self.defaults, **self.values_on_disk})


@dataclass(frozen=True)
class Architecture:
    """A family: its spec, the config fields behind each option, and the preset that fits it."""

    model_types: tuple[str, ...]
    build: Callable[[Config], Spec]
    sizes: Mapping[str, tuple[str, ...]]
    free: str
    defaults: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The first sentence of the spec's docstring."""
        return (self.build.__doc__ or "").strip().split("\n")[0].rstrip(".")

    def config(self, values: Mapping[str, Any]) -> Config:
        return Config(values, self.defaults)

    def spec(self, values: Mapping[str, Any]) -> Spec:
        """The spec of a config; BadCheckpoint where a field that is a size is not one."""
        try:
            spec = self.build(self.config(values))
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise BadCheckpoint(
                f"config.json has a field that makes no sense ({reason}): save the model again"
            ) from None
        sizes = {
            **{n: s.size for n, s in spec.spaces.items()},
            **{n: s.size for n, s in spec.stacks.items()},
            **{f"the sets of {n}": s.stored for n, s in spec.stacks.items()},
            **spec.fixed,
        }
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= LARGEST:
                raise BadCheckpoint(
                    f"config.json makes the size of {name} {size!r}: want a whole number up to {LARGEST}"
                )
        return spec


REGISTRY: dict[str, Architecture] = {}


def architecture(
    *model_types: str, free: str, defaults: Mapping[str, Any] | None = None, **sizes: str | tuple[str, ...]
) -> Callable[[Callable[[Config], Spec]], Callable[[Config], Spec]]:
    """Register a spec for these model types; `width=...`, `heads=...` name the config fields that are sizes.

    `defaults` are the values of fields that config.json may leave out, as transformers has them.
    """

    def register(build: Callable[[Config], Spec]) -> Callable[[Config], Spec]:
        fields = {option: (names,) if isinstance(names, str) else names for option, names in sizes.items()}
        family = Architecture(model_types, build, fields, free, defaults or {})
        for model_type in model_types:
            REGISTRY[model_type] = family
        return build

    return register
