"""Prints the methods as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lemonx import methods
from lemonx.checkpoints.plain import JsonValue
from lemonx.cli.render.console import Out, styled, table
from lemonx.methods import Method


@dataclass(frozen=True)
class MethodEntry:
    """A method, and what was measured of it, by column."""

    method: Method
    measured: Mapping[str, str]

    def as_dict(self) -> dict[str, JsonValue]:
        own = self.method
        return {"method": own.name, "title": own.title, "paper": own.paper, "grows": [*own.grows], **self.measured}


def listed_methods(check: bool) -> list[MethodEntry]:
    """Every method; with `check` what was measured."""
    measured: Mapping[str, Mapping[str, str]] = {}
    if check:
        from lemonx_lab.experiments import method_table

        measured = method_table.overview()
    return [MethodEntry(method, measured.get(name, {})) for name, method in sorted(methods.methods().items())]


def require_for_check() -> None:
    """Check for what the measurement needs, before it starts."""
    from lemonx_lab.training.requirements import require

    require("`lemonx methods --check` trains small models, which")


def print_methods(entries: Sequence[MethodEntry]) -> None:
    out = Out()
    if columns := [*entries[0].measured]:
        found = table("method", *columns)
        for entry in entries:
            found.add_row(entry.method.name, *(entry.measured[column] for column in columns))
        out.table(found)
        out.line("lossless, or the largest difference of an output relative to the largest output; -: not defined")
    for method in (entry.method for entry in entries):
        out.line(styled("bold", method.name), f" ({' and '.join(method.grows)}): {method.title}.")
        out.line(f"  {method.paper}")
