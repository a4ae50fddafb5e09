"""A family for a model type that has no table: its table is inferred, and confirmed at the sizes that are asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import LemonxError, Refused
from lemonx.inference.disk import on_disk
from lemonx.inference.eps import with_eps_fields
from lemonx.inference.fields import DEPTH, shallower
from lemonx.inference.running import Runner, Values, as_read
from lemonx.inference.sampling import Samples, run_both, sampled
from lemonx.inference.template import Template, eps_fields, template
from lemonx.models import door
from lemonx.specs.config import field_at, with_fields
from lemonx.specs.family import Architecture
from lemonx.specs.spaces import Space
from lemonx.specs.spec import Spec
from lemonx.tracing.infer import table_of
from lemonx.tracing.table import Table

INFERRED = "inferred"
# What is left as it is, in turn, where all sizes cannot grow together: the depth, or the width and the heads.
_BUT = ((), (DEPTH,), ("width", "heads", "kv_heads"))
_TABLE = "write a table for it (docs/add-an-architecture.md)"


@dataclass(frozen=True)
class Inferred:
    """An inferred table, and what it was inferred by."""

    template: Template
    samples: Samples
    runner: Runner

    @property
    def family(self) -> Architecture:
        made = self.template
        return Architecture(
            model_types=(made.model_type,),
            build=made.build,
            sizes=made.sizes,
            kind=made.kind,
            defaults=made.defaults,
            aliases=made.aliases,
            table=INFERRED,
            confirm=self.confirm,
        )

    def confirm(self, source: Values, target: Values) -> None:
        """Refused unless runs at these sizes show the very table that the expressions give."""
        small, large = as_read(source), as_read(target)
        # A norm whose input shrinks gets another eps, which is right: here both are to compute alike.
        eps = {name: field_at(small, name) for name in eps_fields(self.template.rows)}
        large = with_fields(large, eps)
        found = table_of(
            run_both(self.runner, self.runner.model(small), large, self.samples.stacks, self.samples.scaled)
        )
        if found.small.rows != self.samples.table.small.rows:
            raise Refused("at these sizes the model computes in another way than its table says", _TABLE)
        for values, spec in ((source, found.small), (target, found.large)):
            self._compare(self.template.build(self.family.config(values)), spec)

    def _compare(self, wanted: Spec, found: Spec) -> None:
        if wanted.spaces.keys() != found.spaces.keys() or wanted.fixed != found.fixed:
            raise Refused("at these sizes the model has other spaces than its table says", _TABLE)
        for name, space in wanted.spaces.items():
            if not _same(space, found.spaces[name]):
                other = found.spaces[name]
                raise Refused(
                    f"the table makes {name} {space.size} ({space.kind}), and a run at these sizes shows "
                    f"{other.size} ({other.kind})",
                    "choose other sizes",
                )
        sizes = [stack.size for stack in wanted.stacks.values()]
        if sizes != [stack.size for stack in found.stacks.values()]:
            raise Refused(f"the table makes the stacks {sizes} blocks deep, and a run shows otherwise", _TABLE)


def _same(one: Space, other: Space) -> bool:
    alike = math.isclose(one.scale, other.scale, rel_tol=1e-9)
    return alike and replace(one, scale=1.0) == replace(other, scale=1.0)


def infer(values: Mapping[str, JsonValue], tensors: int) -> Inferred:
    """The table of the class that a config.json names; Refused if it cannot be told. `tensors`: how many a file has."""
    return _remembered(json.dumps(dict(values), sort_keys=True), tensors)


@lru_cache(maxsize=4)
def _remembered(text: str, tensors: int) -> Inferred:
    """The same; a plan, an expansion and its verification ask for one table."""
    values: dict[str, JsonValue] = json.loads(text)
    read = as_read(values)
    runner = Runner.of(read, 4 * tensors + 1000)
    few = shallower(read)
    shallow = [few] if few != read else []
    attempts = [(base, but) for but in _BUT for base in ([read] if DEPTH in but else [*shallow, read])]
    first: LemonxError | None = None
    for base, but in attempts:
        try:
            found = _inferred(runner, values, read, base, but)
            if base is not read:
                found.confirm(values, values)
            return found
        except Refused as error:
            first = first or error
    assert first is not None
    raise first


def _inferred(runner: Runner, values: Values, read: Values, base: Values, but: tuple[str, ...]) -> Inferred:
    samples = sampled(runner, base, but)
    rows = with_eps_fields(runner, base, samples.table.small.rows, samples.stacks)
    disk = on_disk(_with_rows(samples.table, rows), samples.model, samples.stacks)
    return Inferred(template(samples, values, read, disk, runner.kind, _aliases(values)), samples, runner)


def _with_rows(table: Table, rows: Mapping[str, Any]) -> Table:
    return replace(table, small=replace(table.small, rows=rows))


def _aliases(values: Values) -> dict[str, str]:
    """Second names of config fields."""
    return dict(type(door.config_object(values)).attribute_map)
