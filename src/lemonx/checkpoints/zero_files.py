"""Lays out a ZeRO checkpoint for a larger model, in the form of the run's own, before a number is written.

What a file holds beside tensors and shapes (schedules, counters, the loss scale, settings) is written as it was.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints.archives import DType, Placed
from lemonx.checkpoints.chunks import Chunk, InChunks, Views, contiguous, flat_boxes, seen_as, whole
from lemonx.checkpoints.copying import BLOCK, row_pieces
from lemonx.checkpoints.envelopes import Record, envelope, record_class
from lemonx.checkpoints.safetensors_file import item_size, torch_dtype
from lemonx.checkpoints.shards import Entry, Files
from lemonx.checkpoints.writer import CheckpointWriter
from lemonx.checkpoints.zero import ZeroFolder
from lemonx.checkpoints.zero_layout import Cut, Cuts, Shapes, each_cut, one_vector
from lemonx.checkpoints.zero_records import FRAGMENT, LATEST, records
from lemonx.checkpoints.zero_states import SETTINGS, WEIGHTS_STAGE, Process, Tree
from lemonx.errors import BadCheckpoint, BadOutput, Refused

if TYPE_CHECKING:
    import torch

Way = tuple[str | int, ...]
STATE_WAY = ("optimizer", "state")
# Before the name of the copy of a weight in the dtype that the model computes with.
_COPY = "copy\n"


@dataclass
class ZeroFiles:
    """A ZeRO checkpoint to be, for so many processes.

    `origins`: the source's parameter of every parameter; `order`: that of the larger model's parameters. First all
    tensors are added, then `files` is asked for.
    """

    source: ZeroFolder
    processes: int
    origins: Mapping[str, str]
    order: Sequence[str]
    _weights: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    _fields: dict[str, str] = field(default_factory=dict)
    _chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    # What a reader will find in each file, until its chunks are known, and the tensors that have no numbers yet.
    _found: dict[str, Any] = field(default_factory=dict)
    _blanks: list[torch.Tensor] = field(default_factory=list)

    @property
    def below(self) -> str:
        return self.source.below

    def add_tensor(self, way: Way, dtype: str, shape: tuple[int, ...]) -> str:
        """Make room for a weight, or for the state of a parameter; its key."""
        if way[:2] == STATE_WAY:
            self._fields[str(way[3])] = dtype
        else:
            self._weights[str(way[0])] = dtype, shape
        return ".".join(map(str, way))

    def add_object(self, way: Way, raw: bytes) -> None:
        raise ValueError(f"{way} is no part of a ZeRO checkpoint")

    # ------------------------------------------------------------- what goes where

    def files(self, entries: Sequence[Entry], views: Views) -> Files:
        """The files, into which these tensors are written as parts of those that were added, by key."""
        groups, cuts = self._groups(), self._cuts()
        sizes: dict[str, int] = {}
        opening: list[tuple[str, int, bytes]] = []
        for process in range(self.processes):
            rank = self.source.ranks[min(process, len(self.source.ranks) - 1)]
            self._lay_out(self._optimizer_name(rank, process), self._optimizer(rank, process, cuts), sizes, opening)
            if process == 0 or self.source.stage == WEIGHTS_STAGE:
                self._lay_out(
                    self._model_name(process), self._model(rank, self._listed(groups, cuts), process), sizes, opening
                )
            self._place(process, cuts)
        places = {name: seen_as(views[name], self._chunks) for name, _, _ in entries}
        copies = [(f"{_COPY}{name}", dtype, shape) for name, dtype, shape in self.copies()]
        places |= {name: seen_as(whole(name, shape), self._chunks) for name, _, shape in copies}
        below = {LATEST: self.below.encode()} if self.below != "." else {}
        check = partial(check_readable, ZeroFolder, self.below, dict(self._weights))
        return Files(sizes, opening, {entry[0]: entry for entry in [*entries, *copies]}, places, check, below)

    def _groups(self) -> list[dict[str, tuple[int, ...]]]:
        """The trained parameters of the larger model: each in the group of the one it comes from."""
        of = {name: number for number, group in enumerate(self.source.groups) for name in group}
        groups = [dict[str, tuple[int, ...]]() for _ in self.source.groups]
        for name in self.order:
            if name in self._weights and (own := of.get(self.origins.get(name, ""))) is not None:
                groups[own][name] = self._weights[name][1]
        lost = self._weights.keys() - {n for g in groups for n in g} - self._frozen().keys() - self._buffers().keys()
        if lost:
            raise Refused(f"{min(lost)!r} is in no group of the run's optimizer", "expand without --with-optimizer")
        return groups

    def _listed(self, groups: Sequence[Shapes], cuts: Cuts) -> Sequence[Shapes]:
        """The shapes as they are listed: by group, in stage 3 by flat vector."""
        if self.source.stage != WEIGHTS_STAGE:
            return groups
        listed = [dict[str, tuple[int, ...]]() for _ in cuts.sizes]
        for name, parts in cuts.parameters.items():
            listed[parts[0].flat][name] = self._weights[name][1]
        return listed

    def _frozen(self) -> dict[str, tuple[int, ...]]:
        known = self.source.frozen
        return {name: shape for name, (_, shape) in self._weights.items() if self.origins.get(name) in known}

    def _buffers(self) -> dict[str, tuple[int, ...]]:
        known = self.source.buffers
        return {name: shape for name, (_, shape) in self._weights.items() if self.origins.get(name) in known}

    def _cuts(self) -> Cuts:
        if self.source.stage == WEIGHTS_STAGE:
            return each_cut(self._groups(), self.processes, self.source.sub_group())
        if any(gap for group in self.source.gaps or () for gap in group):
            raise Refused("the run pads every parameter (parameter_alignment)", "expand without --with-optimizer")
        return one_vector(self._groups(), self.processes)

    def write_copies(self, writer: CheckpointWriter) -> None:
        """Round the weights that were written to the dtype that the model computes with, block by block."""
        copies = list(self.copies())
        if not copies:
            return
        written = ZeroFolder(writer.folder.resolve(), self.below)
        with closing(written):
            infos = written.infos(None)
            for name, dtype, shape in copies:
                start = 0
                for rows in _rows(written, infos[name], shape):
                    writer.write(f"{_COPY}{name}", start, rows.to(torch_dtype(dtype)))
                    start += rows.shape[0] if shape else 1

    def copies(self) -> Iterator[Entry]:
        """The weights that stages 1 and 2 save once more, in the dtype that the model computes with."""
        module = self.source.ranks[0].module["module"]
        for name in (n for g in self._groups() for n in g) if self.source.stage != WEIGHTS_STAGE else ():
            yield name, module[self.origins[name]].dtype, self._weights[name][1]

    # ------------------------------------------------------------- what they hold

    def _optimizer_name(self, rank: Process, process: int) -> str:
        kind = rank.name[: rank.name.index("zero_pp_rank_")]
        return f"{kind}zero_pp_rank_{process}_mp_rank_00_optim_states.pt"

    def _model_name(self, process: int) -> str:
        own = f"zero_pp_rank_{process}_" if self.source.stage == WEIGHTS_STAGE else ""
        return f"{own}mp_rank_00_model_states.pt"

    def _optimizer(self, rank: Process, process: int, cuts: Cuts) -> Tree:
        """The content of a process's optimizer states."""
        flats, base = self.source.keys
        old: Tree = rank.settings
        group_of = cuts.groups
        ids = [
            [flat for flat, owner in enumerate(group_of) if owner == number]
            for number in range(len(self.source.groups))
        ]
        first = {owner: flat for flat, owner in reversed(list(enumerate(self._owners())))}
        state: dict[int, Any] = {}
        for flat, size in enumerate(cuts.sizes):
            like = old[base]["state"][first[group_of[flat]]]
            kept = {key: value for key, value in like.items() if key not in self._fields}
            state[flat] = {**kept, **{key: self._blank(dtype, (size,)) for key, dtype in self._fields.items()}}
            state[flat] = {key: state[flat][key] for key in like}
        new = dict(old)
        lengths = cuts.unpadded[process]
        new[flats] = [self._blank("F32", (length,)) for length in lengths]
        new[base] = {
            **old[base],
            "state": state,
            "param_groups": [{**group, "params": ids[n]} for n, group in enumerate(old[base]["param_groups"])],
        }
        count = old["partition_count"]
        new["partition_count"] = [self.processes] * len(count) if isinstance(count, list) else self.processes
        if "group_paddings" in old:
            new["group_paddings"] = [size - own for size, own in zip(cuts.sizes, lengths, strict=True)]
        if "param_alignment_paddings" in old:
            new["param_alignment_paddings"] = [[0] * len(group) for group in self._groups()]
        if "param_slice_mappings" in old:
            new["param_slice_mappings"] = self._addresses(process, cuts)
        return self._written({**rank.content, SETTINGS: new}, rank.name)

    def _owners(self) -> Sequence[int]:
        """The group of each flat vector of the source."""
        if self.source.stage == WEIGHTS_STAGE:
            return each_cut(self.source.groups, self.source.processes, self.source.sub_group()).groups
        return range(len(self.source.groups))

    def _addresses(self, process: int, cuts: Cuts) -> list[OrderedDict[str, Record]]:
        """Which numbers of its flat vectors belong to which parameter, as DeepSpeed's own converter wants to know."""
        kind = record_class(*FRAGMENT)
        found = [OrderedDict[str, Record]() for _ in cuts.sizes]
        for name, parts in cuts.parameters.items():
            for cut in (part for part in parts if part.process == process):
                found[cut.flat][name] = made = kind.__new__(kind)
                made.state = {"numel": cut.count, "start": cut.at}
        return found

    def _model(self, rank: Process, groups: Sequence[Shapes], process: int) -> Tree:
        """The content of a process's model states."""
        import torch

        old, cut = rank.module, self.source.stage == WEIGHTS_STAGE
        of = {own: placed for own, placed in old["module"].items() if isinstance(placed, Placed)}
        frozen, fragments = self._frozen(), OrderedDict[str, Any]()
        module = OrderedDict[str, Any]()
        for name in self._weights:
            dtype, shape = of[self.origins[name]].dtype, self._weights[name][1]
            if name in self._buffers():
                module[name] = self._blank(self._weights[name][0], shape)
            else:
                module[name] = self._blank(dtype, (0,) if cut else shape)
            if name in frozen:
                piece = (-(-math.prod(shape) // self.processes),)
                fragments[name] = self._blank(self._weights[name][0], piece) if cut else module[name]
        for name, own in self.source.shared.items():
            if own not in module:
                raise Refused(f"{name!r} is shared with {own!r}, which the larger model lacks", "untie it first")
            module[name] = module[own]
        if other := sorted(of.keys() - set(self.origins.values()) - self.source.shared.keys()):
            raise Refused(f"the run holds {other[0]!r}, which is no weight of its model", "save it without")
        sizes = [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in groups]
        new = {**old, "module": module, "param_shapes": sizes, "dp_world_size": self.processes}
        if old.get("frozen_param_shapes") is not None:
            new["frozen_param_shapes"] = OrderedDict((name, torch.Size(shape)) for name, shape in frozen.items())
            new["frozen_param_fragments"] = fragments
        new["buffer_names"] = list(self._buffers())
        return self._written(new, rank.model)

    def _written(self, tree: Tree, name: str) -> Tree:
        """What is read, as what is written: numbers of small tensors, dtypes, and dicts in their order."""
        done: dict[int, Any] = {}

        def copy(value: Any) -> Any:
            if id(value) in done:
                return done[id(value)]
            made: Any = value
            if isinstance(value, dict):
                made = done[id(value)] = OrderedDict() if type(value) is not dict else {}
                made.update((key, copy(item)) for key, item in value.items())
            elif isinstance(value, list):
                made = done[id(value)] = []
                made.extend(copy(item) for item in value)
            elif isinstance(value, Placed):
                made = self._tensor(value, name)
            elif isinstance(value, DType):
                made = torch_dtype(value)
            elif type(value) is tuple:
                made = tuple(copy(item) for item in value)
            elif isinstance(value, Record):
                made = done[id(value)] = type(value).__new__(type(value))
                made.given, made.state = copy(value.given), copy(value.state)
            return made

        try:
            return copy(tree)
        except RecursionError:
            raise BadCheckpoint("is nested too deeply", "save it again", file=self.source.folder / name) from None

    def _blank(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for a tensor; memory that nobody touches is not taken."""
        import torch

        self._blanks.append(torch.empty(shape, dtype=torch_dtype(dtype), device="cpu"))
        return self._blanks[-1]

    def _tensor(self, placed: Placed, name: str) -> torch.Tensor:
        """A tensor that is none of the model's, such as a count, with its numbers."""
        return self.source.read_placed(name, placed)

    # ------------------------------------------------------------- where it lies

    def _lay_out(self, name: str, tree: Tree, sizes: dict[str, int], opening: list[tuple[str, int, bytes]]) -> None:
        made, path = envelope(tree), os.path.normpath(f"{self.below}/{name}")
        sizes[path] = made.length
        opening += [(path, place, raw) for place, raw in made.pieces]
        found = made.tree(records())
        blank = {id(tensor) for tensor in self._blanks}
        opening += [(path, place.begin, raw) for place, raw in _numbers(tree, found, blank)]
        self._found[path] = found
        self._blanks.clear()

    def _place(self, process: int, cuts: Cuts) -> None:
        """The chunks of all tensors in the files of one process."""
        rank = self.source.ranks[min(process, len(self.source.ranks) - 1)]
        path = os.path.normpath(f"{self.below}/{self._optimizer_name(rank, process)}")
        flats, base = self.source.keys
        settings = self._found.pop(path)[SETTINGS]
        for name, parts in cuts.parameters.items():
            for cut in (part for part in parts if part.process == process):
                shape = self._weights[name][1]
                self._add(name, path, shape, cut, settings[flats][cut.flat])
                for key in self._fields:
                    placed = settings[base]["state"][cut.flat][key]
                    self._add(".".join((*STATE_WAY, name, key)), path, shape, cut, placed)
        path = os.path.normpath(f"{self.below}/{self._model_name(process)}")
        if path not in self._found:
            return
        model = self._found.pop(path)
        for name, shape in self._frozen().items():
            piece = -(-math.prod(shape) // self.processes)
            cut, placed = Cut(process, 0, 0, 0, math.prod(shape)), model["module"][name]
            if self.source.stage == WEIGHTS_STAGE:
                cut = Cut(process, 0, 0, process * piece, max(0, min(piece, math.prod(shape) - process * piece)))
                placed = model["frozen_param_fragments"][name]
            self._add(name, path, shape, cut, placed)
        for name, shape in self._buffers().items():
            self._add(name, path, shape, Cut(process, 0, 0, 0, math.prod(shape)), model["module"][name])
        for name, _, shape in self.copies():
            self._add(f"{_COPY}{name}", path, shape, Cut(process, 0, 0, 0, math.prod(shape)), model["module"][name])

    def _add(self, key: str, path: str, shape: tuple[int, ...], cut: Cut, placed: Placed) -> None:
        at, size = placed.begin + cut.at * item_size(placed.dtype), item_size(placed.dtype)
        chunks = self._chunks.setdefault(key, [])
        for begin, sizes in flat_boxes(shape, cut.start, cut.start + cut.count) if cut.count else ():
            chunks.append(Chunk(Path(path), begin, sizes, contiguous(sizes), item=(at, 0), shape=sizes))
            at += math.prod(sizes) * size


def _rows(folder: ZeroFolder, info: InChunks, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """A tensor in groups of rows."""
    import torch

    if not shape:
        yield folder.read(info)
        return
    for start, stop in row_pieces(shape[0], info.nbytes, BLOCK):
        made = torch.empty((stop - start, *shape[1:]), dtype=torch_dtype(info.dtype))
        folder.fill(info, start * (info.nbytes // shape[0]), made.reshape(-1).view(torch.uint8).numpy().data)
        yield made


def _numbers(tree: Any, found: Any, blank: set[int]) -> Iterator[tuple[Placed, bytes]]:
    """The numbers of the tensors that are written at once, and where they go."""
    import torch

    level, seen = [(tree, found)], set[int]()
    while level:
        own, there = level.pop()
        if isinstance(own, torch.Tensor):
            if id(own) not in blank and own.numel():
                yield there, own.reshape(-1).view(torch.uint8).numpy().tobytes()
        elif id(own) in seen:
            continue
        elif isinstance(own, dict):
            seen.add(id(own))
            level += [(value, there[key]) for key, value in own.items()]
        elif isinstance(own, list | tuple):
            seen.add(id(own))
            level += zip(own, there, strict=True)


def check_readable(
    kind: type[ZeroFolder], below: str, stored: Mapping[str, tuple[str, tuple[int, ...]]], folder: Path
) -> None:
    """Our reader finds exactly the weights that were asked for."""
    try:
        written = kind(folder.resolve(), below)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in written.weights.items()}
        written.close()
    except BadCheckpoint as error:
        raise BadOutput(f"cannot be read back ({error})", "check the disk, and start again", file=folder) from None
    if found != stored:
        raise BadOutput("reads back different from what was written", "check the disk, and start again", file=folder)
