"""Numbers that depend on the inputs: what the width decides must be the width's alone.

A run shows one number where code computes it from a width and from the input, `1 / (width + length)` say. If two sizes
of a model are run on two inputs, the larger one's factor must be the same multiple of the smaller one's in both runs.
"""

from __future__ import annotations

import torch

from lemonx.tracing.blocks import Stacks, close, origin_of
from lemonx.tracing.compare import FACTORS, Matched
from lemonx.tracing.running import Run, run_traced
from lemonx.tracing.tracer import Tracer

# Where a number is, whether it is a factor, and what it is in the smaller model and in the larger.
_Found = tuple[str, bool, tuple[float, ...], tuple[float, ...]]


def run_both(small: torch.nn.Module, large: torch.nn.Module, run: Run, stacks: Stacks) -> Matched:
    """Runs of both, of which the second decides as the first does; nothing is matched."""
    first, second = run_traced(Tracer(small), small, run), Tracer(large)
    second.follows = lambda path: first.decisions.get(origin_of(path, stacks) or "", [])
    return Matched(first, run_traced(second, large, run), dict(stacks))


def decided_by_width(found: Matched) -> bool:
    """Whether some factor is another number in the larger model."""
    return any(factor and not _same(one, two) for _, factor, one, two in _numbers(found).values())


def moved_by_inputs(found: Matched, other: Matched) -> str | None:
    """The first number whose change from one size to the other is not the same on other inputs."""
    mine, theirs = _numbers(found), _numbers(other)
    for key in mine.keys() & theirs.keys():
        (where, factor, a, b), (_, _, c, d) = mine[key], theirs[key]
        if len({len(a), len(b), len(c), len(d)}) == 1 and _depends(a, b, c, d, factor=factor):
            both = (f"{_told(x)} in the smaller model and {_told(y)} in the larger" for x, y in ((a, b), (c, d)))
            return f"{where}: its number is {', and on other inputs '.join(both)}, so it depends on the inputs too"
    return None


def _depends(
    a: tuple[float, ...], b: tuple[float, ...], c: tuple[float, ...], d: tuple[float, ...], *, factor: bool
) -> bool:
    """Whether b is not to a as d is to c; what is no factor must be the same in both sizes."""
    if factor:
        return not all(close(w * z, x * y) for w, x, y, z in zip(a, b, c, d, strict=True))
    return _same(a, b) and not _same(c, d)


def _same(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    return len(one) == len(two) and all(map(close, one, two))


def _told(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:.5g}" for number in numbers)


def _numbers(found: Matched) -> dict[tuple[str, int, tuple[str, ...]], _Found]:
    """Every number that both sizes take, by its module, its place there, and all operations that the module runs."""
    numbers: dict[tuple[str, int, tuple[str, ...]], _Found] = {}
    for path, theirs in found.large.calls.items():
        origin = found.origin(path, added=False)
        ours = [] if origin is None else found.small.calls.get(origin, [])
        run = tuple(call.op for call in ours)
        if origin is not None and run == tuple(call.op for call in theirs):
            for place, (one, two) in enumerate(zip(ours, theirs, strict=True)):
                where = f"{origin or 'the model'}, {one.op}"
                numbers[origin, place, run] = where, one.op in FACTORS, one.numbers, two.numbers
    kept = [pair for pair in found.large.pairs if found.origin(pair.path, added=False) is not None]
    if len(kept) == len(found.small.pairs):
        for place, (one, two) in enumerate(zip(found.small.pairs, kept, strict=True)):
            both = tuple(sorted(one.factors)), tuple(sorted(two.factors))
            numbers[one.path, -1 - place, ()] = one.place, True, *both
    return numbers
