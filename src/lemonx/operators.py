"""Lossless expansion for matrix multiplication: W* E_in = E_out W.

Rows are produced: gathered by E_out. Columns are consumed: the columns of a unit's copies sum to the unit's
column, and what reads zeros is free. Both may be done at once (the paper's claim on rows and columns), so a
weight is expanded block of rows by block of rows, and the whole never has to be in memory.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lemonx.free import Free
from lemonx.vectors import AVG, RAND, ZERO, Expansion, Run

if TYPE_CHECKING:
    import torch


# What becomes of a weight that writes the stream: kept; zero (type 1); copies that cancel (type 2).
KEEP, SILENT, CANCEL = "keep", "silent", "cancel"


@dataclass(frozen=True)
class Matrix:
    """How a weight with two axes expands: rows are produced, columns are consumed, or else produced too.

    `transposed`: the file keeps it the other way round, as (columns, rows). `jitter`: further copies of a
    unit get noise on their fan-in, because their fan-out is silent and cannot tell them apart.
    """

    rows: Expansion
    columns: Expansion
    consumes: bool
    mode: str = KEEP
    transposed: bool = False
    jitter: bool = False

    @property
    def rule(self) -> str:
        """The operators in the paper's words; an axis that stays is not named."""
        if self.mode == SILENT:
            return "type 1: zero"
        words = ["type 2: cancelling"] if self.mode == CANCEL else []
        if not self.columns.is_identity:
            words.append(column_rule(self.columns) if self.consumes else row_rule(self.columns))
        if not self.rows.is_identity:
            words.append(row_rule(self.rows))
        return " ∘ ".join(words) or "copied"


def row_rule(rows: Expansion) -> str:
    for flag, name in ((AVG, "row-avg"), (ZERO, "row-zero"), (RAND, "row-rand")):
        if rows.has(flag):
            return name
    return "row-circ"


def column_rule(columns: Expansion) -> str:
    return "col-rand" if columns.has(ZERO) else "col-circ"


@dataclass(frozen=True)
class Reader:
    """Access to the rows of the source weight: a slice, and their mean."""

    rows: Callable[[int, int], torch.Tensor]
    mean: Callable[[], torch.Tensor]


def blocks(rows: Expansion, limit: int) -> Iterator[Run]:
    """The target's rows in order, as blocks of at most `limit` that come from consecutive source rows."""
    for run in rows.runs:
        for start in range(0, run.length, limit):
            source = run.source + start if run.source >= 0 else run.source
            yield Run(run.target + start, source, min(limit, run.length - start), run.copy)


def expand_block(run: Run, how: Matrix, read: Reader, free: Free, rng: np.random.Generator) -> torch.Tensor:
    """The target rows `run.target..` of an expanded weight."""
    if how.mode == SILENT:
        return read.rows(0, 0).new_zeros(run.length, how.columns.target_size)
    base = _produced_rows(run, how, read, free, rng)
    if not how.consumes:
        return _produce_columns(base, how.columns, free, rng)
    return _consume_columns(base, how, free, rng)


def _produced_rows(run: Run, how: Matrix, read: Reader, free: Free, rng: np.random.Generator) -> torch.Tensor:
    from lemonx import noise

    if run.source >= 0:
        base = read.rows(run.source, run.source + run.length)
        if how.jitter and run.copy > 0:
            base = base + noise.normal(base.new_empty(base.shape), free.phi, rng)
    elif run.source == AVG:
        base = read.mean().expand(run.length, -1)
    else:
        base = read.rows(0, 0).new_zeros(run.length, how.columns.size)
        if run.source == RAND:
            noise.normal(base, free.zeta, rng)
    amp = how.rows.amp[run.target : run.target + run.length] * how.rows.gain
    return _scaled(base, amp[:, None])


def _produce_columns(base: torch.Tensor, columns: Expansion, free: Free, rng: np.random.Generator) -> torch.Tensor:
    from lemonx import noise

    if columns.is_identity:
        return base
    out = base.new_zeros(len(base), columns.target_size)
    for run in columns.runs:
        here = out[:, run.target : run.target + run.length]
        if run.source >= 0:
            here.copy_(base[:, run.source : run.source + run.length])
        elif run.source == AVG:
            here.copy_(base.double().mean(1, keepdim=True))
        elif run.source == RAND:
            noise.normal(here, free.zeta, rng)
    return _scaled(out, (columns.amp * columns.gain)[None, :])


def _consume_columns(base: torch.Tensor, how: Matrix, free: Free, rng: np.random.Generator) -> torch.Tensor:
    from lemonx import noise, split

    columns = how.columns
    if columns.is_identity and how.mode == KEEP:
        return base
    out = base.new_zeros(len(base), columns.target_size)
    for run in columns.runs:
        here = out[:, run.target : run.target + run.length]
        if run.source == ZERO:
            noise.normal(here, free.zeta, rng)
        elif run.source >= 0 and run.copy == 0 and how.mode == KEEP:
            here.copy_(base[:, run.source : run.source + run.length])
    first = 0
    if how.mode == CANCEL:
        # Second copies take Phi and first copies -Phi; third and later ones share the second's.
        for pair in columns.further_copies():
            if columns.copy_number[pair.target] == 1:
                second = out[:, pair.target : pair.target + pair.length]
                noise.normal(second, free.cancel, rng)
                out[:, pair.base : pair.base + pair.length] = -second
        first = 1
    further = columns.further_copies(base=first)
    for count in sorted({pair.copies for pair in further}):
        runs = [(pair.target, pair.base, pair.length) for pair in further if pair.copies == count]
        split.split_columns(out, runs, free.share(count - first), free.phi, rng)
    return _scaled(out, 1.0 / (columns.amp * columns.gain)[None, :])


def _scaled(block: torch.Tensor, factor: np.ndarray) -> torch.Tensor:
    """block * factor, rounded once to the block's own precision; the block itself where factor is 1."""
    import torch

    if (factor == 1.0).all():
        return block
    return (block.double() * torch.from_numpy(np.ascontiguousarray(factor))).to(block.dtype)


def expand_matrix(weight: torch.Tensor, how: Matrix, free: Free, seed: int = 0, name: str = "weight") -> torch.Tensor:
    """A whole weight in memory, expanded: what the streaming expansion writes to disk.

    >>> import torch
    >>> from lemonx.free import PRESETS
    >>> from lemonx.vectors import expansion, identity
    >>> W = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    >>> how = Matrix(expansion("avg", 2, 3), identity(2), consumes=True)
    >>> expand_matrix(W, how, PRESETS["vision"]).tolist()
    [[1.0, 2.0], [3.0, 4.0], [2.0, 3.0]]
    """
    import torch

    from lemonx import noise

    read = Reader(lambda start, stop: weight[start:stop], lambda: weight.double().mean(0).to(weight.dtype))
    parts = [
        expand_block(run, how, read, free, noise.generator(seed, name, part))
        for part, run in enumerate(blocks(how.rows, weight.shape[0]))
    ]
    return torch.cat(parts)
