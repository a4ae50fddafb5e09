"""Reads a checkpoint of DeepSpeed's ZeRO, stages 1 to 3: `latest`, and in the folder that it names files per process.

The weights are the float32 ones that the optimizer steps, not the copies in 16 bits that the model computes with. They
and the moments lie in flat vectors (zero_layout.py); names and shapes are in the files of the model's states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints.archives import Placed
from lemonx.checkpoints.chunks import Chunk, contiguous, flat_boxes
from lemonx.checkpoints.runs import Box, Item, Saved, Stored
from lemonx.checkpoints.safetensors_file import TensorInfo, item_size, torch_dtype
from lemonx.checkpoints.values import read_into
from lemonx.checkpoints.zero_layout import Cut, Cuts
from lemonx.checkpoints.zero_states import AGAIN, COPY, WEIGHTS_STAGE, ZeroStates
from lemonx.errors import BadCheckpoint, Refused

if TYPE_CHECKING:
    import torch


class ZeroFolder(ZeroStates):
    """An open ZeRO checkpoint: where the numbers of each of its tensors lie."""

    def _base(self, chunk: Chunk, info: TensorInfo) -> int:
        return chunk.item[0]

    def _read(self) -> None:
        super()._read()
        cuts = self._cuts()
        weights = {name: self._flat_stored(name, shape, cuts, self._flats(None)) for name, shape in self._trained()}
        weights |= {name: self._frozen(name, shape) for name, shape in self.frozen.items()}
        weights |= {name: self._whole(name, 0, placed) for name, placed in self.buffers.items()}
        self._keep(weights, self._moments(cuts))

    def _keep(self, weights: dict[str, Stored], moments: dict[str, Stored]) -> None:
        """Name all that was found; the keys of moments are ways, with a line for each part."""
        self.weights = weights
        paths = {name: (name,) for name in weights} | {key: tuple(key.split("\n")) for key in moments}
        keys = {key: ".".join(way) for key, way in paths.items()}
        self.saved = Saved(
            {keys[k]: v for k, v in (weights | moments).items()}, {}, {keys[k]: w for k, w in paths.items()}
        )

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
                raise BadCheckpoint(f"lacks the frozen {name[:200]!r}", COPY, file=self.folder / rank.model)
            if self.stage != WEIGHTS_STAGE:
                if placed.shape != shape:
                    self._bad_model(f"holds the frozen {name[:200]!r} in another shape")
                return self._whole(name, process, placed)
            count = min(piece, math.prod(shape) - process * piece)
            if placed.shape != (piece,):
                found = f"holds {list(placed.shape)} numbers of the frozen {name[:200]!r}, of which it has {piece}"
                raise BadCheckpoint(found, AGAIN, file=self.folder / rank.model)
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
                    f"has {field[:80]} of another length than its weights", AGAIN, file=self.folder / name
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
