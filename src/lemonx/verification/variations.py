"""Inputs beside the examples that were given: longer, shorter, in other numbers, with other values.

A run shows one number, and one branch, where code decides by a width and by the input. Only other inputs tell the two
apart. Code that compares a length n with a width, `n > width` or `8 * n > width`, goes another way in a larger model
for lengths from n to r n, if r is how many times wider that is. So lengths are tried at steps of no more than r.

Runs on chosen inputs are bounded. The length of an input says little about its run: attention over the pixels of a
picture takes the fourth power of the picture's side. So the entries of the tensors that a run makes are bounded. The
size of each tensor is found on the meta device before the tensor is made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lemonx.tracing.modes import Mode
from lemonx.tracing.storing import floating
from lemonx.verification.modules import Example, ModuleRun, outputs, wide_outputs

# Of how many examples variations are tried, and how many sizes of tables as bounds for whole numbers.
EXAMPLES, TABLES = 3, 3
# Lengths are tried up to so many times that of the example, or up to the largest size if that is not above ENOUGH.
TIMES, ENOUGH = 5, 256
# Steps between lengths: no smaller than this factor, so that a slight growth does not take forever.
LEAST_STEP = 1.25
# A size for each of some axes.
Sizes = Mapping[int, int]


def variations(
    small: torch.nn.Module, large: torch.nn.Module, inputs: Sequence[Example], run: ModuleRun = outputs
) -> Iterator[tuple[Example, list[Any]]]:
    """Changed examples that the smaller of two modules in float64 runs on, with finite outputs, and these."""
    # Whole numbers are looked up in tables, of which the largest that fits has the most to tell.
    tables = sorted({len(tensor) for tensor in small.parameters() if tensor.dim() > 1}, reverse=True)[:TABLES]
    grown = list(_grown(small, large))
    for example in inputs[:EXAMPLES]:
        kept = _buffers(small)
        with Bounded(math.inf, math.inf) as given:
            wide_outputs(small, [example], run)
        _put_back(small, kept)
        # The caller's own example is never too much.
        bounds = max(LARGEST, given.largest), max(WORK, given.work)
        for one in _renumbered(example):
            if (made := _finite(small, one, run, bounds)) is not None:
                yield one, made
        usual = _usual(example)
        for changes in _changes(usual, grown):
            for number, sizes in enumerate(changes):
                tried = (_changed(example, usual, sizes, bound) for bound in (*tables, None))
                results = ((one, _finite(small, one, run, bounds)) for one in tried)
                try:
                    found = next(((one, made) for one, made in results if made is not None), None)
                except TooMuch:
                    continue
                if found is not None:
                    yield found
                elif number == 0:  # an axis that is no length
                    break


def _renumbered(example: Example) -> Iterator[Example]:
    """The example with other numbers where it has any beside its tensors, whole ones or not."""
    tree = example.args, dict(example.kwargs)
    for kind, changed in ((float, lambda number: 1.5 * number + 0.25), (int, lambda number: number + 1)):
        if any(type(leaf) is kind for leaf in tree_leaves(tree)):
            yield Example(*tree_map(lambda leaf, k=kind, c=changed: c(leaf) if type(leaf) is k else leaf, tree))


def _grown(small: torch.nn.Module, large: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """The sizes of axes that grow, before and after."""
    theirs = floating(large)
    for name, tensor in floating(small).items():
        yield from ((a, b) for a, b in zip(tensor.shape, getattr(theirs.get(name), "shape", ()), strict=False) if a < b)


def _usual(example: Example) -> dict[int, int]:
    """The size that most tensors have, by axis."""
    leaves = [leaf for leaf in tree_leaves((example.args, dict(example.kwargs))) if isinstance(leaf, torch.Tensor)]
    dims = max((leaf.dim() for leaf in leaves), default=0)
    return {
        axis: Counter(leaf.shape[axis] for leaf in leaves if leaf.dim() > axis).most_common(1)[0][0]
        for axis in range(dims)
    }


def _changes(usual: Sizes, grown: Sequence[tuple[int, int]]) -> Iterator[Sequence[Sizes]]:
    """Other sizes of axes, in lists of which all but the first are tried only if that can be run."""
    one, two = usual.get(0, 0), usual.get(1, 0)
    single = [{1: TIMES * two}, {0: 3 * one, 1: 3 * two - 1}, {0: one - 1, 1: two - 1}, {0: 3 * one - 1}]
    yield from ([sizes] for sizes in single if all(axis in usual and size > 0 for axis, size in sizes.items()))
    for axes in ((1,), (2, 3), (0,)):  # tokens, pixels, and what comes one by one
        if all(axis in usual for axis in axes):
            lengths = _lengths(max(usual[axis] for axis in axes), grown)
            yield [dict.fromkeys(axes, length) for length in lengths if any(usual[axis] != length for axis in axes)]


def _lengths(usual: int, grown: Sequence[tuple[int, int]]) -> list[int]:
    """Sequence lengths from the longest down to 1, each at most as many times the next as sizes grow."""
    most = max(TIMES * usual, min(ENOUGH, max((after for _, after in grown), default=0)))
    step = max(LEAST_STEP, min((after / before for before, after in grown), default=2.0))
    lengths = [1]
    while lengths[-1] < most:
        lengths.append(max(lengths[-1] + 1, int(lengths[-1] * step)))
    return lengths[::-1]


def _changed(example: Example, usual: Sizes, sizes: Sizes, bound: int | None) -> Example:
    """An example with other sizes, and numbers drawn anew."""
    rng = torch.Generator().manual_seed(0)

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for axis, size in sizes.items():
            if leaf.dim() > axis and leaf.shape[axis] == usual[axis]:
                leaf = leaf.index_select(axis, torch.arange(size, device=leaf.device) * usual[axis] // size)
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


def _finite(module: torch.nn.Module, example: Example, run: ModuleRun, bounds: tuple[float, float]) -> list[Any] | None:
    """Return the outputs of a module in float64, or None if it does not run or they are not finite."""
    kept = _buffers(module)
    try:
        with Bounded(*bounds):
            leaves = wide_outputs(module, [example], run)
    except Exception as error:  # whatever a module raises for an input that it does not take
        _put_back(module, kept)
        if isinstance(error, TooMuch):
            raise
        return None
    if all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return leaves
    _put_back(module, kept)
    return None


def _buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the buffers, which a run may change: both modules must have run equally often."""
    return [buffer.clone() for buffer in module.buffers()]


