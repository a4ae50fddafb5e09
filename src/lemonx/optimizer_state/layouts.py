"""What each optimizer keeps for a parameter: the one table by which state is read, grown and written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lemonx.errors import BadCheckpoint, LemonxError, Refused
from lemonx.optimizer_state.forms import FIRST, SECOND, STEPS, Blockwise, Factors, Form, Shape, State, Whole

# How many steps a parameter has taken.
COUNT = "step"
# What bitsandbytes puts around quantised state when it saves it.
_WRAPPED = "__bnb_optimizer_quant_state__"


@dataclass(frozen=True)
class Layout:
    """The state that an optimizer keeps for one parameter.

    `sometimes`: moments that a setting adds. `counts`: whether it counts steps; None where only some versions do.
    `measured`: numbers that it measures again before each use, so they need not grow.
    """

    name: str
    moments: tuple[Form, ...]
    sometimes: tuple[Form, ...] = ()
    counts: bool | None = True
    measured: frozenset[str] = frozenset()

    @property
    def needed(self) -> frozenset[str]:
        count = frozenset({COUNT}) if self.counts else frozenset[str]()
        return count.union(self.measured, *(form.needed for form in self.moments))

    def fits(self, keys: Collection[str]) -> bool:
        count = frozenset({COUNT}) if self.counts is not False else frozenset[str]()
        known = self.needed.union(count, *(form.keys for form in (*self.moments, *self.sometimes)))
        return self.needed <= frozenset(keys) <= known

    def forms(self, state: Collection[str]) -> list[Form]:
        """The moments that are there."""
        return [form for form in (*self.moments, *self.sometimes) if form.needed <= frozenset(state)]

    def shapes(self, state: Collection[str], shape: Shape) -> dict[str, Shape]:
        """The shape of each tensor for a parameter of this shape; those that are not named do not depend on it."""
        return {key: found for form in self.forms(state) for key, found in form.shapes(shape).items()}


LAYOUTS = (
    Layout(
        "Adam, AdamW",
        (Whole(FIRST, "exp_avg"), Whole(SECOND, "exp_avg_sq")),
        sometimes=(Whole(SECOND, "max_exp_avg_sq"),),
    ),
    Layout("SGD with momentum, Muon", (Whole(FIRST, "momentum_buffer"),), counts=False),
    Layout("Lion", (Whole(FIRST, "exp_avg"),), counts=None),
    Layout("Adafactor (torch)", (Factors(SECOND, "row_var", "col_var", kept=True),)),
    Layout("Adafactor (torch), of vectors", (Whole(SECOND, "variance"),)),
    Layout(
        "Adafactor (transformers)",
        (Factors(SECOND, "exp_avg_sq_row", "exp_avg_sq_col", kept=False),),
        sometimes=(Whole(STEPS, "exp_avg"),),
        measured=frozenset({"RMS"}),
    ),
    Layout(
        "Adafactor (transformers), of vectors",
        (Whole(SECOND, "exp_avg_sq"),),
        sometimes=(Whole(STEPS, "exp_avg"),),
        measured=frozenset({"RMS"}),
    ),
    Layout(
        "Adam of bitsandbytes",
        (Blockwise(FIRST, "state1", "qmap1", "absmax1"), Blockwise(SECOND, "state2", "qmap2", "absmax2")),
    ),
    Layout(
        "Lion and SGD of bitsandbytes",
        (Blockwise(FIRST, "state1", "qmap1", "absmax1", sure=False),),
    ),
)


def adds_decay(group: Mapping[str, Any]) -> bool:
    """Whether a group of an optimizer adds weight decay to gradients, as torch's SGD and Adam do, and AdamW does not.

    >>> adds_decay({"weight_decay": 0.1, "dampening": 0}), adds_decay({"weight_decay": 0.1, "betas": (0.9, 0.99)})
    (True, False)
    """
    added = "dampening" in group or group.get("decoupled_weight_decay") is False
    return added and bool(group.get("weight_decay"))


def flattened(state: State) -> State:
    """A state without what bitsandbytes puts around it, and without what is not there yet."""
    inner = state.get(_WRAPPED, {})
    if not isinstance(inner, Mapping):
        raise BadCheckpoint(f"{_WRAPPED} holds no state", "save the run again")
    both = {**{key: value for key, value in state.items() if key != _WRAPPED}, **inner}
    return {key: value for key, value in both.items() if value is not None}


def wrapped_like(state: State, grown: State) -> State:
    """A grown state in the form in which its source came."""
    if _WRAPPED not in state:
        return grown
    inside = state[_WRAPPED].keys()
    return {
        **{key: value for key, value in grown.items() if key not in inside},
        _WRAPPED: {key: value for key, value in grown.items() if key in inside},
    }


def layout_of(keys: Collection[str], name: str) -> Layout:
    """The layout of a parameter's state by its keys; Refused if no known optimizer keeps these."""
    for layout in LAYOUTS:
        if layout.fits(keys):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS if not layout.name.endswith("of vectors"))
    raise Refused(
        f"the optimizer keeps {', '.join(sorted(map(str, keys)))} for {name}, but lemonx can only grow what these "
        f"keep: {known}",
        "expand without --with-optimizer",
    )


def parameter_shape(state: State) -> Shape | None:
    """The shape of the parameter that a state belongs to, if it tells."""
    flat = flattened(state)
    if not flat:
        return None
    layout = layout_of(flat.keys(), "a parameter")
    tensors = [key for form in layout.forms(flat.keys()) for key in form.needed]
    if not all(isinstance(flat[key], Tensor) for key in tensors):
        return None
    return layout.moments[0].shape(flat)


def checked_layout(name: str, state: State, shape: Shape) -> Layout:
    """The layout of a flat state; an error unless it belongs to a parameter of this shape, with a count of steps."""
    layout = layout_of(state.keys(), name)
    if COUNT in state:
        count = state[COUNT]
        if type(count) not in (int, float) and not (isinstance(count, Tensor) and count.numel() == 1):
            raise BadCheckpoint(f"{COUNT} of {name} is not a number", "give the state of the same training run")
        if not 0 <= float(count) < 2**63:
            raise BadCheckpoint(f"{COUNT} of {name} is {float(count)}", "give the state of the same training run")
    if any(isinstance(form, Factors) for form in layout.forms(state)) and len(shape) < 2:
        raise BadCheckpoint(f"{name} is a vector, but its state is a matrix's", "give the state of the same run")
    for key, wanted in layout.shapes(state.keys(), shape).items():
        if key in state and isinstance(state[key], Tensor) and tuple(state[key].shape) != wanted:
            raise BadCheckpoint(
                f"{key} of {name} has shape {list(state[key].shape)}, but its weight, of shape {list(shape)}, "
                f"has {list(wanted)}",
                "give the state of the same training run",
            )
    return layout


def moment(form: Form, name: str, state: State) -> torch.Tensor:
    """One moment of a parameter in its own shape; errors name the parameter."""
    try:
        return form.decoded(state)
    except LemonxError as error:
        raise type(error)(f"of {name}, {error.found}", error.remedy) from None
