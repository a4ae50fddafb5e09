"""The optimizer state in a checkpoint folder of transformers' Trainer: optimizer.pt and what a resumed run needs.

optimizer.pt identifies parameters by position, in the order in which Trainer lists them: those that weight decay
applies to, then the others, each in the model's order; or all in one group, if the user made the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from lemonx.checkpoints.creating import new_file, write_new
from lemonx.checkpoints.folder import parse_object
from lemonx.checkpoints.opening import file_inside, read_inside, read_small
from lemonx.checkpoints.pickles import asked_to_run, read_pickle, why_unreadable
from lemonx.errors import BadCheckpoint, BadOutput, LemonxError, Refused
from lemonx.models.building import skeleton
from lemonx.optimizer_state.grow import Grown, StateGrowth
from lemonx.optimizer_state.layouts import adds_decay, flattened, parameter_shape
from lemonx.planning.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER, SCHEDULER, PROGRESS = "optimizer.pt", "scheduler.pt", "trainer_state.json"
# What a resumed run needs beside its optimizer, by the names of Trainer, Accelerate and Lightning: where it stands, its
# schedule, random states, one a process, and a loss scale.
_CARRIED = (
    *(SCHEDULER, PROGRESS, "rng_state*.pth", "scaler.pt"),
    *("scheduler*.bin", "random_states_*.pkl", "sampler*.bin", "dl_state_dict*.bin", "meta.pt"),
)


def grow_trainer_folder(plan: Plan, source: Path, into: Path) -> Grown:
    """Grow the state of a Trainer checkpoint and write it into a folder, with the step at which the run stands."""
    step = _progress(source)
    with file_inside(source, OPTIMIZER) as file:
        saved = _load(file, source / OPTIMIZER)
    if (odd := _odd(saved)) is not None:
        raise BadCheckpoint(
            f"is not the state of a torch optimizer ({odd})", "save the run again", file=source / OPTIMIZER
        )
    names = _positions(skeleton(plan.source_config), saved)
    state = {names[position]: entry for position, entry in saved["state"].items()}
    growth = StateGrowth(plan)
    grown = {name: growth.grow(name, state) for name in growth.target.names}
    groups, order = _groups(plan, growth, saved["param_groups"], set(names.values()))
    result = {"state": {i: grown[name] for i, name in enumerate(order) if grown[name]}, "param_groups": groups}
    _save(result, into / OPTIMIZER)
    carry(source, into)
    decayed = {names[p] for group in saved["param_groups"] if adds_decay(group) for p in group["params"]}
    kept = growth.kept({name: flattened(entry).keys() for name, entry in state.items()})
    return Grown(step, kept, growth.on_disk(decayed))


def _odd(saved: Any) -> str | None:
    """What is invalid in the state of a torch optimizer, which has settings by group and state by position."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        return "it has no state and no param_groups"
    state, groups = saved["state"], saved["param_groups"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return "param_groups is not a list of settings"
    listed = [group.get("params") for group in groups]
    if not all(isinstance(positions, list) and all(type(p) is int for p in positions) for positions in listed):
        return "params is not a list of positions"
    if not all(_is_setting(value) for group in groups for name, value in group.items() if name != "params"):
        return "a setting is neither a number nor a text"
    if not isinstance(state, dict) or not all(isinstance(entry, dict) for entry in state.values()):
        return "state does not say what is kept by position"
    known = [position for positions in listed for position in positions]
    if len(set(known)) < len(known) or not state.keys() <= set(known):
        return "a position is listed twice, or not at all"
    return None


def _is_setting(value: Any) -> bool:
    plain = (int, float, str, torch.Tensor, type(None))
    return isinstance(value, plain) or (isinstance(value, list | tuple) and all(isinstance(v, plain) for v in value))


def carry(source: Path, into: Path) -> None:
    """Copy what a resumed run needs beside its optimizer, if it holds data and no code."""
    for name in sorted({path.name for pattern in _CARRIED for path in source.glob(pattern)}):
        with file_inside(source, name) as file:
            if name == PROGRESS:
                parse_object(read_small(file, source / name), source / name)
            else:
                _load(file, source / name)
            file.seek(0)
            _copy(file, into / name)


def _progress(source: Path) -> int:
    """The step at which trainer_state.json says that the run stands, if all is there that a run needs."""
    for name in (OPTIMIZER, SCHEDULER, PROGRESS):
        if not (source / name).exists():
            raise BadCheckpoint(
                f"has no {name}, which a resumed run needs",
                "give a checkpoint-N folder that Trainer saved with its state (save_only_model=False)",
                file=source,
            )
    raw = read_inside(source, PROGRESS)
    step = parse_object(raw, source / PROGRESS).get("global_step")
    if not isinstance(step, int):
        raise BadCheckpoint("has no global_step", "save the run again", file=source / PROGRESS)
    return step


def _load(file: BinaryIO, path: Path) -> Any:
    """A file of torch.save that holds data only; numpy's random state counts as data. `path` only names it."""
    from transformers.trainer_pt_utils import safe_globals

    try:
        with safe_globals():
            return read_pickle(file)
    except LemonxError:
        raise
    except Exception as error:  # an unpickler of broken bytes raises anything
        if what := asked_to_run(error):
            raise BadCheckpoint(
                f"asks to run {what}, which no training state needs, so nothing was loaded",
                "take the run from someone you trust",
                file=path,
            ) from None
        raise BadCheckpoint(
            f"is broken or holds more than data ({why_unreadable(error)})", "save the run again", file=path
        ) from None


def _positions(model: PreTrainedModel, saved: Mapping[str, Any]) -> dict[int, str]:
    """The parameter at each position of the optimizer."""
    found: dict[int, str] = {}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for group, names in zip(saved["param_groups"], _listed(model, len(saved["param_groups"])), strict=True):
        wanted = [parameter_shape(saved["state"].get(position, {})) for position in group["params"]]
        places = align(wanted, [shapes[name] for name in names])
        if places is None:
            frozen = "" if len(wanted) == len(names) else f" ({len(names) - len(wanted)} seem to have been frozen)"
            raise Refused(
                f"{OPTIMIZER} lists {len(wanted)} parameters by position, but the model has {len(names)}{frozen}, and "
                "their shapes do not tell which is which",
                "save the state by name (docs/optimizer-state.md)",
            )
        found |= {position: names[place] for position, place in zip(group["params"], places, strict=True)}
    return found


def _listed(model: PreTrainedModel, groups: int) -> list[list[str]]:
    """The model's parameters in the order in which Trainer gives them to an optimizer of so many groups."""
    from transformers import Trainer

    names = [name for name, _ in model.named_parameters()]
    if groups == 1:
        return [names]
    if groups != 2:
        raise Refused(
            f"{OPTIMIZER} has {groups} groups of parameters, but Trainer's has 2",
            "save the state by name (docs/optimizer-state.md)",
        )
    rule: Any = Trainer.get_decay_parameter_names
    decay = set(rule(None, model))
    return [[name for name in names if (name in decay) == decays] for decays in (True, False)]


def align(wanted: Sequence[tuple[int, ...] | None], shapes: Sequence[tuple[int, ...]]) -> list[int] | None:
    """The positions of `wanted` among `shapes`, in order; None if there is no such assignment, or more than one.

    Shapes may be left out (frozen parameters); None in `wanted` is a parameter of any shape.

    >>> align([(2,), (3,)], [(2,), (5,), (3,)])
    [0, 2]
    >>> align([(2,)], [(2,), (2,)])
    """
    if len(wanted) == len(shapes):
        fits = all(want in (None, shape) for want, shape in zip(wanted, shapes, strict=True))
        return list(range(len(shapes))) if fits else None
    early = _greedy(wanted, shapes)
    late = _greedy(wanted[::-1], shapes[::-1])
    if early is None or late is None:
        return None
    # Every way lies between the earliest and the latest: they are one if these are the same.
    return early if early == [len(shapes) - 1 - place for place in late[::-1]] else None


def _greedy(wanted: Sequence[tuple[int, ...] | None], shapes: Sequence[tuple[int, ...]]) -> list[int] | None:
    places, at = [], 0
    for want in wanted:
        while at < len(shapes) and want not in (None, shapes[at]):
            at += 1
        if at == len(shapes):
            return None
        places.append(at)
        at += 1
    return places


def _groups(
    plan: Plan, growth: StateGrowth, groups: Sequence[Any], trained: set[str]
) -> tuple[list[dict[str, object]], list[str]]:
    """The target's groups with the source's settings, and its parameters by position.

    A parameter is trained if the one it comes from is.
    """
    result, order = [], list[str]()
    for group, listed in zip(groups, _listed(skeleton(plan.target_config), len(groups)), strict=True):
        kept = [name for name in listed if growth.origin(name) in trained]
        result.append({**group, "params": list(range(len(order), len(order) + len(kept)))})
        order += kept
    return result, order


def _save(content: Any, path: Path) -> None:
    try:
        with new_file(path) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        raise BadOutput(
            f"{path.name} cannot be written ({' '.join(str(error).split())[:160]})", "free some space"
        ) from None


def _copy(content: BinaryIO, to: Path) -> None:
    try:
        write_new(to, content)
    except OSError as error:
        raise BadOutput(
            f"{to.name} cannot be written ({error.strerror})", "free some space, or check permissions"
        ) from None
