"""The table of a class of models, from a run of a small instance and one of a large instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lemonx.errors import Refused
from lemonx.tracing.blocks import Alike, find_stacks, origin_of
from lemonx.tracing.compare import Matched, differing, match
from lemonx.tracing.constants import place_constants
from lemonx.tracing.of_inputs import decided_by_width, moved_by_inputs, run_both
from lemonx.tracing.running import Run, run_traced
from lemonx.tracing.table import Table, table
from lemonx.tracing.tracer import Tracer

Calls = frozenset[tuple[str, int]]


def infer(
    small: torch.nn.Module, large: torch.nn.Module, run: Run, *, every: bool = False, others: Iterable[Run] = ()
) -> Table:
    """The table of both; Refused where they do not compute alike.

    `run` calls a module with all example inputs. Numbers that the sizes decide are found by comparing the two runs;
    a second pair of runs then takes what they are multiplied with for a space of its own. `every`: lists of blocks are
    stacks also where they are as long in both. `others`: runs on one example, and then on inputs unlike it, which show
    whether such a number is the inputs' too; they are made if there are any.
    """
    found = traced(small, large, run, every=every)
    scaled = differing(found)
    if decided_by_width(found):
        _require_the_widths(small, large, found, others)
    if scaled:
        found = traced(small, large, run, scaled, _in_large(found, scaled), every=every)
    place_constants(found)
    return table_of(found) if scaled else table(found)


def _require_the_widths(small: torch.nn.Module, large: torch.nn.Module, found: Matched, others: Iterable[Run]) -> None:
    """Raise Refused if a number that the width decides is another one on other inputs."""
    base = None
    for other in others:
        try:
            runs = run_both(small, large, other, found.stacks)
        except Exception:  # whatever the larger module raises where the smaller one does not: the rehearsal tells
            continue
        if base is None:
            base = runs
        elif (where := moved_by_inputs(base, runs)) is not None:
            raise Refused(where, "only the width may decide it")


def table_of(found: Matched) -> Table:
    """The table of two runs; Refused where a number that the sizes decide has no place in it."""
    if left := sorted(differing(found)):
        path, place = left[0]
        raise Refused(
            f"{path or 'the model'}, operation {place}: a weight, or what has no axis that could take it up, is "
            "multiplied by another number in the larger model",
            "the sizes must not change it",
        )
    return table(found)


def traced(
    small: torch.nn.Module,
    large: torch.nn.Module,
    run: Run,
    scaled: Calls = frozenset(),
    in_large: Calls = frozenset(),
    stacks: Callable[[Tracer, Tracer], dict[str, Alike]] | None = None,
    *,
    every: bool = False,
) -> Matched:
    """The runs of both, of which the second decides as the first does; `stacks`: the stacks, if not by their runs."""
    first, second = run_traced(Tracer(small, scaled), small, run), Tracer(large, in_large)
    known = stacks(first, second) if stacks else find_stacks(first, second, run=False, every=every)
    found = Matched(first, second, known)
    second.follows = lambda path: first.decisions.get(found.origin(path) or "", [])
    run_traced(second, large, run)
    if stacks:
        return match(found)
    told = find_stacks(first, second, every=every)  # blocks that have the same parameters may compute otherwise
    if told != found.stacks and first.decisions:
        second = Tracer(large, in_large)
        second.follows = lambda path: first.decisions.get(origin_of(path, told) or "", [])
        run_traced(second, large, run)
    return match(Matched(first, second, told))


def _in_large(found: Matched, scaled: Calls) -> Calls:
    """The same calls in the larger model, whose blocks may be more."""
    places: dict[str, set[int]] = {}
    for path, place in scaled:
        places.setdefault(path, set()).add(place)
    return frozenset(
        (path, place) for path in found.large.calls for place in places.get(found.origin(path) or "", set())
    )
