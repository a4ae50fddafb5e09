"""Lossless expansion for matrix multiplication: W* E_in = E_out W.

Rows are produced: E_out gathers them. Columns are consumed: the columns of a unit's copies sum to the unit's
column, and columns that read zeros are free. Both can be done at once (the paper's claim on rows and columns), so a
weight is expanded one block of rows at a time, and is never in memory as a whole.

    name in the paper   rule                                  lossless for
    row-avg             remainder rows hold the mean row      (id, avg)
    row-zero            remainder rows are zero               (id, zero)
    row-circ            remainder rows are the first again    (id, circ)
    col-rand            copies sum to W, remainder is free    (zero, id)
    col-circ            copies sum to W                       (circ, id)

Paper: appendix B.4, lossless expansion for operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.free_parameters import Free
from lemonx.algebra.recipes import KEEP, MUTED, SILENT, Matrix, Spare
from lemonx.algebra.runs import Run, Split

# Elements that are scaled at a time, in float64: 0.5 MB.
SCALED = 1 << 16


def _no_noise(copy: int, start: int, stop: int) -> torch.Tensor:
    raise ValueError("these rows come without the noise of copies")


def _no_size() -> torch.Tensor:
    raise ValueError("these rows come without the mean of their sizes")


def _no_spread() -> float:
    raise ValueError("these rows come without the spread of their weight")


@dataclass(frozen=True)
class Reader:
    """Access to the rows of the source weight: a slice, their mean, and the noise of a given copy of a slice.

    The mean is weighted if a scale per row follows. `mean_size`: the mean of the absolute values of its terms.
    `spread`: the size of the weight's usual entries, or of those in a sample of its rows (noise.py).
    """

    rows: Callable[[int, int], torch.Tensor]
    mean: Callable[[], torch.Tensor]
    apart: Callable[[int, int, int], torch.Tensor] = _no_noise
    mean_size: Callable[[], torch.Tensor] = _no_size
    spread: Callable[[], float] = _no_spread

    def phi(self, free: Free) -> float:
        """The standard deviation of the noise that tells copies apart."""
        return free.phi * self.spread() if free.relative and free.phi else free.phi


def blocks(rows: Expansion, limit: int, wanted: range | None = None) -> Iterator[tuple[int, Run]]:
    """The target's rows in order, as blocks of at most `limit` that come from consecutive source rows, numbered.

    `wanted`: only the blocks that hold any of these rows; the others are counted, but not returned.
    """
    wanted, number = range(rows.target_size) if wanted is None else wanted, 0
    for run in rows.runs:
        low, high = max(wanted.start - run.target, 0), min(wanted.stop - run.target, run.length)
        for block in range(low // limit, -(-high // limit)) if low < high else ():
            start = block * limit
            source = run.source + start if run.is_copy else run.source
            yield number + block, Run(run.target + start, source, min(limit, run.length - start), run.copy)
        number += -(-run.length // limit)


def expand_block(
    run: Run, how: Matrix, read: Reader, free: Free, rng: np.random.Generator, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The target rows `run.target..` of an expanded weight: in `out`, or as `read` returned them if nothing changes.

    Without `out` they are in new memory. The source's rows are never written to.
    """

    if out is None:
        out = read.rows(0, 0).new_empty(run.length, how.columns.target_size)
    if how.mode == SILENT:
        return _with_spare_columns(run, how, out.zero_())
    if how.mode == MUTED and run.is_zero:
        return out.zero_()
    if how.as_if is not None:
        made = expand_block(run, replace(how, columns=how.as_if, mode=KEEP, as_if=None), read, free, rng, out)
        made = made if made is out else out.copy_(made)
        made[:, torch.from_numpy(how.columns.is_free)] = 0
        return made
    if run.is_spare and how.spare:
        return _spare_rows(run, how, how.spare, out)
    base = _produced_rows(run, how, read, free, rng)
    if how.columns.is_identity and (how.mode in (KEEP, MUTED) or not how.consumes):
        return base
    if not how.consumes:
        return _produce_columns(base, how.columns, free, rng, out)
    if how.columns.frame:
        assert how.columns.frame.back
        return out.copy_(how.columns.frame.back.along_columns(base))
    return _with_spare_columns(run, how, _consume_columns(run, base, how, read, free, rng, out))


