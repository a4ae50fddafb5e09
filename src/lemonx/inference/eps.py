"""Which config field the eps of every norm is from: each field gets another number, and norms show which they have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lemonx.inference.running import Runner, Values
from lemonx.specs.config import flat_fields, with_fields
from lemonx.specs.norms import Norm
from lemonx.specs.rows import Row
from lemonx.tracing.blocks import starred


def with_eps_fields(
    runner: Runner, values: Values, rows: Mapping[str, Row], stacks: Mapping[str, int]
) -> dict[str, Row]:
    """The rows with the names of config fields in place of numbers, where an eps follows one."""
    flat = flat_fields(values)
    names = [name for name, value in flat.items() if "eps" in name.rpartition(".")[2] and isinstance(value, float)]
    if not names:
        return dict(rows)
    marks = {name: flat[name] * (2 + place / 64) for place, name in enumerate(names)}  # type: ignore[operator]
    record = runner.trace(runner.model(with_fields(values, marks)))
    found: dict[str, set[str]] = {}
    for number, norm in enumerate(record.norms):
        name = norm.gain.removesuffix(".weight") if norm.gain else f"{norm.path}.norm{number}"
        field = next((name for name, mark in marks.items() if math.isclose(mark, norm.eps, rel_tol=1e-6)), "")
        found.setdefault(starred(name, stacks)[0], set()).add(field)
    return {
        name: replace(row, eps=next(iter(fields)))
        if isinstance(row, Norm) and len(fields := found.get(name, set()) - {""}) == 1
        else row
        for name, row in rows.items()
    }
