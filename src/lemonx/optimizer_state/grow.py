"""An optimizer's state in memory, by parameter name: the source's in, the target's out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lemonx.errors import BadCheckpoint, Refused
from lemonx.models.building import skeleton
from lemonx.models.held import Held
from lemonx.optimizer_state.forms import FIRST, SECOND, STEPS, Factors, Form, State
from lemonx.optimizer_state.layouts import COUNT, Layout, checked_layout, flattened, layout_of, moment, wrapped_like
from lemonx.optimizer_state.moments import EXACT, EXPECTED, FRESH, Moments, moments
from lemonx.planning.plan import Plan

SQUARES = "the second moment of a sum of gradients is not that of its terms"
SIZES = "the mean of past steps depends on the size of the whole tensor's steps"
DECAY = "weight decay that is added to gradients grows as weights do, and not as gradients"
UNEQUAL = "squares are kept as means over an axis on which they grow unequally"


def grow_optimizer(plan: Plan, state: Mapping[str, State]) -> dict[str, State]:
    """The target's optimizer state from the source's, both by module name, as `get_optimizer_state_dict` has them.

    A parameter without state (frozen, or never reached by a gradient) has none in the target either.
    """
    growth = StateGrowth(plan)
    growth.check_known(state.keys())
    grown = {name: growth.grow(name, state) for name in growth.target.names}
    return {name: entry for name, entry in grown.items() if entry is not None}


@dataclass(frozen=True)
class Grown:
    """What was found out about a state that was grown from a folder to a folder.

    `step`: how many steps were taken, where the optimizer counts them. `kept`: the forms in which the state of each of
    the source's tensors is kept, by name on disk. `decayed`: those whose weight decay is added to their gradients.
    """

    step: int | None
    kept: Mapping[str, Collection[Form]]
    decayed: Collection[str] = ()


class StateGrowth:
    """How the state of every parameter of the target follows from that of the source's, by module name."""

    def __init__(self, plan: Plan) -> None:
        self.source, self.target = Held(skeleton(plan.source_config)), Held(skeleton(plan.target_config))
        self.readings = moments(plan)
        self._holders = self.source.holders

    def check_known(self, names: Any) -> None:
        if unknown := sorted(names - self.source.names.keys()):
            raise BadCheckpoint(
                f"the optimizer has state for {unknown[0]!r}, which is not a parameter of this model",
                "give the state of the same training run",
            )

    def origin(self, name: str) -> str | None:
        """The source's parameter that a target's comes from, if there is one."""
        readings = self._of(name)
        return self._holders.get(readings[0].source) if readings else None

    def needed(self, name: str) -> set[str]:
        """The source's parameters whose state a target's is made from."""
        disks = {disk for reading in self._of(name) for disk in (reading.source, reading.appended) if disk}
        return {self._holders[disk] for disk in disks if disk in self._holders}

    def grow(self, name: str, state: Mapping[str, State]) -> State | None:
        """The state of one target parameter; None where its source has none."""
        origin = self.origin(name)
        if origin is None or not (own := flattened(state.get(origin, {}))):
            return None
        entries = {origin: own}
        for other in self.needed(name):
            if found := flattened(state.get(other, {})):
                entries[other] = found
        join = partial(self.target.joined, name)
        grown = grow_parameter(self._of(name), entries, origin, self.source.shapes, self.source.split, join)
        return wrapped_like(state[origin], grown)

    def status(self, name: str, forms: Collection[Form], *, decayed: bool = False) -> tuple[str, frozenset[str]]:
        """How well the state of a target parameter is known, if it is kept in these forms, and why not better."""
        readings = self._of(name)
        why = frozenset[str]().union(*(reasons(reading, forms, decayed=decayed) for reading in readings))
        if readings and self._is_fresh(name):
            return FRESH, why
        return EXPECTED if why else EXACT, why

    def on_disk(self, names: Collection[str]) -> set[str]:
        """The tensors on disk that hold these parameters of the source."""
        return {disk for disk, name in self._holders.items() if name in names}

    def kept(self, state: Mapping[str, Collection[str]]) -> dict[str, list[Form]]:
        """The forms in which moments of the source's tensors on disk are kept, from the keys of each parameter."""
        forms = {name: layout_of(keys, name).forms(keys) for name, keys in state.items() if keys}
        return {disk: forms[name] for disk, name in self._holders.items() if name in forms}

    def _of(self, name: str) -> list[Moments]:
        return [self.readings[disk] for disk in self.target.names[name] if disk in self.readings]

    def _is_fresh(self, name: str) -> bool:
        return all(reading.status == FRESH for reading in self._of(name))


def grow_parameter(
    readings: Sequence[Moments],
    entries: Mapping[str, State],
    origin: str,
    shapes: Mapping[str, tuple[int, ...]],
    split: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]],
    join: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
) -> State:
    """The state of one target parameter from those that it is made from, with the keys of the origin's.

    Each moment is decoded, `split` into tensors as they stand on disk, mapped by `readings`, and `join`ed again.
    """

    def made(form: Form) -> torch.Tensor:
        known: dict[str, torch.Tensor] = {}
        for source, entry in entries.items():
            known |= split(source, moment(form, source, entry))
        return join({reading.name: _mapped(reading, form, known) for reading in readings})

    own, layout = entries[origin], _layout(origin, entries, shapes)
    # Copies: optimizers count in place, and two targets may come from one source.
    result = {key: copy.copy(own[key]) for key in layout.measured}
    if COUNT in own:
        # Where nothing is known, an optimizer starts from zero, with the bias correction that belongs to it.
        result[COUNT] = own[COUNT] * (0 if all(reading.status == FRESH for reading in readings) else 1)
    for form in layout.forms(own.keys()):
        result |= form.encoded(made(form), own)
    return {key: result[key] for key in own}


def grow_tensor(reading: Moments, on_disk: Mapping[str, State]) -> State | None:
    """The state of one target tensor from that of the source's, by name on disk; None where its source has none."""
    entries = {
        name: flattened(on_disk[name]) for name in (reading.source, reading.appended) if name and name in on_disk
    }
    if not entries.get(reading.source):
        return None
    shapes = dict.fromkeys(entries, reading.source_shape)
    return grow_parameter([reading], entries, reading.source, shapes, _as_it_is, lambda parts: parts[reading.name])


def _as_it_is(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor}


def _layout(origin: str, entries: Mapping[str, State], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    for name, entry in entries.items():
        if entry.keys() != entries[origin].keys():
            raise Refused(
                f"the optimizer keeps {', '.join(sorted(entry))} for {name}, but other things for {origin}",
                "expand without --with-optimizer",
            )
    layouts = {name: checked_layout(name, entry, shapes[name]) for name, entry in entries.items()}
    return layouts[origin]


def _mapped(reading: Moments, form: Form, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return {FIRST: Moments.first, SECOND: Moments.second, STEPS: Moments.steps}[form.moment](reading, known)


def reasons(reading: Moments, forms: Collection[Form], *, decayed: bool = False) -> frozenset[str]:
    """Why a tensor's state, kept in these forms, is not exactly what the target's optimizer would have gathered.

    `decayed`: weight decay was added to its gradients.
    """
    if reading.status == FRESH:
        return reading.why
    kept = {form.moment for form in forms}
    squares = SECOND in kept and reading.has_sums
    unequal = any(isinstance(form, Factors) for form in forms) and not reading.is_even
    found = {SQUARES: squares, SIZES: STEPS in kept, UNEQUAL: unequal, DECAY: decayed and bool(kept)}
    return reading.why | {reason for reason, holds in found.items() if holds}