def _with_spare_columns(run: Run, how: Matrix, out: torch.Tensor) -> torch.Tensor:
    """The same rows; their last columns add what the spare units pass through."""
    if how.spare and how.columns.is_spare.any():
        values = torch.from_numpy(how.spare.values(run.target, run.target + run.length)).to(out.dtype)
        out[:, -2 * how.spare.size : -how.spare.size] = values
        out[:, -how.spare.size :] = -values
    return out


def _spare_rows(run: Run, how: Matrix, spare: Spare, out: torch.Tensor) -> torch.Tensor:
    """The rows of the spare units, the last rows of a weight: they read what they pass through, with both signs."""
    begin = run.target - (how.rows.target_size - 2 * spare.size)
    for sign, low in ((1.0, 0), (-1.0, spare.size)):
        start, stop = max(begin, low), min(begin + run.length, low + spare.size)
        if start < stop:
            values = torch.from_numpy(sign * spare.values(start - low, stop - low))
            out[start - begin : stop - begin] = values.to(out.dtype)
    return out


def _produced_rows(run: Run, how: Matrix, read: Reader, free: Free, rng: np.random.Generator) -> torch.Tensor:
    from lemonx.execution import noise

    if run.is_copy:
        base = read.rows(run.source, run.source + run.length)
        if how.copied and free.phi:
            base = _told_apart(base, run, how, read, free, rng)
        elif 0 < how.jitter <= run.copy:
            base = noise.normal(base.new_empty(base.shape), read.phi(free), rng).add_(base)
    elif run.is_dense:
        assert how.rows.frame
        made = how.rows.frame.forth.along_rows(read.rows, read.mean, run.target, run.target + run.length)
        base = made.to(read.rows(0, 0).dtype)
    elif run.is_mean or run.is_weighed_mean:
        base = read.mean().expand(run.length, -1)
    elif run.is_free:
        base = noise.normal(read.rows(0, 0).new_empty(run.length, how.columns.size), free.zeta, rng)
    else:
        base = read.rows(0, 0).new_zeros(1, 1).expand(run.length, how.columns.size)
    if how.rows.is_plain:
        return base
    amp = how.rows.amp[run.target : run.target + run.length] * how.rows.gain
    return _scaled(base, amp[:, None], base.new_empty(base.shape))


def _told_apart(
    base: torch.Tensor, run: Run, how: Matrix, read: Reader, free: Free, rng: np.random.Generator
) -> torch.Tensor:
    """Rows of one of several copies that are used together: W + Phi_c, or in the first copy W minus all these Phi."""
    from lemonx.execution import exact_split, noise

    assert how.copied
    number, copies, unused = how.copied.at(run, how.rows.target_size)
    if unused:
        return noise.normal(base.new_empty(base.shape), read.phi(free), rng).add_(base)
    if copies == 1:
        return base
    base = base.clone()  # what was read is valid until the next is
    which = [number] if number else range(1, copies)
    for other in which:
        phi = read.apart(other, run.source, run.source + run.length)
        phi = exact_split.within(phi, read.rows(run.source, run.source + run.length), copies)
        base = base.add_(phi) if number else base.sub_(phi)
    return base


def _produce_columns(
    base: torch.Tensor, columns: Expansion, free: Free, rng: np.random.Generator, out: torch.Tensor
) -> torch.Tensor:
    from lemonx.execution import noise

    if columns.frame:
        return out.copy_(columns.frame.forth.along_columns(base))
    for run in columns.runs:
        here = out[:, run.target : run.target + run.length]
        if run.is_copy:
            here.copy_(base[:, run.units])
        elif run.is_mean:
            here.copy_(base.double().mean(1, keepdim=True))
        elif run.is_free:
            noise.normal(here, free.zeta, rng)
        else:
            here.zero_()
    return out if columns.is_plain else _scaled(out, (columns.amp * columns.gain)[None, :], out)


