"""Reads a checkpoint of DeepSpeed's ZeRO, stages 1 to 3: `latest`, and in the folder that it names files per process.

The weights are the float32 ones that the optimizer steps, not the copies in 16 bits that the model computes with. They
and the moments lie in flat vectors (zero_layout.py); names and shapes are in the files of the model's states.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from lemonx.checkpoints.archives import Asked, Placed, Window, contents
from lemonx.checkpoints.chunks import Chunk, contiguous, flat_boxes
from lemonx.checkpoints.envelopes import Record
from lemonx.checkpoints.runs import Box, Item, RunFolder, Saved, Stored
from lemonx.checkpoints.safetensors_file import TensorInfo, item_size, torch_dtype
from lemonx.checkpoints.values import read_into
from lemonx.checkpoints.zero_layout import SUB_GROUP, Cut, Cuts, each_cut, one_vector
from lemonx.checkpoints.zero_records import OPTIMIZER, records
from lemonx.errors import BadCheckpoint, Refused
from lemonx.guards.limits import MOST_TENSORS

if TYPE_CHECKING:
    import torch

WEIGHTS_STAGE = 3
_MOST_PICKLE = 1 << 28
# Where each stage keeps its flat vectors, and what the optimizer that steps them keeps.
FLATS = {WEIGHTS_STAGE: ("fp32_flat_groups", "optimizer_state_dict")}
_FLATS_BELOW = ("single_partition_of_fp32_groups", "base_optimizer_state")
SETTINGS = "optimizer_state_dict"
_AGAIN, _COPY = "save it again", "copy the files of all processes"
_UNIVERSAL = "load it in DeepSpeed without tensor parallelism, and save it again"
Tree = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """What one process saved: the name and the content of its optimizer's file, and of its model's file."""

    name: str
    content: Tree
    model: str
    module: Tree

    @property
    def settings(self) -> Tree:
        return self.content[SETTINGS]


class ZeroFolder(RunFolder):
    """An open ZeRO checkpoint: its `stage`, and the shapes of its parameters: trained (by `groups`), and `frozen`."""

    stage: int
    groups: list[dict[str, tuple[int, ...]]]
    frozen: dict[str, tuple[int, ...]]
    buffers: dict[str, Placed]
    shared: dict[str, str]
    ranks: list[Process]

    def __init__(self, folder: Path, below: str) -> None:
        super().__init__(folder, below)
        self._digest = hashlib.sha256()
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        self.digest = self._digest.hexdigest()

    @property
    def path(self) -> Path:
        return self.folder

    @property
    def processes(self) -> int:
        return len(self.ranks)

    def _base(self, chunk: Chunk, info: TensorInfo) -> int:
        return chunk.item[0]

    # ------------------------------------------------------------- files

    def _read(self) -> None:
        names = self._names()
        first = self._content(names[0])
        self.stage = self._stage(first, names[0])
        self.ranks = []
        for process, name in enumerate(names):
            content = first if process == 0 else self._content(name)
            model = self._model_name(process)
            module = self._content(model) if process == 0 or self.stage == WEIGHTS_STAGE else self.ranks[0].module
            self.ranks.append(Process(name, content, model, module))
        self._check_count(len(names))
        self._read_model()
        cuts = self._cuts()
        weights = {name: self._flat_stored(name, shape, cuts, self._flats(None)) for name, shape in self._trained()}
        weights |= {name: self._frozen(name, shape) for name, shape in self.frozen.items()}
        weights |= {name: self._whole(name, 0, placed) for name, placed in self.buffers.items()}
        self.weights, moments = weights, self._moments(cuts)
        paths = {name: (name,) for name in weights} | {key: tuple(key.split("\n")) for key in moments}
        keys = {key: ".".join(way) for key, way in paths.items()}
        self.saved = Saved(
            {keys[k]: v for k, v in (weights | moments).items()}, {}, {keys[k]: w for k, w in paths.items()}
        )

    def _names(self) -> list[str]:
        found: dict[int, str] = {}
        for name in sorted(os.listdir(self.folder)):
            if match := OPTIMIZER.fullmatch(name):
                if int(match["slice"]):
                    raise Refused("the run is cut by tensor parallelism too, which is not read", _UNIVERSAL)
                found[int(match["process"])] = name
        missing = next((process for process in range(len(found)) if process not in found), None)
        if missing is not None:
            raise BadCheckpoint(f"lacks the optimizer's states of process {missing}", _COPY, file=self.folder)
        return [found[process] for process in range(len(found))]

    def _model_name(self, process: int) -> str:
        own = f"zero_pp_rank_{process}_" if self.stage == WEIGHTS_STAGE else ""
        return f"{own}mp_rank_00_model_states.pt"

    def _content(self, name: str) -> Tree:
        """What a file holds; BadCheckpoint if it is broken, or asks for anything but data."""
        fd, path = self._open_file(name), self.folder / name
        try:
            size = os.fstat(fd).st_size
            self._digest.update(f"{name}\0{size}\n".encode())
            tree = contents(Window(fd, 0, size), records(), _MOST_PICKLE, self._digest.update)
        except Asked as asked:
            raise BadCheckpoint(
                f"asks to run something: {str(asked)[:120]}, so nothing was loaded",
                "get this checkpoint from someone you trust, or save it without states of your own",
                file=path,
            ) from None
        except Exception as error:  # what a broken or hostile archive raises is not known in advance
            why = " ".join(str(error).split())[:120] or type(error).__name__
            raise BadCheckpoint(f"is no readable file of torch.save ({why})", _AGAIN, file=path) from None
        if not isinstance(tree, dict):
            raise BadCheckpoint(f"holds a {type(tree).__name__}, not the states of a run", _AGAIN, file=path)
        return cast("Tree", tree)

    def _stage(self, content: Tree, name: str) -> int:
        settings = content.get(SETTINGS)
        stage = settings.get("zero_stage") if isinstance(settings, dict) else None
        if isinstance(stage, Record) and stage.given:
            stage = stage.given[0]
        if stage not in (1, 2, 3):
            raise BadCheckpoint("does not say which stage of ZeRO it is of", _AGAIN, file=self.folder / name)
        return cast("int", stage)

    def _check_count(self, count: int) -> None:
        for rank in self.ranks:
            said: Any = rank.settings.get("partition_count") if isinstance(rank.settings, dict) else None
            said = max(said, default=None) if isinstance(said, list) and all(type(n) is int for n in said) else said
            if said != count:
                found = f"was written by {said} processes, and the states of {count} are here"
                raise BadCheckpoint(found, _COPY, file=self.folder / rank.name)
            if rank.settings.get("ds_zero_partition_groups") or rank.module.get("mp_world_size", 1) != 1:
                raise Refused("the run is cut by tensor or expert parallelism too, which is not read", _UNIVERSAL)

    def _read_model(self) -> None:
        first = self.ranks[0].module
        groups = first.get("param_shapes")
        if isinstance(groups, dict):
            groups = [groups]
        if not isinstance(groups, list) or not groups:
            self._bad_model("holds no shapes of parameters")
        self.groups = self._whole_groups([self._shapes(group) for group in groups])
        self.frozen = self._shapes(first.get("frozen_param_shapes") or {})
        names = [*(name for group in self.groups for name in group), *self.frozen]
        if len(set(names)) < len(names) or len(names) > MOST_TENSORS or not names:
            self._bad_model("lists a parameter twice, or none, or too many")
        module, buffers = first.get("module"), first.get("buffer_names") or []
        if not isinstance(module, dict) or not isinstance(buffers, list):
            self._bad_model("holds no module")
        self.buffers = {n: module[n] for n in buffers if isinstance(n, str) and isinstance(module.get(n), Placed)}
        shared = first.get("shared_params") or {}
        if not isinstance(shared, dict) or not all(isinstance(n, str) for pair in shared.items() for n in pair):
            self._bad_model("does not say which parameters are shared")
        self.shared = cast("dict[str, str]", shared)
        if self.stage != WEIGHTS_STAGE:  # some versions list only what is trained, and the rest is in the module alone
            known = {*names, *self.buffers, *self.shared}
            self.frozen |= {
                n: placed.shape for n, placed in module.items() if n not in known and isinstance(placed, Placed)
            }

    def _whole_groups(self, listed: list[dict[str, tuple[int, ...]]]) -> list[dict[str, tuple[int, ...]]]:
        """Stage 3 lists shapes by flat vector, and only the optimizer's settings say which make up a group."""
        base: Any = self.ranks[0].settings.get(self.keys[1])
        groups: Any = base.get("param_groups") if isinstance(base, dict) else None
        if self.stage != WEIGHTS_STAGE or not isinstance(groups, list):
            return listed
        flats = [group.get("params") if isinstance(group, dict) else None for group in groups]
        numbers = [number for own in flats if isinstance(own, list) for number in own]
        if numbers != list(range(len(listed))):
            name = self.ranks[0].name
            raise BadCheckpoint("has groups of other flat vectors than it lists", _AGAIN, file=self.folder / name)
        return [{n: shape for number in own for n, shape in listed[number].items()} for own in flats if own is not None]

    def _bad_model(self, found: str) -> NoReturn:
        raise BadCheckpoint(found, _AGAIN, file=self.folder / self.ranks[0].model)

    def _shapes(self, group: Any) -> dict[str, tuple[int, ...]]:
        if not isinstance(group, dict):
            self._bad_model("holds no shapes of parameters")
        for name, shape in group.items():
            if not isinstance(name, str) or not name or not name.isprintable():
                self._bad_model(f"has a parameter with the impossible name {str(name)[:80]!a}")
            if not isinstance(shape, tuple | list) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
                self._bad_model(f"gives {name[:200]!r} no shape")
        return {name: tuple(shape) for name, shape in group.items()}

    def _trained(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return (item for group in self.groups for item in group.items())

    # ------------------------------------------------------------- flat vectors

    @property
    def keys(self) -> tuple[str, str]:
        """Under which keys the flat vectors, and the state of the optimizer that steps them, are saved."""
        return FLATS.get(self.stage, _FLATS_BELOW)

    @property
    def gaps(self) -> list[list[int]] | None:
        """Numbers that are left out behind each parameter of each group, if any are."""
        gaps: Any = self.ranks[0].settings.get("param_alignment_paddings")
        counts = [len(g) if isinstance(g, list) else -1 for g in gaps] if isinstance(gaps, list) else None
        if counts is None:
            return None
        plain = all(type(n) is int and 0 <= n < 2**40 for group in gaps for n in group) if -1 not in counts else False
        if not plain or counts != [len(group) for group in self.groups]:
            raise BadCheckpoint("pads other parameters than it has", _AGAIN, file=self.folder / self.ranks[0].name)
        return gaps

    def sub_group(self) -> int:
        """Of how many numbers a flat vector of stage 3 may be."""
        config: Any = self.ranks[0].module.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        size: Any = zero.get("sub_group_size") if isinstance(zero, dict) else None
        return int(size) if isinstance(size, int | float) and 1 <= size < 2**60 else SUB_GROUP

    def _cuts(self) -> Cuts:
        """Where the parameters lie in the flat vectors, whose lengths are checked against it."""
        flats = self._flats(None)
        if self.stage == WEIGHTS_STAGE:
            cuts = each_cut(self.groups, self.processes, self.sub_group())
            lengths = [[flat.shape[0] for flat in own] for own in flats]
            if any(own != list(cuts.sizes) for own in lengths):
                bad = next(process for process, own in enumerate(lengths) if own != list(cuts.sizes))
                found = f"has flat vectors of {lengths[bad][:4]} numbers; its parameters need {list(cuts.sizes)[:4]}"
                raise BadCheckpoint(found, _AGAIN, file=self.folder / self.ranks[bad].name)
            return cuts
        if any(len(own) != len(self.groups) for own in flats):
            self._bad_model(
                f"lists {len(self.groups)} groups of parameters, and there are {len(flats[0])} flat vectors"
            )
        sizes = [flats[0][flat].shape[0] + self._padding(0, flat) for flat in range(len(self.groups))]
        cuts = one_vector(self.groups, self.processes, sizes, self.gaps)
        for name, shape in self._trained():
            inside = (cut.at + cut.count <= flats[cut.process][cut.flat].shape[0] for cut in _held(cuts, name, flats))
            if sum(cut.count for cut in _held(cuts, name, flats)) != math.prod(shape) or not all(inside):
                raise BadCheckpoint(f"has flat vectors that end before {name[:200]!r} does", _COPY, file=self.folder)
        return cuts

    def _padding(self, process: int, flat: int) -> int:
        paddings = self.ranks[process].settings.get("group_paddings")
        own = paddings[flat] if isinstance(paddings, list) and len(paddings) > flat else 0
        return own if type(own) is int and 0 <= own < 2**40 else 0

    def _flats(self, field: str | None) -> list[list[Placed]]:
        """The flat vectors of each process: of weights, or of one kind of moments."""
        found = list[list[Placed]]()
        for rank in self.ranks:
            vectors: Any = rank.settings.get(self.keys[0])
            if field is not None:
                state = self._state(rank)
                vectors = [state[flat].get(field) for flat in sorted(state)]
            plain = isinstance(vectors, list) and all(
                isinstance(flat, Placed) and len(flat.shape) == 1 and flat.strides in ((1,), (0,)) for flat in vectors
            )
            if not plain:
                what = "weights" if field is None else field[:80]
                raise BadCheckpoint(f"holds no flat vectors of {what}", _AGAIN, file=self.folder / rank.name)
            found.append(vectors)
        return found

    def _state(self, rank: Process) -> dict[int, dict[str, Any]]:
        base: Any = rank.settings.get(self.keys[1])
        if isinstance(base, list):
            raise Refused(
                "the run was saved with elastic_checkpoint, which keeps moments in another form",
                "expand without --with-optimizer, or save it without that option",
            )
        state: Any = base.get("state") if isinstance(base, dict) else None
        odd = not isinstance(state, dict) or not all(
            type(flat) is int and isinstance(entry, dict) and all(isinstance(key, str) for key in entry)
            for flat, entry in state.items()
        )
        if odd:
            raise BadCheckpoint("holds no state of an optimizer", _AGAIN, file=self.folder / rank.name)
        return state

    # ------------------------------------------------------------- tensors

    def _flat_stored(self, name: str, shape: tuple[int, ...], cuts: Cuts, flats: Sequence[Sequence[Placed]]) -> Stored:
        boxes, dtype = list[Box](), "F32"
        for cut in cuts.parameters[name]:
            flat = flats[cut.process][cut.flat]
            dtype = flat.dtype
            boxes += self._boxes(self.ranks[cut.process].name, shape, cut, flat)
        return Stored(dtype, shape, tuple(boxes))

    def _boxes(self, file: str, shape: tuple[int, ...], cut: Cut, flat: Placed) -> Iterator[Box]:
        size, at = item_size(flat.dtype), cut.at
        for begin, sizes in flat_boxes(shape, cut.start, cut.start + cut.count):
            count = math.prod(sizes)
            yield Box(begin, sizes, Item(file, flat.begin + at * size, count * size))
            at += count

    def _whole(self, name: str, process: int, placed: Placed) -> Stored:
        apart = any(
            n > 1 and a != b for n, a, b in zip(placed.shape, contiguous(placed.shape), placed.strides, strict=True)
        )
        if apart:
            self._bad_model(f"holds {name[:200]!r} in pieces")
        item = Item(self.ranks[process].model, placed.begin, math.prod(placed.shape) * item_size(placed.dtype))
        return Stored(placed.dtype, placed.shape, (Box((0,) * len(placed.shape), placed.shape, item),))

    def _frozen(self, name: str, shape: tuple[int, ...]) -> Stored:
        """A parameter that is not trained: in stage 3 each process has its piece, else the first has all of it."""
        boxes, dtype = list[Box](), ""
        piece = -(-math.prod(shape) // self.processes)
        for process, rank in enumerate(self.ranks):
            fragments: Any = rank.module.get("frozen_param_fragments")
            placed = fragments.get(name) if isinstance(fragments, dict) else None
            if placed is None and self.stage != WEIGHTS_STAGE:
                placed = rank.module["module"].get(name)
            if not isinstance(placed, Placed):
                raise BadCheckpoint(f"lacks the frozen {name[:200]!r}", _COPY, file=self.folder / rank.model)
            if self.stage != WEIGHTS_STAGE:
                if placed.shape != shape:
                    self._bad_model(f"holds the frozen {name[:200]!r} in another shape")
                return self._whole(name, process, placed)
            count = min(piece, math.prod(shape) - process * piece)
            if placed.shape != (piece,):
                found = f"holds {list(placed.shape)} numbers of the frozen {name[:200]!r}, of which it has {piece}"
                raise BadCheckpoint(found, _AGAIN, file=self.folder / rank.model)
            dtype = placed.dtype
            if count > 0:
                boxes += self._boxes(rank.model, shape, Cut(process, 0, 0, process * piece, count), placed)
        return Stored(dtype, shape, tuple(boxes))

    def _moments(self, cuts: Cuts) -> dict[str, Stored]:
        """The state of every trained parameter: whatever is as long as the flat vectors."""
        try:
            states = [self._state(rank) for rank in self.ranks]
        except Refused:
            return {}
        if any(sorted(state) != list(range(len(cuts.sizes))) for state in states):
            return {}  # nothing was stepped yet
        fields = [field for field, value in states[0][0].items() if isinstance(value, Placed) and value.shape]
        moments: dict[str, Stored] = {}
        for field in fields:
            flats = self._flats(field)
            short = [
                p
                for p, own in enumerate(flats)
                for flat, size in zip(own, cuts.sizes, strict=True)
                if flat.shape[0] < size
            ]
            if short:
                name = self.ranks[short[0]].name
                raise BadCheckpoint(
                    f"has {field[:80]} of another length than its weights", _AGAIN, file=self.folder / name
                )
            for name, shape in self._trained():
                moments[f"optimizer\nstate\n{name}\n{field}"] = self._flat_stored(name, shape, cuts, flats)
        self.step = self._steps(states)
        return moments

    def _steps(self, states: Sequence[Mapping[int, Mapping[str, Any]]]) -> int | None:
        """How many steps were taken: a number in the state, or in the settings of its group."""
        base = self.ranks[0].settings[self.keys[1]]
        said = [entry.get("step") for entry in states[0].values()]
        groups: Any = base.get("param_groups")
        said += [group.get("step") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
        counts = [self._number(value) if isinstance(value, Placed) else value for value in said]
        known = [int(count) for count in counts if isinstance(count, int | float) and 0 <= count < 2**53]
        return max(known, default=None)

    def read_placed(self, name: str, placed: Placed) -> torch.Tensor:
        """A tensor of one of the files."""
        import torch

        dtype, shape = torch_dtype(placed.dtype), placed.shape
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        last = sum((n - 1) * stride for n, stride in zip(shape, placed.strides, strict=True))
        raw = bytearray((last + 1) * dtype.itemsize)
        read_into(self._descriptors[self.folder / name], self.folder / name, placed.begin, memoryview(raw))
        return torch.frombuffer(raw, dtype=dtype).as_strided(shape, placed.strides).clone()

    def _number(self, placed: Placed) -> float | None:
        return self.read_placed(self.ranks[0].name, placed).item() if math.prod(placed.shape) == 1 else None


def _held(cuts: Cuts, name: str, flats: Sequence[Sequence[Placed]]) -> list[Cut]:
    return [cut for cut in cuts.parameters[name] if cut.process < len(flats)]
