"""Lays out a universal checkpoint of DeepSpeed's for a larger model, in the form of the run's own.

DeepSpeed loads all weights from the folders of the parameters, so the model's states hold none.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from lemonx.checkpoints.archives import Placed
from lemonx.checkpoints.chunks import Views, seen_as
from lemonx.checkpoints.shards import Entry, Files
from lemonx.checkpoints.universal import PARAM, STATE, STEP, WEIGHT, UniversalFolder
from lemonx.checkpoints.zero_files import STATE_WAY, ZeroFiles, check_readable
from lemonx.checkpoints.zero_layout import Cut
from lemonx.checkpoints.zero_records import LATEST_UNIVERSAL, PARAMETERS
from lemonx.checkpoints.zero_states import Process, Tree

_INFO = "universal_checkpoint_info"
# What says how a smaller model was cut; whoever loads a checkpoint says it anew.
_OF_SIZES = ("affine_map", "sub_param_shard_widths")


@dataclass
class UniversalFiles(ZeroFiles):
    """A universal checkpoint to be, for any number of processes."""

    @property
    def _universal(self) -> UniversalFolder:
        return cast("UniversalFolder", self.source)

    def files(self, entries: Sequence[Entry], views: Views) -> Files:
        """The files, into which these tensors are written as parts of those that were added, by key."""
        sizes: dict[str, int] = {}
        opening: list[tuple[str, int, bytes]] = []
        self._lay_out(STATE, self._written(self._settings(), STATE), sizes, opening)
        for rank in self.source.ranks:
            self._lay_out(rank.model, self._written(self._states(rank), rank.model), sizes, opening)
        frozen, buffers = self._frozen(), self._buffers()
        for name in self._weights:
            self._add_field(name, name, WEIGHT, name, sizes, opening)
            if name in frozen or name in buffers:
                continue
            for field in self._fields:
                self._add_field(name, name, field, ".".join((*STATE_WAY, name, field)), sizes, opening)
            if (count := self._universal.counts.get(self.origins[name])) is not None:
                path = self._path(f"{PARAMETERS}/{name}/{STEP}.pt")
                sizes[path] = len(count)
                opening.append((path, 0, count))
        for name, own in self._universal.twice.items():
            if own in self._weights:
                self._add_field(name, own, WEIGHT, own, sizes, opening)
        places = {name: seen_as(views[name], self._chunks) for name, _, _ in entries}
        beside = {LATEST_UNIVERSAL: self.below.encode()} if self.below != "." else {}
        check = partial(check_readable, UniversalFolder, self.below, dict(self._weights))
        return Files(sizes, opening, {entry[0]: entry for entry in entries}, places, check, beside)

    def copies(self) -> Iterator[Entry]:
        """None: the model's states hold no weights."""
        return iter(())

    def _path(self, name: str) -> str:
        return os.path.normpath(f"{self.below}/{name}")

    def _add_field(
        self, folder: str, name: str, field: str, key: str, sizes: dict[str, int], opening: list[Any]
    ) -> None:
        """A file with a tensor of a parameter, in the form that the source's has."""
        shape = self._weights[name][1]
        dtype = self._weights[name][0] if field == WEIGHT else self._fields[field]
        # The converter adds a tied weight as it is.
        around = self._universal.around[self.origins[name], field] if folder == name else {}
        blank = self._blank(dtype, (math.prod(shape),) if around is None else shape)
        tree: Any = blank if around is None else {**around, PARAM: blank}
        file = f"{PARAMETERS}/{folder}/{field}.pt"
        self._lay_out(file, tree, sizes, opening)
        found = self._found.pop(self._path(file))
        placed: Placed = found if around is None else found[PARAM]
        self._add(key, self._path(file), shape, Cut(0, 0, 0, 0, math.prod(shape)), placed)

    def _settings(self) -> Tree:
        """What is the optimizer's as a whole, without flat vectors of the process that wrote it, which nobody loads."""
        flats, base = self.source.keys
        old, groups = self.source.ranks[0].settings, self._groups()
        new = {**old}
        if flats in old:
            new[flats] = []
        if isinstance(inner := old.get(base), dict):
            state = {
                flat: {key: value for key, value in inner["state"][flat].items() if not _is_vector(value)}
                for flat in list(inner.get("state", {}))[: len(groups)]
            }
            new[base] = {**inner, "state": state, "param_groups": _numbered(inner.get("param_groups"))}
        new["param_groups"] = _numbered(old.get("param_groups"))
        if "group_paddings" in old:
            new["group_paddings"] = [0] * len(groups)
        if "param_alignment_paddings" in old:
            new["param_alignment_paddings"] = [[0] * len(group) for group in groups]
        return new

    def _states(self, rank: Process) -> Tree:
        """The states of the model, without its weights."""
        import torch

        new = {**rank.module, "module": OrderedDict[str, Any](), "buffer_names": list(self._buffers())}
        new["param_shapes"] = [
            OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in self._groups()
        ]
        frozen = self._frozen()
        if frozen or new.get("frozen_param_shapes") is not None:
            new["frozen_param_shapes"] = OrderedDict((name, torch.Size(shape)) for name, shape in frozen.items())
            new["frozen_param_fragments"] = OrderedDict[str, Any]()
        if isinstance(info := new.get(_INFO), dict):
            new[_INFO] = {key: value for key, value in info.items() if key not in _OF_SIZES}
        return new


def _is_vector(value: Any) -> bool:
    return isinstance(value, Placed) and bool(value.shape)


def _numbered(groups: Any) -> Any:
    """Groups of the optimizer, each with one flat vector, as the shapes are then listed."""
    if not isinstance(groups, list):
        return groups
    return [{**group, "params": [number]} for number, group in enumerate(groups)]
