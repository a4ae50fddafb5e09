"""Entries that are compared with what they should be: to the last bit, to so many roundings, or with zero.

Every comparison is written so that NaN fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch


class Fault(NamedTuple):
    """The first entry of a block that breaks its identity: its place in the block, what is there, what should be.

    `copies`: the columns of its other copies, where it is their sum that is wrong.
    """

    row: int
    column: int
    found: float
    wanted: float
    rule: str
    copies: tuple[int, ...] = ()


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """The largest error of one rounding to a dtype near 0, where numbers are evenly spaced."""
    return torch.finfo(dtype).smallest_normal * unit(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal to the last bit; integers compare faster than floats."""
    a, b = as_integers(one), as_integers(other)
    return bool((a == b).all())


def as_integers(tensor: torch.Tensor) -> np.ndarray:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(kind).numpy()


def near_fault(
    found: torch.Tensor,
    wanted: torch.Tensor,
    column: int,
    rule: str,
    *,
    roundings: int = 0,
    slack: Callable[[], torch.Tensor] | None = None,
) -> Fault | None:
    """The first entry that is not what is wanted, to so many roundings and to the slack; without either, not equal."""
    rounded = wanted.to(found.dtype)
    if not wanted.numel() or same_bits(found, rounded) or bool((found == rounded).all()):
        return None
    exact = wanted.double()
    allowed = torch.zeros_like(exact)
    if roundings:
        allowed = (exact.abs() * (unit(found.dtype) * (1 + 2**-8)) + least(found.dtype)) * roundings
    if slack is not None:
        allowed = allowed + slack()
    return first_fault(~((found.double() - exact).abs() <= allowed), found, exact, column, rule)


def zero_fault(found: torch.Tensor, columns: slice, rule: str) -> Fault | None:
    here = found[:, columns]
    bits = as_integers(here)
    if not bits.size or (bits.max() == 0 and bits.min() == 0):
        return None
    return first_fault(~(here == 0), here, torch.zeros_like(here), columns.start or 0, rule)


def first_fault(far: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor, column: int, rule: str) -> Fault | None:
    if not bool(far.any()):
        return None
    row, at = (int(i) for i in far.nonzero()[0])
    return Fault(row, at + column, float(found[row, at]), float(wanted[row, at]), rule)
