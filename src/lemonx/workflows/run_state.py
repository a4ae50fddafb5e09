"""The rest of a run in its checkpoint: the optimizer's state, which grows, and all else, which is copied."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.chunks import InChunks, Part, Views, put, stored_shapes, taken, whole
from lemonx.checkpoints.dcp import DcpFolder, optimizer_beside
from lemonx.checkpoints.dcp_files import DcpFiles, Way
from lemonx.checkpoints.pickles import read_pickle
from lemonx.checkpoints.runs import RunStore, Stored
from lemonx.checkpoints.shards import Entry
from lemonx.checkpoints.universal_files import UniversalFiles
from lemonx.errors import BadCheckpoint, LemonxError, Refused
from lemonx.models.run_names import naming
from lemonx.optimizer_state.forms import State, Whole
from lemonx.optimizer_state.grow import Grown, grow_parameter, grow_tensor
from lemonx.optimizer_state.layouts import COUNT, layout_of
from lemonx.optimizer_state.moments import moments
from lemonx.optimizer_state.on_disk import GrownState, told
from lemonx.planning.plan import Plan

_STATE, _GROUPS = "state", "param_groups"
# `optimizer.state.<parameter>.exp_avg`, whether the run's state was flattened by torch or by the run itself.
_OF_STATE = re.compile(rf"(?P<top>.*?)\.?\b{_STATE}\.(?P<parameter>.+)\.(?P<field>[^.]+)")
_OF_GROUP = re.compile(rf"(?P<top>.*?)\.?\b{_GROUPS}\.(?P<inside>.+)\.(?P<field>[^.]+)")


@dataclass(frozen=True)
class _Field:
    """One kind of state (`exp_avg`) of one parameter: its way in the run's state, with `*` for the parameter."""

    stored: Stored
    way: Way


def source_views(source: Checkpoint) -> Views:
    """The tensors of the model's files as boxes of those that the run stored."""
    assert source.run is not None
    shapes = {name: stored.shape for name, stored in source.run.weights.items()}
    own = naming(source.config, shapes)
    return {name: whole(name, shape) for name, shape in shapes.items()} if own is None else own


def origins(plan: Plan, source: Views, target: Views) -> dict[str, str]:
    """The run's parameter that every parameter of the larger model comes from."""
    steps = {step.name: step.source for step in plan.steps}
    found: dict[str, str] = {}
    for name, parts in target.items():
        for part in parts:
            found.setdefault(part.key, source[steps[name]][0].key)
    return found


