"""The rest of a run in a distributed checkpoint: the optimizer's state, which grows, and all else, which is copied."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.chunks import InChunks, Part, Views, stored_shapes, whole
from lemonx.checkpoints.dcp import DcpFolder, optimizer_beside
from lemonx.checkpoints.dcp_files import DcpFiles, Way
from lemonx.checkpoints.dcp_metadata import Stored
from lemonx.checkpoints.pickles import read_pickle
from lemonx.checkpoints.shards import Entry
from lemonx.errors import BadCheckpoint, Refused
from lemonx.models.run_names import naming
from lemonx.optimizer_state.grow import Grown, grow_tensor
from lemonx.optimizer_state.layouts import COUNT, layout_of
from lemonx.optimizer_state.moments import moments
from lemonx.optimizer_state.on_disk import GrownState, told
from lemonx.planning.plan import Plan

_STATE, _GROUPS = "state", "param_groups"
# `optimizer.state.<parameter>.exp_avg`, whether the run's state was flattened by torch or by the run itself.
_OF_STATE = re.compile(rf"(?P<top>.*?)\.?\b{_STATE}\.(?P<parameter>.+)\.(?P<field>[^.]+)")
_OF_GROUP = re.compile(rf"(?P<top>.*?)\.?\b{_GROUPS}\.(?P<inside>.+)\.(?P<field>[^.]+)")
_SCALARS = ((), (1,))


@dataclass(frozen=True)
class _Field:
    """One kind of state (`exp_avg`) of one parameter: its way in the run's state, with `*` for the parameter."""

    stored: Stored
    way: Way


