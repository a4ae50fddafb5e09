"""The forms in which optimizers keep a moment of a gradient: whole, as the means of its rows and columns, or in 8 bits.

Each form gives the moment as a tensor of the parameter's shape, which is what grows, and takes the grown one back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lemonx.errors import BadCheckpoint, Refused

# A mean of gradients, of their squares, or of the steps that were made of both.
Moment = Literal["first", "second", "steps"]
FIRST: Moment = "first"
SECOND: Moment = "second"
STEPS: Moment = "steps"
# What an optimizer keeps for one parameter, by the names that it has for it.
State = Mapping[str, Any]
Shape = tuple[int, ...]
# bitsandbytes scales every so many numbers of a flattened tensor by their largest.
BLOCK = 256


@dataclass(frozen=True)
class Form(ABC):
    """One moment of a parameter in an optimizer's state, under one key or several."""

    moment: Moment

    @property
    @abstractmethod
    def keys(self) -> frozenset[str]:
        """All keys that it may stand under."""

    @property
    def needed(self) -> frozenset[str]:
        """The keys that it always stands under."""
        return self.keys

    @abstractmethod
    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shape of each of its tensors that depends on the parameter's."""

    @abstractmethod
    def shape(self, state: State) -> Shape | None:
        """The parameter's shape, as far as its tensors tell."""

    @abstractmethod
    def decoded(self, state: State) -> Tensor:
        """The moment, in the parameter's shape, in main memory."""

    @abstractmethod
    def encoded(self, moment: Tensor, like: State) -> dict[str, Tensor]:
        """A moment in this form, in the dtypes and on the device of the state of another parameter."""


@dataclass(frozen=True)
class Whole(Form):
    """A tensor of the parameter's shape."""

    key: str

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({self.key})

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.key: shape}

    def shape(self, state: State) -> Shape | None:
        return tuple(state[self.key].shape)

    def decoded(self, state: State) -> Tensor:
        return _floats(state, self.key).cpu()

    def encoded(self, moment: Tensor, like: State) -> dict[str, Tensor]:
        return {self.key: moment.to(like[self.key])}


@dataclass(frozen=True)
class Factors(Form):
    """The means of a matrix of squares over its columns and over its rows, which stand for rows x columns / mean.

    `kept`: the axis that a mean was taken over is kept, with size 1. Axes before the last two are left as they are.
    """

    rows: str
    columns: str
    kept: bool

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({self.rows, self.columns})

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        one = (1,) if self.kept else ()
        return {self.rows: (*shape[:-1], *one), self.columns: (*shape[:-2], *one, shape[-1])}

    def shape(self, state: State) -> Shape | None:
        rows, columns = (tuple(state[key].shape) for key in (self.rows, self.columns))
        if not rows or not columns:
            return None
        return (*(rows[:-1] if self.kept else rows), columns[-1])

    def decoded(self, state: State) -> Tensor:
        rows, columns = (_floats(state, key).cpu().double() for key in (self.rows, self.columns))
        if not self.kept:
            rows, columns = rows.unsqueeze(-1), columns.unsqueeze(-2)
        mean = rows.mean(-2, keepdim=True)
        # Where no gradient ever was, the mean is 0, and so are all rows.
        return rows / torch.where(mean == 0, 1.0, mean) * columns

    def encoded(self, moment: Tensor, like: State) -> dict[str, Tensor]:
        rows, columns = moment.mean(-1, keepdim=self.kept), moment.mean(-2, keepdim=self.kept)
        return {self.rows: rows.to(like[self.rows]), self.columns: columns.to(like[self.columns])}


@dataclass(frozen=True)
class Blockwise(Form):
    """As bitsandbytes has it: a byte for each number, which is `codes[byte]` times the scale of its block.

    It keeps small parameters in float32, and then there are neither codes nor scales. `sure`: the key alone tells
    which moment it is.
    """

    key: str
    codes: str
    scales: str
    sure: bool = True

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({self.key, self.codes, self.scales})

    @property
    def needed(self) -> frozenset[str]:
        return frozenset({self.key})

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.key: shape, self.scales: (-(-shape_size(shape) // BLOCK),)}

    def shape(self, state: State) -> Shape | None:
        return tuple(state[self.key].shape)

    def decoded(self, state: State) -> Tensor:
        value = state[self.key]
        if value.dtype == torch.uint8:
            codes, scales = (_floats(state, key).cpu() for key in (self.codes, self.scales))
            count = -(-value.numel() // BLOCK)
            if codes.shape != (256,) or scales.shape != (count,) or not bool((codes.diff() > 0).all()):
                raise BadCheckpoint(
                    f"{self.codes} or {self.scales} is not as bitsandbytes writes it", "save the run again"
                )
            moment = codes[value.cpu().flatten().long()] * scales.repeat_interleave(BLOCK)[: value.numel()]
            moment = moment.view(value.shape)
        else:
            moment = _floats(state, self.key).cpu()
        if not self.sure and bool((moment >= 0).all()) and bool(moment.any()):
            raise Refused(
                f"{self.key} holds no negative number, so it may be a mean of squares (RMSprop, Adagrad)",
                "train with SGD, Lion or Adam, or expand without --with-optimizer",
            )
        return moment

    def encoded(self, moment: Tensor, like: State) -> dict[str, Tensor]:
        if like[self.key].dtype != torch.uint8:
            return {self.key: moment.to(like[self.key])}
        codes = like[self.codes].cpu()
        flat = torch.nn.functional.pad(moment.float().flatten(), (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
        scales = flat.abs().amax(1)
        parts = flat / torch.where(scales == 0, 1.0, scales)[:, None]
        nearest = torch.bucketize(parts, (codes[1:] + codes[:-1]) / 2).to(torch.uint8)
        device = like[self.key].device
        return {
            self.key: nearest.flatten()[: moment.numel()].view(moment.shape).to(device),
            self.codes: like[self.codes],
            self.scales: scales.to(like[self.scales]),
        }


def shape_size(shape: Shape) -> int:
    """How many numbers a tensor of this shape has."""
    return torch.Size(shape).numel()


def _floats(state: State, key: str) -> Tensor:
    """A tensor of the state; an error unless it holds finite floats and nothing else."""
    value = state.get(key)
    if type(value) is not Tensor or not value.is_floating_point():
        raise Refused(
            f"{key} is not a plain tensor of floats, and lemonx knows no other quantised state than bitsandbytes'",
            "train with an optimizer that is not quantised, or expand without --with-optimizer",
        )
    if not bool(value.isfinite().all()):
        raise BadCheckpoint(
            f"{key} holds NaN or Inf, so the run had diverged before it was saved",
            "go back to an earlier checkpoint, or expand without --with-optimizer",
        )
    return value