class RunState:
    """Everything in the checkpoint of a run that is no weight, laid out and then written for the target."""

    def __init__(
        self, plan: Plan, source: Checkpoint, views: Views, out: DcpFiles | UniversalFiles, processes: int
    ) -> None:
        assert source.run is not None
        self.plan, self.run, self.target = plan, source.run, views
        below = optimizer_beside(self.run.below)
        if below is not None and (source.path / below).is_dir():
            self.held, self.out = DcpFolder(source.path, below, weights=False), DcpFiles(below, processes)
            assert isinstance(source.store, RunStore)
            source.store.keep(self.held)
        else:
            self.held, self.out = self.run, out
        self.views = source_views(source)
        self.fields: dict[str, dict[str, _Field]] = {}
        self.rest: list[str] = []
        weights = {self.run.key(name) for name in self.run.weights} if self.held is self.run else ()
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
        found = origins(plan, self.views, views)
        known = {part.key for name, parts in views.items() if name in self.readings for part in parts}
        self.origins = {own: origin for own, origin in found.items() if own in known and origin in self.fields}
        self.shapes = stored_shapes(views)
        self._check_rest()
        self.layouts = {own: layout_of(self._keys(own), own) for own in self.fields}

    def _check_rest(self) -> None:
        """Refused if the run keeps its weights twice, as an average of them: what is copied would not grow."""
        for key in self.rest:
            above, name = self.held.saved.paths[key][:-1], str(self.held.saved.paths[key][-1])
            shape = self.held.saved.tensors[key].shape
            if name in self.run.weights and shape == self.run.weights[name].shape != self.shapes.get(name, shape):
                under = ".".join(map(str, above)) or key
                raise Refused(
                    f"the run holds {name} once more under {under[:80]!r}, perhaps an average, which would not grow",
                    "save the run without it, and begin the average again, or grow it as weights of its own",
                )

    def _keys(self, parameter: str) -> set[str]:
        """What the optimizer keeps for a parameter; some count steps once for all."""
        return {*self.fields[parameter], *(() if self.held.step is None else (COUNT,))}

    def _sort(self, key: str, stored: Stored) -> None:
        found = _OF_STATE.fullmatch(key)
        if found is None:
            self.rest.append(key)
        elif (parameter := found["parameter"]) in self.run.weights:
            way = _starred(self.held.saved.paths[key], parameter)
            self.fields.setdefault(parameter, {})[found["field"]] = _Field(stored, way)
        else:
            raise BadCheckpoint(
                f"has state for {parameter[:200]!r}, which is not a parameter of this model",
                "save the optimizer's state by name, with get_state_dict of torch.distributed.checkpoint",
                file=self.held.path,
            )

    # ------------------------------------------------------------- before

    def lay_out(self) -> tuple[list[Entry], Views]:
        """Make room for all of it; the tensors that are then written, and where they go."""
        entries, views = list[Entry](), dict[str, tuple[Part, ...]]()
        keys: dict[tuple[str, str], str] = {}
        for parameter, origin in self.origins.items():
            shapes = self.layouts[origin].shapes(self._keys(origin), self.shapes[parameter])
            for field, known in self.fields[origin].items():
                shape = shapes.get(field, known.stored.shape)
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
        """Whether a field has the parameter's shape and grows tensor by tensor, as on disk."""
        if not self._is_plain(parameter):
            return False
        shape, weight = self.fields[parameter][field].stored.shape, self.run.weights[parameter].shape
        moment = any(field in form.keys for form in self.layouts[parameter].forms(self._keys(parameter)))
        if moment and shape != weight:
            raise BadCheckpoint(
                f"has {field} of shape {list(shape)} for {parameter[:200]!r}, whose own is {list(weight)}",
                "save the run again",
                file=self.held.path,
            )
        return moment

    def _is_plain(self, parameter: str) -> bool:
        """Whether all of a parameter's moments are kept as they are, not in factors or in 8 bits."""
        return all(isinstance(form, Whole) for form in self.layouts[parameter].forms(self._keys(parameter)))

    def _add_objects(self) -> None:
        """Copy objects as they are; settings of parameters go to all that come from them."""
        for key, path in ((key, self.held.saved.paths[key]) for key in self.held.saved.objects):
            raw, found = self.held.read_object(key), _OF_GROUP.fullmatch(key)
            if found and found["inside"] in self.run.weights:
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
        except LemonxError:
            raise
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
            if (origin := self.origins.get(parts[0].key)) is None:
                continue
            if not any(map(writer.rows, self._entries(name, parts, origin))):
                continue  # another process writes them
            if not self._is_plain(origin):
                grown = None if parts[0].key in done else self._write_parameter(parts[0].key, origin, writer)
            else:
                reading = self.readings[name]
                needed = {disk for disk in (reading.source, reading.appended) if disk}
                states = {disk: self._state(disk, infos) for disk in needed}
                grown = grow_tensor(reading, {disk: state for disk, state in states.items() if state})
                for field in self.fields[origin]:
                    assert grown is not None
                    scalar = not self._is_moment(origin, field)
                    for own in {part.key for part in parts} - done if scalar else (name,):
                        writer.write(_entry(own, field), 0, grown[field])
            done |= {part.key for part in parts}
            step = max(step or 0, int(grown[COUNT])) if grown and COUNT in grown else step
        for key in self.rest:
            info = self.held.infos(None, under={key: self.held.saved.tensors[key]})[key]
            writer.write(_entry(key, ""), 0, self.held.read(info))
        forms = {own: self.layouts[own].forms(self._keys(own)) for own in self.fields}
        kept = {disk: forms[parts[0].key] for disk, parts in self.views.items() if parts[0].key in forms}
        return told("distributed", self.plan, Grown(step, kept))

    def _entries(self, name: str, parts: tuple[Part, ...], origin: str) -> Iterator[str]:
        """Yield the entries that hold the state of a tensor."""
        for field in self.fields[origin]:
            yield from {_entry(name if self._is_moment(origin, field) else part.key, field) for part in parts}

    def _write_parameter(self, parameter: str, origin: str, writer: CheckpointWriter) -> State:
        """Grow state that is kept in factors, or in 8 bits: of a whole parameter, with all that it is made of."""
        inside = {name: parts for name, parts in self.target.items() if any(part.key == parameter for part in parts)}
        readings = [self.readings[name] for name in inside if name in self.readings]
        disks = {disk for reading in readings for disk in (reading.source, reading.appended) if disk}
        entries = {own: self._whole_state(own) for disk in disks for own in {p.key for p in self.views[disk]}}
        shapes = {own: self.run.weights[own].shape for own in entries}

        def split(own: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            held = {disk: parts for disk, parts in self.views.items() if disk in disks and parts[0].key == own}
            return {disk: taken(parts, {own: tensor}) for disk, parts in held.items()}

        def join(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
            made = torch.empty(self.shapes[parameter], dtype=next(iter(parts.values())).dtype)
            for name, tensor in parts.items():
                put([part for part in inside[name] if part.key == parameter], tensor, {parameter: made})
            return made

        grown = grow_parameter(readings, entries, origin, shapes, split, join)
        for field in self.fields[origin]:
            writer.write(_entry(parameter, field), 0, grown[field])
        return grown

    def _whole_state(self, parameter: str) -> dict[str, torch.Tensor]:
        stored = {field: known.stored for field, known in self.fields.get(parameter, {}).items()}
        return {field: self.held.read(info) for field, info in self.held.infos(None, under=stored).items()}

    def _infos(self, field: str) -> Mapping[str, InChunks]:
        under = {key: known[field].stored for key, known in self.fields.items() if field in known}
        held = {name: parts for name, parts in self.views.items() if all(part.key in under for part in parts)}
        moment = {name: parts for name, parts in held.items() if self._is_moment(parts[0].key, field)}
        scalars = {name: whole(p[0].key, under[p[0].key].shape) for name, p in held.items() if name not in moment}
        return self.held.infos({**moment, **scalars}, under=under)

    def _state(self, name: str, infos: Mapping[str, Mapping[str, InChunks]]) -> dict[str, torch.Tensor]:
        state = {field: self.held.read(known[name]) for field, known in infos.items() if name in known}
        if state and self.held.step is not None:
            state[COUNT] = torch.tensor(float(self.held.step))
        return state


def _starred(path: Way, parameter: str) -> Way:
    """A way with `*` for the parameter's name, which is one part of it, or inside of one."""
    return tuple(str(part).replace(parameter, "*", 1) if isinstance(part, str) else part for part in path)


def _entry(name: str, field: str) -> str:
    """A name that no tensor of a model has."""
    return f"{name}\n{field}"
