"""A store in a package of its own: a folder with config.json and the weights in weights.npz, as numpy writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.safetensors_file import TensorInfo, dtype_name
from lemonx.checkpoints.store import Computed


class NpzStore(Computed):
    """The arrays of an .npz file."""

    converted = "numpy's arrays"

    def __init__(self, folder: Path, file: Path) -> None:
        self.config = parse_config((folder / "config.json").read_bytes(), folder / "config.json")
        self._arrays = np.load(file, allow_pickle=False)
        found = {name: torch.from_numpy(self._arrays[name][:0]).dtype for name in self._arrays.files}
        self.tensors = {
            name: TensorInfo(name, dtype_name(dtype), self._arrays[name].shape, file) for name, dtype in found.items()
        }

    def rows(self, name: str, rows: range) -> torch.Tensor:
        return torch.from_numpy(self._arrays[name][rows.start : rows.stop])

    def close(self) -> None:
        self._arrays.close()


def opened(path: Path) -> NpzStore | None:
    """Return the store of a folder with weights.npz; None for any other path."""
    file = path / "weights.npz"
    return NpzStore(path, file) if file.is_file() else None
