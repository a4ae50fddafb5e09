"""The optimizer state by name: a folder of safetensors that torch.distributed.checkpoint reads and writes.

Keys are those of `get_optimizer_state_dict` with flattened state: `state.<parameter>.exp_avg` and so on. Shards may
be whole tensors or each process's slices (HuggingFaceStorageWriter with save_distributed). The usual form of
torch.distributed.checkpoint keeps its metadata as a pickle, which is never read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints import CheckpointWriter
from lemonx.checkpoints.safetensors_file import dtype_name
from lemonx.errors import BadCheckpoint
from lemonx.optimizer_state.grow import grow_entry
from lemonx.optimizer_state.moments import moments
from lemonx.planning import Plan
from lemonx.verification.building import disk_names, skeleton

if TYPE_CHECKING:
    import torch

FOLDER, STATE = "optimizer", "state."


def grow_named_folder(plan: Plan, source: Path, into: Path, *, max_shard_size: int) -> int | None:
    """Write the grown state of `source/optimizer` to `into/optimizer`, parameter by parameter; returns its step."""
    stored = _Stored(source / FOLDER)
    small, large = disk_names(skeleton(plan.source_config)), disk_names(skeleton(plan.target_config))
    stored.check_known(set(small))
    modules = {disk: name for name, disk in small.items()}
    readings = moments(plan)
    targets = {name: readings[disk] for name, disk in large.items() if disk in readings}
    targets = {name: reading for name, reading in targets.items() if modules[reading.source] in stored.fields}
    entries = [
        (f"{STATE}{name}.{field}", dtype, reading.shape if stored.shape(modules[reading.source], field) else ())
        for name, reading in targets.items()
        for field, dtype in stored.fields[modules[reading.source]].items()
    ]
    if not entries:
        raise BadCheckpoint(f"{str(source / FOLDER)!r} holds no state of any parameter: save the run again")
    step = None
    with CheckpointWriter(into / FOLDER, entries, max_shard_size=max_shard_size) as writer:
        for name, reading in targets.items():
            needed = {disk for disk in (reading.source, reading.appended) if disk and modules[disk] in stored.fields}
            grown = grow_entry(reading, {disk: stored.read(modules[disk]) for disk in needed})
            for field, value in (grown or {}).items():
                writer.write(f"{STATE}{name}.{field}", 0, value)
            step = max(step or 0, int(grown["step"])) if grown else step
    return step


class _Stored:
    """The tensors in a folder, read one parameter at a time."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        self._path = path
        try:
            metadata: Any = HuggingFaceStorageReader(str(path)).read_metadata()
        except Exception as error:  # safetensors and json raise their own
            raise self._broken(error) from None
        self._tensors: Mapping[str, Any] = metadata.state_dict_metadata
        self.fields: dict[str, dict[str, str]] = {}
        for key, info in self._tensors.items():
            parameter, _, field = key.removeprefix(STATE).rpartition(".")
            if not key.startswith(STATE) or not parameter:
                raise BadCheckpoint(
                    f"{str(path)!r} holds {key!r}: want keys such as {STATE}<parameter>.exp_avg and nothing else"
                )
            if sum(math.prod(chunk.sizes) for chunk in info.chunks) != math.prod(info.size):
                raise BadCheckpoint(f"{str(path)!r} lacks a part of {key!r}: copy the shards of all processes")
            self.fields.setdefault(parameter, {})[field] = dtype_name(info.properties.dtype)

    def shape(self, parameter: str, field: str) -> tuple[int, ...]:
        return tuple(self._tensors[f"{STATE}{parameter}.{field}"].size)

    def check_known(self, names: set[str]) -> None:
        if unknown := sorted(self.fields.keys() - names):
            raise BadCheckpoint(
                f"{str(self._path)!r} has state for {unknown[0]!r}, which is no parameter of this model: "
                "give the state of the same training run"
            )

    def read(self, parameter: str) -> dict[str, torch.Tensor]:
        """All that is kept for a parameter."""
        import torch
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        infos = {field: self._tensors[f"{STATE}{parameter}.{field}"] for field in self.fields[parameter]}
        empty = {
            f"{STATE}{parameter}.{field}": torch.empty(info.size, dtype=info.properties.dtype)
            for field, info in infos.items()
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # it tells that this is one process, as asked for
                load(empty, storage_reader=HuggingFaceStorageReader(str(self._path)), no_dist=True)
        except Exception as error:  # as above
            raise self._broken(error) from None
        return {key.rpartition(".")[2]: tensor for key, tensor in empty.items()}

    def _broken(self, error: Exception) -> BadCheckpoint:
        return BadCheckpoint(
            f"{str(self._path)!r} cannot be read ({' '.join(str(error).split())[:160]}): save it again"
        )


def has_named_state(source: Path) -> bool:
    return any(_safetensors(source))


def _safetensors(source: Path) -> Iterator[Path]:
    return (source / FOLDER).glob("*.safetensors")
