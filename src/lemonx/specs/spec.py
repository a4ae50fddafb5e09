"""Specs: an architecture as a table of rows, keyed by the module's name on disk.

A name may hold `*` for the index of a block in a stack (a number where only that block has it, `-1` for the last),
and `{space}` for the index of a unit of a space (`experts.{experts}.up_proj`). Each fact is written once: what is
silenced in an added block, the scale of a tied decoder, eta and eps are derived (planning/typecheck.py and depth.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lemonx.specs.rows import Row
from lemonx.specs.signature import Side
from lemonx.specs.spaces import Space

# The place of a block's index in the name of a row that belongs to the last block alone.
LAST = "-1"


@dataclass(frozen=True)
class Stack:
    """Blocks that repeat, adding to one stream.

    `period`: original blocks keep their index modulo this (shifted windows alternate). `pinned`: how many blocks at the
    beginning differ from the rest and are never copied. `lists`: config fields with one entry per block; `implied`:
    transformers derives the lists that config.json leaves out from a block's index. `counts`: config fields that say
    how many blocks at the beginning are of one kind. `sets`: the number of sets of weights, each of which a run of
    blocks shares (0: one per block); `sets_in`: the config field with that number. `numbered`: config fields that point
    at blocks by number, counted from 1: `[3, 6]`, or `["stage3", "stage6"]`. `still`: why no block can be added, if
    none can. `order`: the blocks of a target of as many, by the block that each comes from and whether it is added.
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
    order: tuple[tuple[int, bool], ...] = ()

    @property
    def stored(self) -> int:
        """How many sets of weights there are on disk."""
        return self.sets or self.size

    def set_of(self, block: int) -> int:
        """The set of weights that a block uses, as transformers computes it."""
        return int(block / (self.size / self.stored))


@dataclass(frozen=True)
class Block:
    """A block of the target: the block of the source (its set of weights) that it comes from.

    `added`: it is a further copy of that block. `closes`: it is the last of that block's copies.
    """

    source: int
    added: bool
    closes: bool


# Where a module outside all stacks stands.
OUTSIDE = Block(0, added=False, closes=True)


@dataclass(frozen=True)
class Spec:
    """What a checkpoint with a given config is made of; its rows are in the order in which the model computes them.

    `eps` is the config field with the eps of norms whose row names no other. `prefix` may be absent from every name in
    a file (a base model's). `acts`: spaces under a nonlinearity although a norm reads them; a space that no norm
    touches is taken to be under one. `config`: what config.json must say besides the sizes. `follows`: config fields
    that stay equal to another one. `still`: why a fixed size cannot grow. `pointers`: fields of generation_config.json
    that list [block, unit], with the stack and the space that they point into. `shown`: spaces that the model returns,
    and that therefore cannot be scaled. `mixed`: spaces in which what a LayerNorm writes is added to what it reads, or
    to what another one writes, so that no frame can carry them.
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
    mixed: tuple[str, ...] = ()

    @cached_property
    def order(self) -> Mapping[str, int]:
        """Each row's place in the order of computation."""
        return {name: place for place, name in enumerate(self.rows)}

    def in_order(self, rows: Collection[str]) -> list[str]:
        """These rows in the order of computation."""
        return sorted(rows, key=self.order.__getitem__)

    def comes_before(self, row: str, other: str) -> bool:
        """Whether the model computes a row before another."""
        return self.order[row] < self.order[other]

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
        norms = [name for name in self.order if name.startswith(own) and self.rows[name].is_norm]
        return self.rows[norms[-1]].writes.axes[0] if norms else stream

    def slices(self, side: Side) -> int:
        """How many slices of each of its parts lie in a side: one, unless they alternate."""
        return math.prod(self.axis_size(name) or 1 for name in side.by)

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
