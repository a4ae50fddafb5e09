"""What each process of a ZeRO run saved, read and checked: the names and shapes of parameters, and flat vectors."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from lemonx.checkpoints.archives import Asked, Placed, Window, contents
from lemonx.checkpoints.envelopes import Record
from lemonx.checkpoints.runs import RunFolder
from lemonx.checkpoints.zero_layout import SUB_GROUP, Cut, Cuts, each_cut, one_vector
from lemonx.checkpoints.zero_records import OPTIMIZER, records
from lemonx.errors import BadCheckpoint, Refused
from lemonx.guards.limits import MOST_TENSORS

WEIGHTS_STAGE = 3
_MOST_PICKLE = 1 << 28
# Where each stage keeps its flat vectors, and what the optimizer that steps them keeps.
FLATS = {WEIGHTS_STAGE: ("fp32_flat_groups", "optimizer_state_dict")}
_FLATS_BELOW = ("single_partition_of_fp32_groups", "base_optimizer_state")
SETTINGS = "optimizer_state_dict"
AGAIN, COPY = "save it again", "copy the files of all processes"
_UNIVERSAL = "convert it with DeepSpeed's ds_to_universal.py, and give the folder that this writes"
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


class ZeroStates(RunFolder):
    """The states in an open ZeRO checkpoint: its `stage`, and the shapes of parameters: by `groups`, and `frozen`."""

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

    def _names(self) -> list[str]:
        found: dict[int, str] = {}
        for name in sorted(os.listdir(self.folder)):
            if match := OPTIMIZER.fullmatch(name):
                if int(match["slice"]):
                    raise Refused("the run is cut by tensor parallelism too, which is not read", _UNIVERSAL)
                found[int(match["process"])] = name
        missing = next((process for process in range(len(found)) if process not in found), None)
        if missing is not None:
            raise BadCheckpoint(f"lacks the optimizer's states of process {missing}", COPY, file=self.folder)
        return [found[process] for process in range(len(found))]

    def _model_name(self, process: int) -> str:
        own = f"zero_pp_rank_{process}_" if self.stage == WEIGHTS_STAGE else ""
        return f"{own}mp_rank_00_model_states.pt"

    def _content(self, name: str) -> Tree:
        """The states that a file holds; BadCheckpoint if it is broken, or asks for anything but data."""
        if not isinstance(tree := self._saved(name), dict):
            found = f"holds a {type(tree).__name__}, not the states of a run"
            raise BadCheckpoint(found, AGAIN, file=self.folder / name)
        return cast("Tree", tree)

    def _saved(self, name: str) -> Any:
        """Whatever a file holds."""
        fd, path = self._open_file(name), self.folder / name
        try:
            size = os.fstat(fd).st_size
            self._digest.update(f"{name}\0{size}\n".encode())
            return contents(Window(fd, 0, size), records(), _MOST_PICKLE, self._digest.update)
        except Asked as asked:
            raise BadCheckpoint(
                f"asks to run something: {str(asked)[:120]}, so nothing was loaded",
                "get this checkpoint from someone you trust, or save it without states of your own",
                file=path,
            ) from None
        except Exception as error:  # what a broken or hostile archive raises is not known in advance
            why = " ".join(str(error).split())[:120] or type(error).__name__
            raise BadCheckpoint(f"is no readable file of torch.save ({why})", AGAIN, file=path) from None

    def _stage(self, content: Tree, name: str) -> int:
        settings = content.get(SETTINGS)
        stage = settings.get("zero_stage") if isinstance(settings, dict) else None
        if isinstance(stage, Record) and stage.given:
            stage = stage.given[0]
        if stage not in (1, 2, 3):
            raise BadCheckpoint("does not say which stage of ZeRO it is of", AGAIN, file=self.folder / name)
        return cast("int", stage)

    def _check_count(self, count: int) -> None:
        for rank in self.ranks:
            said: Any = rank.settings.get("partition_count") if isinstance(rank.settings, dict) else None
            said = max(said, default=None) if isinstance(said, list) and all(type(n) is int for n in said) else said
            if said != count:
                found = f"was written by {said} processes, and the states of {count} are here"
                raise BadCheckpoint(found, COPY, file=self.folder / rank.name)
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
            raise BadCheckpoint("has groups of other flat vectors than it lists", AGAIN, file=self.folder / name)
        return [{n: shape for number in own for n, shape in listed[number].items()} for own in flats if own is not None]

    def _bad_model(self, found: str) -> NoReturn:
        raise BadCheckpoint(found, AGAIN, file=self.folder / self.ranks[0].model)

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
            raise BadCheckpoint("pads other parameters than it has", AGAIN, file=self.folder / self.ranks[0].name)
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
                raise BadCheckpoint(found, AGAIN, file=self.folder / self.ranks[bad].name)
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
                raise BadCheckpoint(f"has flat vectors that end before {name[:200]!r} does", COPY, file=self.folder)
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
                raise BadCheckpoint(f"holds no flat vectors of {what}", AGAIN, file=self.folder / rank.name)
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
            raise BadCheckpoint("holds no state of an optimizer", AGAIN, file=self.folder / rank.name)
        return state


def _held(cuts: Cuts, name: str, flats: Sequence[Sequence[Placed]]) -> list[Cut]:
    return [cut for cut in cuts.parameters[name] if cut.process < len(flats)]