def _put_back(module: torch.nn.Module, kept: list[torch.Tensor]) -> None:
    for buffer, before in zip(module.buffers(), kept, strict=True):
        buffer.copy_(before)


# ----------------------------------------------------------------- bounds of a run

# Entries of one tensor, 32 MB in float64, and of all tensors that a run makes, one after the other.
LARGEST, WORK = 2**22, 2**25
# Operations on less make no tensor of more than LARGEST entries: an outer product has the square of its inputs. Whole
# numbers among the arguments may be sizes.
_SMALL = 2**11


class TooMuch(Exception):
    """A run that would make more than was allowed."""


class Bounded(Mode):
    """A context whose operations make at most `largest` entries each and `work` in all; TooMuch if they would.

    >>> with Bounded(largest=100, work=1000):
    ...     torch.ones(20, 20)
    Traceback (most recent call last):
    ...
    lemonx.verification.variations.TooMuch: aten::ones would make a tensor of 400 entries
    """

    def __init__(self, largest: float = LARGEST, work: float = WORK) -> None:
        super().__init__()
        self.most, self.left = largest, work
        # What was made: the entries of the largest tensor, and of all.
        self.largest, self.work = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation whose result is small enough."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        sizes = math.prod(max(1, abs(leaf)) for leaf in leaves if type(leaf) is int)
        small = 0 < given <= _SMALL and given * sizes <= LARGEST
        if not small:
            self._see(func, _on_meta(func, args, kwargs))
        made = func(*args, **kwargs)
        if small:
            self._see(func, made)
        return made

    def _see(self, func: Any, made: Any) -> None:
        size = max((leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)), default=0)
        self.largest, self.work = max(self.largest, size), self.work + size
        if size > self.most:
            raise TooMuch(f"{func._schema.name} would make a tensor of {size} entries")
        if self.work > self.left:
            raise TooMuch(f"the run would make more than {self.left} entries")


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The sizes that an operation would make; nothing where only numbers tell them."""

    def empty(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    if kwargs.get("device") is not None or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args)):
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        return func(*tree_map(empty, args), **tree_map(empty, kwargs))
    except Exception:  # an operation that looks at numbers, or that the meta device does not know
        return None
