"""Optimizer state by parameter name: a folder of safetensors that torch.distributed.checkpoint reads and writes.

Keys are those of `get_optimizer_state_dict` with flattened state: `state.<parameter>.exp_avg` and so on. Shards may
be whole tensors or each process's slices (HuggingFaceStorageWriter with save_distributed). The usual form of
torch.distributed.checkpoint keeps its metadata as a pickle, which is never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from lemonx.checkpoints import CheckpointWriter
from lemonx.checkpoints.folder import parse_object
from lemonx.checkpoints.opening import file_inside, real_file
from lemonx.checkpoints.replaceable import OPTIMIZER_FOLDER
from lemonx.checkpoints.safetensors_file import TensorInfo, read_header_from, torch_dtype
from lemonx.checkpoints.values import read_into
from lemonx.errors import BadCheckpoint
from lemonx.optimizer_state.grow import Grown, StateGrowth
from lemonx.optimizer_state.layouts import COUNT, layout_of
from lemonx.planning.plan import Plan

FOLDER, STATE = OPTIMIZER_FOLDER, "state."
# Where torch.distributed.checkpoint writes down, in a file's header, which slices it holds.
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def grow_named_folder(plan: Plan, source: Path, into: Path, *, max_shard_size: int) -> Grown:
    """Grow the state in `source/optimizer` into `into/optimizer`, parameter by parameter."""
    with _Stored(source) as stored:
        return _grow(plan, stored, into, max_shard_size)


def _grow(plan: Plan, stored: _Stored, into: Path, max_shard_size: int) -> Grown:
    growth = StateGrowth(plan)
    stored.check_known(set(growth.source.names))
    targets = {name: growth.origin(name) for name in growth.target.names}
    origins = {name: own for name, own in targets.items() if own in stored.fields}
    layouts = {own: layout_of(stored.fields[own].keys(), own) for own in origins.values()}
    entries = [
        (f"{STATE}{name}.{field}", dtype, shapes.get(field, stored.shape(own, field)))
        for name, own in origins.items()
        for shapes in [layouts[own].shapes(stored.fields[own], growth.target.shapes[name])]
        for field, dtype in stored.fields[own].items()
    ]
    if not entries:
        raise BadCheckpoint("holds no state of any parameter", "save the run again", file=stored.path)
    step = None
    with CheckpointWriter(into / FOLDER, entries, max_shard_size=max_shard_size) as writer:
        for name in origins:
            needed = growth.needed(name) & stored.fields.keys()
            grown = growth.grow(name, {own: stored.read(own) for own in needed}) or {}
            for field, value in grown.items():
                writer.write(f"{STATE}{name}.{field}", 0, value)
            step = max(step or 0, int(grown[COUNT])) if COUNT in grown else step
    return Grown(step, growth.kept(stored.fields))


@dataclass(frozen=True)
class _Part:
    """A slice of a tensor in an open file, and where in the tensor it begins."""

    fd: int
    info: TensorInfo
    begin: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(b, b + n) for b, n in zip(self.begin, self.info.shape, strict=True))

    def meets(self, other: _Part) -> bool:
        """Whether a number of the tensor is in both."""
        axes = zip(self.place, other.place, strict=True)
        return bool(self.info.numel) and all(a.start < b.stop and b.start < a.stop for a, b in axes)


class _Stored:
    """The tensors in a folder, read one parameter at a time, each file opened once."""

    def __init__(self, source: Path) -> None:
        self.path, self._files = source / FOLDER, list[BinaryIO]()
        self._parts: dict[str, list[_Part]] = {}
        try:
            for path in sorted(_safetensors(source)):
                self._add(file_inside(source, f"{FOLDER}/{path.name}"), path)
            self.fields: dict[str, dict[str, str]] = {}
            for key, parts in self._parts.items():
                self._check_whole(key, parts)
                parameter, _, field = key.removeprefix(STATE).rpartition(".")
                self.fields.setdefault(parameter, {})[field] = parts[0].info.dtype
        except BaseException:
            self.close()
            raise

    def _add(self, file: BinaryIO, path: Path) -> None:
        self._files.append(file)
        header = read_header_from(file.fileno(), path)
        sharding = header.metadata.get(_SHARDING)
        offsets = None if sharding is None else parse_object(sharding.encode(), path)
        for info in header.tensors:
            if not info.name.startswith(STATE) or not info.name.removeprefix(STATE).rpartition(".")[0]:
                raise BadCheckpoint(
                    f"holds {info.name[:200]!r}, which is not a key such as {STATE}<parameter>.exp_avg",
                    "save the optimizer's state alone",
                    file=self.path,
                )
            begin = _begin(info, offsets, path)
            self._parts.setdefault(info.name, []).append(_Part(file.fileno(), info, begin))

    def _check_whole(self, key: str, parts: list[_Part]) -> None:
        """Slices that do not meet, and have as many numbers as the tensor, make up all of it."""
        alike = len({(part.info.dtype, len(part.begin)) for part in parts}) == 1
        whole = alike and sum(part.info.numel for part in parts) == math.prod(_shape(parts))
        if not whole or any(a.meets(b) for a, b in combinations(parts, 2)):
            raise BadCheckpoint(f"lacks a part of {key!r}", "copy the shards of all processes", file=self.path)

    def shape(self, parameter: str, field: str) -> tuple[int, ...]:
        return _shape(self._parts[f"{STATE}{parameter}.{field}"])

    def check_known(self, names: set[str]) -> None:
        if unknown := sorted(self.fields.keys() - names):
            raise BadCheckpoint(
                f"has state for {unknown[0]!r}, which is not a parameter of this model",
                "give the state of the same training run",
                file=self.path,
            )

    def read(self, parameter: str) -> dict[str, torch.Tensor]:
        """The whole state of a parameter."""
        return {field: _joined(self._parts[f"{STATE}{parameter}.{field}"]) for field in self.fields[parameter]}

    def __enter__(self) -> _Stored:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            self._files.pop().close()


def _begin(info: TensorInfo, offsets: Mapping[str, Any] | None, path: Path) -> tuple[int, ...]:
    """Where a slice begins in its tensor, as torch.distributed.checkpoint records it."""
    if offsets is None:
        return (0,) * len(info.shape)
    entry = offsets.get(info.name)
    begin = entry.get(_OFFSETS) if isinstance(entry, dict) else None
    if (
        not isinstance(begin, list)
        or len(begin) != len(info.shape)
        or not all(type(number) is int and 0 <= number < 2**63 for number in begin)
    ):
        raise BadCheckpoint(f"does not say where its slice of {info.name!r} begins", "save it again", file=path)
    return tuple(begin)


def _shape(parts: list[_Part]) -> tuple[int, ...]:
    """The shape of the tensor that these are slices of."""
    return tuple(max(axis.stop for axis in axes) for axes in zip(*(part.place for part in parts), strict=True))


def _joined(parts: list[_Part]) -> torch.Tensor:
    """The tensor, joined from its slices."""
    whole = torch.empty(_shape(parts), dtype=torch_dtype(parts[0].info.dtype))
    for part in parts:
        piece = torch.empty(part.info.shape, dtype=whole.dtype)
        read_into(part.fd, part.info.file, part.info.begin, piece.reshape(-1).view(torch.uint8).numpy().data)
        whole[part.place] = piece
    return whole


def has_named_state(source: Path) -> bool:
    """Whether there is such a folder; BadCheckpoint if a file in it is a pipe, or a link that leads out."""
    return bool([real_file(source.resolve(), f"{FOLDER}/{path.name}") for path in _safetensors(source.resolve())])


def _safetensors(source: Path) -> Iterator[Path]:
    return (source / FOLDER).glob("*.safetensors")
