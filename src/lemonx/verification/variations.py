"""Inputs beside the examples that were given: longer, shorter, in other numbers, with other values.

A run shows one number where code computes it from a width and from the input. Only other inputs tell the two apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lemonx.verification.modules import Example, Run, outputs, wide_outputs

# Of how many examples variations are tried, and how many sizes of tables as bounds for whole numbers.
EXAMPLES, TABLES = 3, 3
# How an axis changes: (axis, how many times it is repeated, how many entries are then cut off).
Change = tuple[tuple[int, int, int], ...]
CHANGES: tuple[Change, ...] = (((1, 5, 0),), ((0, 3, 0), (1, 3, 1)), ((0, 1, 1), (1, 1, 1)), ((0, 3, 1),))


def variations(
    module: torch.nn.Module, inputs: Sequence[Example], run: Run = outputs
) -> Iterator[tuple[Example, list[Any]]]:
    """Changed examples that a module runs on, with finite outputs, and these: code that takes none shows none."""
    # Whole numbers are looked up in tables, of which the largest that fits has the most to tell.
    tables = sorted({len(tensor) for tensor in module.parameters() if tensor.dim() > 1}, reverse=True)[:TABLES]
    for example in inputs[:EXAMPLES]:
        for change in CHANGES:
            changed = (_changed(example, change, bound) for bound in (*tables, None))
            tried = ((one, _finite(module, one, run)) for one in changed if one is not None)
            if (found := next(((one, made) for one, made in tried if made is not None), None)) is not None:
                yield found


def _changed(example: Example, change: Change, bound: int | None) -> Example | None:
    """An example with other sizes, and numbers drawn anew; None if it has no such axis."""
    rng = torch.Generator().manual_seed(0)
    leaves = [leaf for leaf in tree_leaves((example.args, dict(example.kwargs))) if isinstance(leaf, torch.Tensor)]
    sizes = {axis: Counter(leaf.shape[axis] for leaf in leaves if leaf.dim() > axis) for axis, _, _ in change}
    if not all(sizes.values()):
        return None
    usual = {axis: found.most_common(1)[0][0] for axis, found in sizes.items()}
    if any(usual[axis] * times - cut < 1 for axis, times, cut in change):
        return None

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for axis, times, cut in change:
            if leaf.dim() > axis and leaf.shape[axis] == usual[axis]:
                leaf = leaf.repeat_interleave(times, dim=axis).narrow(axis, 0, usual[axis] * times - cut)
        return _drawn(leaf, bound, rng)

    return Example(*tree_map(changed, (example.args, dict(example.kwargs))))


def _drawn(leaf: torch.Tensor, bound: int | None, rng: torch.Generator) -> torch.Tensor:
    """Other values of the same kind: whole numbers below a bound; masks stay as they are."""
    if leaf.is_floating_point():
        noise = torch.randn(leaf.shape, generator=rng, dtype=torch.float64).to(leaf)
        return leaf + noise * leaf.detach().abs().mean()
    if bound is None or leaf.dtype == torch.bool or not leaf.numel() or int(leaf.max()) < 2:
        return leaf
    return torch.randint(bound, leaf.shape, generator=rng).to(leaf)


def _finite(module: torch.nn.Module, example: Example, run: Run) -> list[Any] | None:
    """The outputs of a copy of a module in float64; None if it does not run, or they are not finite."""
    try:
        leaves = wide_outputs(module, [example], run)
    except Exception:  # whatever a module raises for an input that it does not take
        return None
    finite = all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return leaves if finite else None
