"""Reads the source's tensors back out of a target, and marks the entries that hold them."""

from __future__ import annotations

import numpy as np
import torch

from lemonx.algebra.recipes import Matrix
from lemonx.checkpoints import Checkpoint, TensorInfo
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.planning.source_entries import Held
from lemonx.planning.tensor_steps import Step


def read_back(held: Held, target: Checkpoint, wanted: TensorInfo) -> torch.Tensor:
    """A tensor of the source, from the target's; it is in memory as a whole."""
    rows = as_matrix(target.read(held.step.name), held.step)[torch.from_numpy(held.rows)]
    if not rows.is_floating_point():
        found = rows[:, torch.from_numpy(held.columns)]
    elif held.summed:
        found = _summed(rows, held)
    else:
        found = rows[:, torch.from_numpy(held.columns)]
        if (held.row_scale != 1).any() or (held.column_scale != 1).any():
            scale = torch.from_numpy(held.row_scale[:, None] * held.column_scale[None, :])
            found = found.double() / scale
    return as_stored(found, held.step, wanted.shape).to(torch_dtype(wanted.dtype)).contiguous()


def mark(held: Held) -> torch.Tensor:
    """True where the target's tensor holds the source's, in the target's shape."""
    marks = as_matrix(torch.zeros(held.step.shape, dtype=torch.bool), held.step).clone()
    marks[torch.from_numpy(held.rows)[:, None], torch.from_numpy(held.columns)[None, :]] = True
    return as_stored(marks, held.step, held.step.shape).contiguous()


def _summed(rows: torch.Tensor, held: Held) -> torch.Tensor:
    """The sum over the copies of every unit, which is exact in float64; 0 has the sign that the source's had."""
    assert isinstance(held.step.recipe, Matrix)
    columns = held.step.recipe.columns
    copies = np.flatnonzero(columns.is_copy)
    units = torch.from_numpy(columns.source[copies])
    parts = rows[:, torch.from_numpy(copies)].double()
    empty = torch.zeros(len(rows), columns.size, dtype=torch.float64)
    total = empty.index_add(1, units, parts * torch.from_numpy(columns.amp[copies] * columns.gain))
    # A weight of -0 was split into zeros, of which just one has its sign.
    minus = empty.index_add(1, units, (parts.signbit() & (parts == 0)).double()) > 0
    total = torch.where((total == 0) & minus, -0.0, total)
    return total / torch.from_numpy(held.row_scale)[:, None]


def as_matrix(tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """A tensor as rows and columns of its recipe; a vector is one row."""
    how = step.recipe
    if not isinstance(how, Matrix):
        return tensor.reshape(1, -1)
    if how.transposed:
        tensor = tensor.transpose(-1, -2)
    return tensor.reshape(how.rows.target_size, how.columns.target_size)


def as_stored(matrix: torch.Tensor, step: Step, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows and columns as a file keeps them in a tensor of this shape."""
    how = step.recipe
    if isinstance(how, Matrix) and how.transposed:
        *tables, inputs, outputs = shape
        return matrix.reshape(*tables, outputs, inputs).transpose(-1, -2)
    return matrix.reshape(shape)
