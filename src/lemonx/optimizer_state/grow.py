"""Adam's state in memory, by parameter name: the source's in, the target's out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lemonx.errors import BadCheckpoint, Refused
from lemonx.models.building import disk_names, skeleton
from lemonx.optimizer_state.moments import FRESH, Moments, moments
from lemonx.planning.plan import Plan

FIRST, SECOND, COUNT = ("exp_avg",), ("exp_avg_sq", "max_exp_avg_sq"), "step"
# Adam's moments and count of one parameter, by the names that torch has for them.
State = Mapping[str, Any]


def grow_optimizer(plan: Plan, state: Mapping[str, State]) -> dict[str, dict[str, torch.Tensor | float]]:
    """The target's Adam state from the source's, both by module name, as `get_optimizer_state_dict` has them.

    A parameter without state (frozen, or never reached by a gradient) has none in the target either.
    """
    source, target = disk_names(skeleton(plan.source_config)), disk_names(skeleton(plan.target_config))
    if unknown := sorted(state.keys() - source.keys()):
        raise BadCheckpoint(
            f"the optimizer has state for {unknown[0]!r}, which is not a parameter of this model",
            "give the state of the same training run",
        )
    on_disk = {source[name]: entry for name, entry in state.items()}
    readings = moments(plan)
    result = {}
    for name, disk in target.items():
        if disk in readings and (grown := grow_entry(readings[disk], on_disk)) is not None:
            result[name] = grown
    return result


def grow_entry(reading: Moments, on_disk: Mapping[str, State]) -> dict[str, torch.Tensor | float] | None:
    """The state of one target tensor; None where its source has none."""
    own = on_disk.get(reading.source)
    if own is None:
        return None
    for name in (reading.source, reading.appended):
        if name is not None and name in on_disk:
            _check_adam(name, on_disk[name], reading.source_shape, set(own))
    result: dict[str, torch.Tensor | float] = {}
    for key, value in own.items():
        if key == COUNT:
            # Where nothing is known, Adam starts from zero, with the bias correction that belongs to it.
            result[key] = value * 0 if reading.status == FRESH else value
            continue
        known = {name: entry[key] for name, entry in on_disk.items() if name in (reading.source, reading.appended)}
        result[key] = reading.first(known) if key in FIRST else reading.second(known)
    return result


def _check_adam(name: str, entry: State, shape: tuple[int, ...], keys: set[str]) -> None:
    """Refused unless this is the state of Adam or AdamW, of this shape, and with these keys."""
    needed, known = {*FIRST, SECOND[0], COUNT}, {*FIRST, *SECOND, COUNT}
    if not needed <= entry.keys() <= known or entry.keys() != keys:
        raise Refused(
            f"the optimizer keeps {', '.join(sorted(map(str, entry)))} for {name}, but lemonx can only grow what "
            f"Adam and AdamW keep ({', '.join(sorted(needed))})",
            "expand without --with-optimizer",
        )
    count = entry[COUNT]
    if type(count) not in (int, float) and not (isinstance(count, torch.Tensor) and count.numel() == 1):
        raise BadCheckpoint(f"{COUNT} of {name} is not a number", "give the state of the same training run")
    if not 0 <= float(count) < 2**63:
        raise BadCheckpoint(f"{COUNT} of {name} is {float(count)}", "give the state of the same training run")
    for key in sorted(entry.keys() - {COUNT}):
        value = entry[key]
        if type(value) is not torch.Tensor or not value.is_floating_point():
            raise Refused(
                f"{key} of {name} is not a plain tensor of floats, and lemonx can grow nothing else",
                "train with an optimizer that is not quantised, or expand without --with-optimizer",
            )
        if not bool(value.isfinite().all()):
            raise BadCheckpoint(
                f"{key} of {name} holds NaN or Inf, so the run had diverged before it was saved",
                "go back to an earlier checkpoint, or expand without --with-optimizer",
            )
        if tuple(value.shape) != shape:
            raise BadCheckpoint(
                f"{key} of {name} has shape {list(value.shape)}, but its weight has {list(shape)}",
                "give the state of the same training run",
            )