class RunState:
    """Everything in a distributed checkpoint that is no weight, laid out and then written for the target."""

    def __init__(self, plan: Plan, source: Checkpoint, views: Views, out: DcpFiles, processes: int) -> None:
        assert source.dcp is not None
        self.plan, self.dcp, self.target = plan, source.dcp, views
        below = optimizer_beside(self.dcp.below)
        if below is not None and (source.path / below).is_dir():
            self.held, self.out = DcpFolder(source.path, below, weights=False), DcpFiles(below, processes)
            source.keep(self.held)
        else:
            self.held, self.out = self.dcp, out
        shapes = {name: stored.shape for name, stored in self.dcp.weights.items()}
        own = naming(source.config, shapes)
        self.views = {name: whole(name, shape) for name, shape in shapes.items()} if own is None else own
        self.fields: dict[str, dict[str, _Field]] = {}
        self.rest: list[str] = []
        weights = {self.dcp.key(name) for name in self.dcp.weights} if self.held is self.dcp else ()
        for key, stored in self.held.saved.tensors.items():
            if key not in weights:
                self._sort(key, stored)
        if not self.fields:
            raise BadCheckpoint(
                "holds no optimizer state by parameter, such as optimizer.state.<parameter>.exp_avg",
                "expand without --with-optimizer",
                file=self.held.path,
            )
        self.readings = moments(plan)
        self.origins = self._origins()

    def _sort(self, key: str, stored: Stored) -> None:
        found = _OF_STATE.fullmatch(key)
        if found is None:
            self.rest.append(key)
        elif (parameter := found["parameter"]) in self.dcp.weights:
            way = _starred(self.held.saved.paths[key], parameter)
            self.fields.setdefault(parameter, {})[found["field"]] = _Field(stored, way)
        else:
            raise BadCheckpoint(
                f"has state for {parameter[:200]!r}, which is not a parameter of this model",
                "save the optimizer's state by name, with get_state_dict of torch.distributed.checkpoint",
                file=self.held.path,
            )

    def _origins(self) -> dict[str, str]:
        """The source's parameter of every parameter of the target that has state."""
        steps = {step.name: step.source for step in self.plan.steps}
        origins: dict[str, str] = {}
        for name, parts in self.target.items():
            for part in parts:
                origin = self.views[steps[name]][0].key
                if origin in self.fields and name in self.readings:
                    origins.setdefault(part.key, origin)
        return origins

    # ------------------------------------------------------------- before

    def lay_out(self) -> tuple[list[Entry], Views]:
        """Make room for all of it; the tensors that are then written, and where they go."""
        entries, views = list[Entry](), dict[str, tuple[Part, ...]]()
        keys: dict[tuple[str, str], str] = {}
        shapes = stored_shapes(self.target)
        for parameter, origin in self.origins.items():
            for field, known in self.fields[origin].items():
                shape = shapes[parameter] if self._is_moment(origin, field) else known.stored.shape
                way = tuple(str(part).replace("*", parameter) for part in known.way)
                keys[parameter, field] = self.out.add_tensor(way, known.stored.dtype, shape)
                if not self._is_moment(origin, field):
                    name = _entry(parameter, field)
                    entries.append((name, known.stored.dtype, shape))
                    views[name] = whole(keys[parameter, field], shape)
        for name, parts in self.target.items():
            if (origin := self.origins.get(parts[0].key)) is None:
                continue
            for field, known in self.fields[origin].items():
                if self._is_moment(origin, field):
                    entries.append((_entry(name, field), known.stored.dtype, self.readings[name].shape))
                    views[_entry(name, field)] = tuple(replace(part, key=keys[part.key, field]) for part in parts)
        for key in self.rest:
            stored = self.held.saved.tensors[key]
            added = self.out.add_tensor(self.held.saved.paths[key], stored.dtype, stored.shape)
            entries.append((_entry(key, ""), stored.dtype, stored.shape))
            views[_entry(key, "")] = whole(added, stored.shape)
        self._add_objects()
        return entries, views

    def _is_moment(self, parameter: str, field: str) -> bool:
        shape, weight = self.fields[parameter][field].stored.shape, self.dcp.weights[parameter].shape
        if shape != weight and shape not in _SCALARS:
            raise Refused(
                f"the optimizer keeps {field} of shape {list(shape)} for {parameter}, whose own is {list(weight)}, and "
                "in a distributed checkpoint lemonx grows only state of the parameter's shape",
                "expand without --with-optimizer",
            )
        return shape == weight and field != COUNT

    def _add_objects(self) -> None:
        """Copy objects as they are; settings of parameters go to all that come from them."""
        for key, path in ((key, self.held.saved.paths[key]) for key in self.held.saved.objects):
            raw, found = self.held.read_object(key), _OF_GROUP.fullmatch(key)
            if found and found["inside"] in self.dcp.weights:
                way = _starred(path, found["inside"])
                for parameter in (own for own, origin in self.origins.items() if origin == found["inside"]):
                    self.out.add_object(tuple(str(part).replace("*", parameter) for part in way), raw)
            elif found and found["field"] == "params":
                self.out.add_object(path, self._renamed(raw, key))
            else:
                self.out.add_object(path, raw)

    def _renamed(self, raw: bytes, key: str) -> bytes:
        """The list of a group's parameters, with those of the target."""
        try:
            listed: Any = read_pickle(io.BytesIO(raw))
        except Exception:  # what a broken or hostile pickle raises is not known in advance
            listed = None
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in cast("list[Any]", listed)):
            raise BadCheckpoint(f"holds no list of names in {key!r}", "save the run again", file=self.held.path)
        names = cast("list[str]", listed)
        frozen = [name for name in names if name not in self.fields]
        saved = io.BytesIO()
        torch.save([own for own, origin in self.origins.items() if origin in names] + frozen, saved)
        return saved.getvalue()

    # ------------------------------------------------------------- then

    def write(self, writer: CheckpointWriter) -> GrownState:
        """Grow the moments, one tensor's at a time, and write them; what a certificate says of them."""
        kinds = {field for known in self.fields.values() for field in known}
        infos = {field: self._infos(field) for field in kinds}
        step, done = None, set[str]()
        for name, parts in self.target.items():
            if parts[0].key not in self.origins:
                continue
            reading = self.readings[name]
            needed = {disk for disk in (reading.source, reading.appended) if disk}
            states = {disk: self._state(disk, infos) for disk in needed}
            grown = grow_tensor(reading, {disk: state for disk, state in states.items() if state})
            for field, value in (grown or {}).items():
                assert isinstance(value, torch.Tensor)
                scalar = not self._is_moment(self.origins[parts[0].key], field)
                for own in {part.key for part in parts} - done if scalar else ():
                    writer.write(_entry(own, field), 0, value)
                if not scalar:
                    writer.write(_entry(name, field), 0, value)
            done |= {part.key for part in parts}
            step = max(step or 0, int(grown[COUNT])) if grown and COUNT in grown else step
        for key in self.rest:
            info = self.held.infos(None, under={key: self.held.saved.tensors[key]})[key]
            writer.write(_entry(key, ""), 0, self.held.read(info))
        forms = {own: layout_of(known, own).forms(known) for own, known in self.fields.items()}
        kept = {disk: forms[parts[0].key] for disk, parts in self.views.items() if parts[0].key in forms}
        return told("distributed", self.plan, Grown(step, kept))

    def _infos(self, field: str) -> Mapping[str, InChunks]:
        under = {key: known[field].stored for key, known in self.fields.items() if field in known}
        held = {name: parts for name, parts in self.views.items() if all(part.key in under for part in parts)}
        moment = {name: parts for name, parts in held.items() if self._is_moment(parts[0].key, field)}
        scalars = {name: whole(p[0].key, under[p[0].key].shape) for name, p in held.items() if name not in moment}
        return self.held.infos({**moment, **scalars}, under=under)

    def _state(self, name: str, infos: Mapping[str, Mapping[str, InChunks]]) -> dict[str, torch.Tensor]:
        return {field: self.held.read(known[name]) for field, known in infos.items() if name in known}


def _starred(path: Way, parameter: str) -> Way:
    """A way with `*` for the parameter's name, which is one part of it, or inside of one."""
    return tuple(str(part).replace(parameter, "*", 1) if isinstance(part, str) else part for part in path)


def _entry(name: str, field: str) -> str:
    """A name that no tensor of a model has."""
    return f"{name}\n{field}"