def _consume_columns(
    rows: Run, base: torch.Tensor, how: Matrix, read: Reader, free: Free, rng: np.random.Generator, out: torch.Tensor
) -> torch.Tensor:
    from lemonx.execution import exact_split, noise

    # Views of numpy's: a torch call gives up the interpreter's lock, and waits for it where threads work side by side.
    columns, bits, source = how.columns, noise.as_numpy(out), noise.as_numpy(base)
    for run in columns.runs:
        here = bits[:, run.target : run.target + run.length]
        if run.is_zero:
            noise.draw_into(here, out.dtype, free.zeta, rng)
        elif run.copy == 0 and not (run.is_copy and how.mode in (KEEP, MUTED)):
            here[...] = 0
    if how.mode in (KEEP, MUTED):
        kept = _kept(columns, how.kept_copy(rows))
        for target, units in kept.places:
            bits[:, target : target + units.stop - units.start] = source[:, units]
        first, others = 0, kept.others
    else:
        # Second copies take Phi and first copies -Phi; third and later ones share the second's.
        for pair in columns.further_copies():
            if columns.copy_number[pair.target] == 1:
                second = out[:, pair.target : pair.target + pair.length]
                noise.normal(second, free.cancel, rng)
                out[:, pair.base : pair.base + pair.length] = -second
        first, others = 1, _third_copies(columns)
    gives = not (free.is_inside and how.mode in (KEEP, MUTED) and rows.is_copy and rows.copy == 0)
    for count, runs in others:
        share, phi = (free.share(count - first), read.phi(free)) if gives else (0.0, 0.0)
        exact_split.split_columns(out, runs, share, phi, rng)
    return out if columns.is_plain else _scaled(out, 1.0 / (columns.amp * columns.gain)[None, :], out)


# Copies as (target, base, length), by the total number of copies.
_Runs = list[tuple[int, list[tuple[int, int, int]]]]


@dataclass(frozen=True)
class _Kept:
    """Where the copies that keep the rest stand, and of which units they are; and all other copies."""

    places: tuple[tuple[int, slice], ...]
    others: _Runs


# The blocks of a tensor ask one after the other. Few results are kept, since each holds arrays as long as the width.
@lru_cache(maxsize=16)
def _kept(columns: Expansion, number: int) -> _Kept:
    return _Kept(columns.numbered(number), _by_count(columns.other_copies(number)))


@lru_cache(maxsize=16)
def _third_copies(columns: Expansion) -> _Runs:
    """Third copies and later ones, whose base is the second."""
    return _by_count(columns.further_copies(base=1))


def _by_count(pairs: tuple[Split, ...]) -> _Runs:
    return [
        (count, [(pair.target, pair.base, pair.length) for pair in pairs if pair.copies == count])
        for count in sorted({pair.copies for pair in pairs})
    ]


def _scaled(block: torch.Tensor, factor: np.ndarray, out: torch.Tensor) -> torch.Tensor:
    """block * factor into `out`, which may be the block itself, rounded once to its precision."""
    scale = torch.from_numpy(np.ascontiguousarray(factor)).expand(block.shape)
    step = max(1, SCALED // max(1, block.shape[1]))
    for here, there, by in zip(block.split(step), out.split(step), scale.split(step), strict=True):
        there.copy_(here.double() * by)
    return out


def expand_matrix(weight: torch.Tensor, how: Matrix, free: Free, seed: int = 0, name: str = "weight") -> torch.Tensor:
    """A whole weight in memory, expanded: what the streaming expansion writes to disk.

    >>> import torch
    >>> from lemonx.algebra.free_parameters import PRESETS
    >>> from lemonx.algebra.expansions import expansion, identity
    >>> W = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    >>> how = Matrix(expansion("avg", 2, 3), identity(2), consumes=True)
    >>> expand_matrix(W, how, PRESETS["vision"]).tolist()
    [[1.0, 2.0], [3.0, 4.0], [2.0, 3.0]]
    """
    from lemonx.execution import noise

    read = Reader(
        lambda start, stop: weight[start:stop],
        lambda: weight.double().mean(0).to(weight.dtype),
        spread=lambda: noise.spread([weight]),
    )
    parts = [
        expand_block(run, how, read, free, noise.generator(seed, name, part))
        for part, run in blocks(how.rows, weight.shape[0])
    ]
    return torch.cat(parts)
