"""Lays out a universal checkpoint of DeepSpeed's for a larger model, in the form of the run's own.

DeepSpeed loads all weights from the folders of the parameters, so the model's states hold none. What a file holds
beside tensors and shapes (schedules, counters, the loss scale, settings) is written as it was.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lemonx.checkpoints.archives import Placed
from lemonx.checkpoints.chunks import Chunk, Views, contiguous, seen_as
from lemonx.checkpoints.envelopes import envelope, saved
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.shards import Entry, Files
from lemonx.checkpoints.universal import LATEST, PARAM, PARAMETERS, STATE, STEP, WEIGHT, Tree, UniversalFolder
from lemonx.errors import BadCheckpoint, BadOutput, Refused

Way = tuple[str | int, ...]
_STATE_WAY = ("optimizer", "state")
_INFO = "universal_checkpoint_info"
# What says how a smaller model was cut; whoever loads a checkpoint says it anew.
_OF_SIZES = ("affine_map", "sub_param_shard_widths")


@dataclass
class UniversalFiles:
    """A universal checkpoint to be, for any number of processes.

    `origins`: the source's parameter of every parameter; `order`: that of the larger model's parameters. First all
    tensors are added, then `files` is asked for.
    """

    source: UniversalFolder
    origins: Mapping[str, str]
    order: Sequence[str]
    _weights: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    _moments: dict[str, str] = field(default_factory=dict)
    _chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _opening: list[tuple[str, int, bytes]] = field(default_factory=list)

    def add_tensor(self, way: Way, dtype: str, shape: tuple[int, ...]) -> str:
        """Make room for a weight, or for the state of a parameter, and return its key."""
        if way[:2] == _STATE_WAY:
            self._moments[str(way[3])] = dtype
        else:
            self._weights[str(way[0])] = dtype, shape
        return ".".join(map(str, way))

    def add_object(self, way: Way, raw: bytes) -> None:
        raise ValueError(f"{way} is no part of a universal checkpoint")

    def files(self, entries: Sequence[Entry], views: Views) -> Files:
        """Return the files, into which these tensors are written as parts of those that were added, by key."""
        groups = self._groups()
        self._add(STATE, self._settings(groups))
        for name, states in self.source.states.items():
            self._add(name, self._states(states, groups))
        trained = {name for group in groups for name in group}
        for name, (dtype, shape) in self._weights.items():
            self._add_field(name, name, WEIGHT, name, dtype, shape)
            for moment, kind in self._moments.items() if name in trained else ():
                self._add_field(name, name, moment, ".".join((*_STATE_WAY, name, moment)), kind, shape)
            if name in trained and (count := self.source.counts.get(self.origins[name])) is not None:
                path = self._path(f"{PARAMETERS}/{name}/{STEP}.pt")
                self._sizes[path] = len(count)
                self._opening.append((path, 0, count))
        for name, own in self.source.twice.items():
            if own in self._weights:
                self._add_field(name, own, WEIGHT, own, *self._weights[own])
        places = {name: seen_as(views[name], self._chunks) for name, _, _ in entries}
        beside = {LATEST: self.source.below.encode()} if self.source.below != "." else {}
        check = partial(_check_readable, self.source.below, dict(self._weights))
        return Files(self._sizes, self._opening, {entry[0]: entry for entry in entries}, places, check, beside)

    def _groups(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the trained parameters of the larger model: each in the group of the one it comes from."""
        of = {name: number for number, group in enumerate(self.source.groups) for name in group}
        groups = [dict[str, tuple[int, ...]]() for _ in self.source.groups]
        for name in self.order:
            if name in self._weights and (own := of.get(self.origins.get(name, ""))) is not None:
                groups[own][name] = self._weights[name][1]
        known = self.source.frozen.keys() | self.source.buffers
        untrained = {name for name in self._weights if self.origins.get(name) in known}
        if lost := self._weights.keys() - untrained - {name for group in groups for name in group}:
            raise Refused(f"{min(lost)!r} is in no group of the run's optimizer", "expand without --with-optimizer")
        return groups

    # ------------------------------------------------------------- where tensors go

    def _path(self, name: str) -> str:
        return os.path.normpath(f"{self.source.below}/{name}")

    def _add(self, name: str, tree: Tree) -> None:
        """Lay out a file whose tensors are small."""
        try:
            raw = saved(tree)
        except RecursionError:
            raise BadCheckpoint("is nested too deeply", "save it again", file=self.source.folder / name) from None
        self._sizes[self._path(name)] = len(raw)
        self._opening.append((self._path(name), 0, raw))

    def _add_field(self, folder: str, name: str, kind: str, key: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Lay out a file with a tensor of a parameter, in the form that the source's has."""
        import torch

        # The converter adds a tied weight as it is.
        around = self.source.around[self.origins[name], kind] if folder == name else {}
        # Memory that nobody touches is not taken.
        blank = torch.empty((math.prod(shape),) if around is None else shape, dtype=torch_dtype(dtype), device="cpu")
        file = f"{PARAMETERS}/{folder}/{kind}.pt"
        made = envelope(blank if around is None else {**around, PARAM: blank})
        path, begin = self._path(file), (0,) * len(shape)
        self._sizes[path] = made.length
        self._opening += [(path, place, raw) for place, raw in made.pieces]
        found = made.tree()
        placed: Placed = found if around is None else found[PARAM]
        chunk = Chunk(Path(path), begin, shape, contiguous(shape), item=(placed.begin, 0), shape=shape)
        self._chunks.setdefault(key, []).append(chunk)

    # ------------------------------------------------------------- what else files hold

    def _settings(self, groups: Sequence[Mapping[str, Any]]) -> Tree:
        """Return the optimizer's settings, without the flat vectors of one process, which nobody loads."""
        flats, base = self.source.keys
        old = self.source.settings
        new = {**old, "param_groups": _numbered(old.get("param_groups"))}
        if flats in old:
            new[flats] = []
        if isinstance(inner := old.get(base), dict):
            state = {
                flat: {key: value for key, value in inner["state"][flat].items() if not _is_vector(value)}
                for flat in list(inner.get("state", {}))[: len(groups)]
            }
            new[base] = {**inner, "state": state, "param_groups": _numbered(inner.get("param_groups"))}
        if "group_paddings" in old:
            new["group_paddings"] = [0] * len(groups)
        if "param_alignment_paddings" in old:
            new["param_alignment_paddings"] = [[0] * len(group) for group in groups]
        return new

    def _states(self, old: Tree, groups: Sequence[Mapping[str, Any]]) -> Tree:
        """Return the states of the model, without its weights."""
        import torch

        def sizes(shapes: Mapping[str, Any]) -> Any:
            return OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())

        def grown_from(known: Any) -> dict[str, tuple[int, ...]]:
            return {name: shape for name, (_, shape) in self._weights.items() if self.origins.get(name) in known}

        new = {**old, "module": OrderedDict(), "buffer_names": list(grown_from(self.source.buffers))}
        new["param_shapes"] = [sizes(group) for group in groups]
        frozen = grown_from(self.source.frozen)
        if frozen or new.get("frozen_param_shapes") is not None:
            new["frozen_param_shapes"] = sizes(frozen)
            new["frozen_param_fragments"] = OrderedDict()
        if isinstance(info := new.get(_INFO), dict):
            new[_INFO] = {key: value for key, value in info.items() if key not in _OF_SIZES}
        return new


def _is_vector(value: Any) -> bool:
    return bool(getattr(value, "shape", ()))


def _numbered(groups: Any) -> Any:
    """Return groups of the optimizer, each with one flat vector, as the shapes are then listed."""
    if not isinstance(groups, list):
        return groups
    return [{**group, "params": [number]} for number, group in enumerate(groups)]


def _check_readable(below: str, stored: Mapping[str, tuple[str, tuple[int, ...]]], folder: Path) -> None:
    """Check that our reader finds exactly the weights that were asked for."""
    try:
        written = UniversalFolder(folder.resolve(), below)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in written.weights.items()}
        written.close()
    except BadCheckpoint as error:
        raise BadOutput(f"cannot be read back ({error})", "check the disk, and start again", file=folder) from None
    if found != stored:
        raise BadOutput("reads back different from what was written", "check the disk, and start again", file=folder)
