"""Tables of one class at several sizes: all sizes grown together, and each one alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lemonx.errors import LemonxError
from lemonx.inference.fields import DEPTH, Field, changed, deeper, size_fields
from lemonx.inference.running import Runner, Values
from lemonx.specs.spec import Spec
from lemonx.tracing.blocks import starred
from lemonx.tracing.compare import Matched, differing
from lemonx.tracing.infer import table_of
from lemonx.tracing.table import Table, table

# Multiplications by numbers that sizes decide: (module, with `*` for a block; number of the operation in it).
Scaled = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Sample:
    """A config, and the table of the class at its sizes."""

    values: Values
    spec: Spec


@dataclass(frozen=True)
class Samples:
    """The table of a class at a base size (`table.small`), and what it is at others.

    `stacks`: the lists of blocks, and how many first blocks of each are unlike the others. `alone`: the fields that
    were changed on their own.
    """

    base: Values
    fields: list[Field]
    table: Table
    stacks: Mapping[str, int]
    scaled: Scaled
    samples: list[Sample]
    alone: frozenset[str]
    model: Any


def sampled(runner: Runner, base: Values, but: tuple[str, ...] = ()) -> Samples:
    """Run a class at a base size and at larger ones; Refused where all sizes together cannot grow.

    `but`: options whose sizes stay.
    """
    fields = [field for field in size_fields(runner, base) if field.option not in but]
    grown = changed(deeper(base, fields), {field: field.times * field.value for field in fields if field.times > 1})
    pairs = _Pairs(runner, base)
    found, large = pairs.first(grown)
    stacks = {name: stack.pinned for name, stack in found.stacks.items()}
    others = pairs.changes(fields, stacks)
    scaled = _patterns(differing(found), stacks).union(*(change.scaled for change in others.values()))
    whole = pairs.table(grown, stacks, scaled) if scaled else table(found)
    samples, alone = [Sample(base, whole.small), Sample(grown, whole.large)], set[str]()
    for moved, change in others.items():
        try:
            other = pairs.table(change.values, stacks, scaled) if scaled else table(change.found)
        except LemonxError:
            continue
        if alike(whole.small, other.small):
            samples.append(Sample(change.values, other.large))
            alone |= {field.name for field in moved if len(moved) == 1}
    return Samples(base, fields, whole, stacks, scaled, samples, frozenset(alone), large)


def alike(one: Spec, other: Spec) -> bool:
    """Whether two tables say the same but for sizes."""
    kinds = [{name: (type(space), space.kind) for name, space in spec.spaces.items()} for spec in (one, other)]
    return one.rows == other.rows and kinds[0] == kinds[1] and one.fixed.keys() == other.fixed.keys()


@dataclass(frozen=True)
class _Change:
    """A config with some other sizes, its run beside that of the base, and what the sizes multiply by in it."""

    values: Values
    found: Matched
    scaled: Scaled


@dataclass
class _Pairs:
    """Runs at the base size beside runs at others."""

    runner: Runner
    base: Values

    @cached_property
    def small(self) -> Any:
        """The model of the base size, which is run beside every other."""
        return self.runner.model(self.base)

    def first(self, values: Values) -> tuple[Matched, Any]:
        """The run at other sizes beside one at the base size; stacks are what is longer."""
        model = self.runner.model(values)
        return self.runner.both(self.small, model), model

    def matched(self, values: Values, stacks: Mapping[str, int], scaled: Scaled = frozenset()) -> Matched:
        return run_both(self.runner, self.small, values, stacks, scaled)

    def changes(self, fields: list[Field], stacks: Mapping[str, int]) -> dict[tuple[Field, ...], _Change]:
        """Runs in which single fields are doubled, or pairs of those that do not change alone."""
        changes = dict[tuple[Field, ...], _Change]()
        free = [field for field in fields if field.option != DEPTH]

        def tried(*moved: Field) -> bool:
            values = changed(self.base, {field: 2 * field.value for field in moved})
            try:
                found = self.matched(values, stacks)
                changes[moved] = _Change(values, found, _patterns(differing(found), stacks))
            except LemonxError:
                return False
            return True

        bound = [field for field in free if not tried(field) and field.option and field.index is None]
        for field in bound:
            near = [other for other in free if other != field and other.option and _part(other) == _part(field)]
            next((other for other in near if tried(field, other)), None)
        return changes

    def table(self, values: Values, stacks: Mapping[str, int], scaled: Scaled) -> Table:
        return table_of(self.matched(values, stacks, scaled))


def _part(field: Field) -> str:
    """The part of a config that a field is in."""
    return field.name.rpartition(".")[0]


def run_both(runner: Runner, one: Any, large: Values, stacks: Mapping[str, int], scaled: Scaled) -> Matched:
    """Runs of a model and of one at other sizes beside each other."""
    other = runner.model(large)
    return runner.both(one, other, (_in_model(scaled, one, stacks), _in_model(scaled, other, stacks)), stacks)


def _patterns(scaled: frozenset[tuple[str, int]], stacks: Mapping[str, int]) -> Scaled:
    return frozenset((starred(path, stacks)[0], place) for path, place in scaled)


def _in_model(scaled: Scaled, model: Any, stacks: Mapping[str, int]) -> frozenset[tuple[str, int]]:
    """The same operations in every block of a model."""
    places: dict[str, set[int]] = {}
    for path, place in scaled:
        places.setdefault(path, set()).add(place)
    return frozenset(
        (path, place) for path, _ in model.named_modules() for place in places.get(starred(path, stacks)[0], set())
    )
