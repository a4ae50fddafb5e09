"""Reads a universal checkpoint of DeepSpeed's, as its ds_to_universal.py writes it, from any kind of parallelism.

Every parameter has a folder in `zero`, with its float32 weight, its moments and its count of steps, each whole and in a
file of its own. Without tensor parallelism, stage 3 leaves them flat, and their shapes are in the model's states.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any

from lemonx.checkpoints.archives import Placed
from lemonx.checkpoints.chunks import contiguous
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.runs import Box, Item, Stored
from lemonx.checkpoints.safetensors_file import item_size
from lemonx.checkpoints.zero import ZeroFolder
from lemonx.checkpoints.zero_records import OPTIMIZER_STATE, PARAMETERS
from lemonx.checkpoints.zero_states import COPY, SETTINGS, Process, Tree
from lemonx.errors import BadCheckpoint, Refused
from lemonx.guards.limits import MOST_TENSORS
from lemonx.guards.open_files import allow_files

STATE = f"{PARAMETERS}/{OPTIMIZER_STATE}"
WEIGHT, STEP, PARAM = "fp32", "step", "param"
# What stands beside a tensor in its file, and stays true when that grows.
_KEPT = frozenset({PARAM, "cat_dim", "vocab_tensor"})
_MODEL = re.compile(r"(?:zero_pp_rank_\d{1,6}_)?mp_rank_\d{1,6}(?:_\d{1,6})?_model_states\.pt")
_CONVERT = "convert it again with ds_to_universal.py"


class UniversalFolder(ZeroFolder):
    """An open universal checkpoint.

    `around`: by parameter and field, what stands beside the tensor in its file; None where it stands alone, and flat.
    `counts`: the files of the counts of steps, by parameter. `twice`: tied weights that have a file of their own.
    """

    around: dict[tuple[str, str], Tree | None]
    counts: dict[str, bytes]
    twice: dict[str, str]
    _taken: int

    def _read(self) -> None:
        settings = self._content(STATE)
        self.stage = self._stage({SETTINGS: settings}, STATE)
        names = sorted(name for name in os.listdir(self.folder) if _MODEL.fullmatch(name))
        if not names:
            raise BadCheckpoint("lacks the model's states (mp_rank_00_model_states.pt)", COPY, file=self.folder)
        self.ranks = [Process(STATE, {SETTINGS: settings}, name, self._content(name)) for name in names]
        self._check_settings(settings)
        self._read_model()
        self.around, self.counts, self._taken = {}, {}, 0
        held = self._held()
        weights = {name: self._tensor(name, WEIGHT, shape) for name, shape in held.items()}
        moments = dict[str, Stored]()
        for name in (name for name, _ in self._trained()):
            for field in self._fields(name):
                stored = self._tensor(name, field, weights[name].shape)
                if stored.shape != weights[name].shape:
                    found = f"is of shape {list(stored.shape)}, and its weight of {list(weights[name].shape)}"
                    raise BadCheckpoint(found, _CONVERT, file=self.folder / PARAMETERS / name / f"{field}.pt")
                moments[f"optimizer\nstate\n{name}\n{field}"] = stored
        # Tensor parallelism lists the shapes of what each process held.
        self.groups = [{name: weights[name].shape for name in group} for group in self.groups]
        self.frozen = {name: weights[name].shape for name in self.frozen}
        self._keep(weights, moments)
        self.step = self._count()

    # ------------------------------------------------------------- what is there

    def _held(self) -> dict[str, tuple[int, ...]]:
        """The parameters that have a folder, and the shapes by which the model's states list them."""
        folders = [entry.name for entry in os.scandir(self.folder / PARAMETERS) if entry.is_dir(follow_symlinks=False)]
        if len(folders) > MOST_TENSORS:
            raise BadCheckpoint(f"holds more than {MOST_TENSORS} parameters", _CONVERT, file=self.folder / PARAMETERS)
        allow_files(4 * len(folders))
        found, buffers = set(folders), self.ranks[0].module.get("buffer_names") or []
        self.buffers = {name: Placed(0, "F32", (), ()) for name in buffers if isinstance(name, str) and name in found}
        self.twice = {name: own for name, own in self.shared.items() if name in found}
        if any(rank.module.get("mp_world_size", 1) != 1 for rank in self.ranks):
            # Of tied weights, which nobody trains, the converter keeps what one of the processes held.
            tied = self.frozen.keys() - (self.ranks[0].module.get("frozen_param_shapes") or {}).keys()
            self.frozen = {name: shape for name, shape in self.frozen.items() if name not in tied}
            found -= tied
        listed = dict(self._trained()) | self.frozen
        if lost := sorted(name for name, _ in self._trained() if name not in found):
            raise BadCheckpoint(f"lacks the parameter {lost[0][:200]!r}", COPY, file=self.folder / PARAMETERS)
        if lost := sorted(listed.keys() - found):
            raise Refused(
                f"{lost[0][:200]!r} was frozen, and ds_to_universal.py has left it out",
                "expand the checkpoint that was converted, or add the weight's folder to it",
            )
        if other := sorted(found - listed.keys() - self.buffers.keys() - self.twice.keys()):
            raise Refused(
                f"{other[0][:200]!r} is in no states of the model, so it is that of a pipeline or of experts",
                "expand a checkpoint without these",
            )
        return listed | dict.fromkeys(self.buffers, ())

    def _fields(self, name: str) -> Iterator[str]:
        """What the optimizer keeps of a parameter; its count of steps is read at once."""
        folder = self.folder / PARAMETERS / name
        for file in sorted(os.listdir(folder)):
            field, ending = os.path.splitext(file)
            if ending != ".pt" or not field.isidentifier():
                raise BadCheckpoint("is no file of a universal checkpoint", "remove it", file=folder / file)
            if field == STEP:
                self.counts[name] = self._read_count(name)
            elif field != WEIGHT:
                yield field

    # ------------------------------------------------------------- what it holds

    def _tensor(self, name: str, field: str, shape: tuple[int, ...]) -> Stored:
        """Where a tensor lies. A flat one has the shape that the model's states list."""
        if "/" in name or name in (".", ".."):
            self._bad_model(f"has a parameter with the impossible name {name[:80]!a}")
        file = f"{PARAMETERS}/{name}/{field}.pt"
        tree, path = self._saved(file), self.folder / file
        placed: Any = tree.get(PARAM) if isinstance(tree, dict) else tree
        if not isinstance(placed, Placed):
            raise BadCheckpoint("holds no tensor", _CONVERT, file=path)
        if isinstance(tree, dict):
            if odd := sorted(str(key) for key in tree.keys() - _KEPT):
                raise Refused(
                    f"{name[:200]!r} is put together from several parameters or experts ({odd[0][:80]})",
                    "expand a checkpoint without these",
                )
            shape = placed.shape
        elif math.prod(placed.shape) != math.prod(shape) or len(placed.shape) != 1:
            found = f"holds {list(placed.shape)} numbers of {name[:200]!r}, whose shape is {list(shape)}"
            raise BadCheckpoint(found, _CONVERT, file=path)
        pairs = zip(placed.shape, contiguous(placed.shape), placed.strides, strict=True)
        if any(n > 1 and own != stride for n, own, stride in pairs):
            raise BadCheckpoint("holds a tensor in pieces", _CONVERT, file=path)
        self.around[name, field] = tree if isinstance(tree, dict) else None
        item = Item(file, placed.begin, math.prod(shape) * item_size(placed.dtype))
        return Stored(placed.dtype, shape, (Box((0,) * len(shape), shape, item),))

    def _read_count(self, name: str) -> bytes:
        """The file of a count of steps, as it is."""
        file = f"{PARAMETERS}/{name}/{STEP}.pt"
        saved = self._saved(file)
        number = self.read_placed(file, saved).item() if isinstance(saved, Placed) and not saved.shape else saved
        if not isinstance(number, int | float) or not 0 <= number < 2**53:
            raise BadCheckpoint("holds no count of steps", _CONVERT, file=self.folder / file)
        self._taken = max(self._taken, int(number))
        return read_inside(self.folder, file)

    def _count(self) -> int | None:
        """How many steps were taken."""
        if self.counts:
            return self._taken
        base: Any = self.ranks[0].settings.get(self.keys[1]) or {}
        return self._steps([base.get("state", {})]) if base else None

    def _check_settings(self, settings: Tree) -> None:
        """BadCheckpoint unless the optimizer's groups, and its state where there is any, are what they should be."""
        base = settings.get(self.keys[1]) or {}
        state: Any = base.get("state", {}) if isinstance(base, dict) else None
        groups: Any = settings.get("param_groups")
        tables = [*state.values()] if isinstance(state, dict) else [None]
        tables += groups if isinstance(groups, list) else [None]
        if not all(isinstance(table, dict) for table in tables):
            raise BadCheckpoint("holds no state of an optimizer", _CONVERT, file=self.folder / STATE)
