"""Checkpoints in safetensors files: a folder of them, or their headers alone.

Tensors are read with preadv, never memory-mapped. If a mapped file shrinks, SIGBUS kills the process; a short read is
an error that can be reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.finding import check_together
from lemonx.checkpoints.folder import INDEX, WEIGHTS, has, stray_weights, weight_map
from lemonx.checkpoints.opening import changed, identity, open_inside, read_inside
from lemonx.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, read_header_from
from lemonx.checkpoints.shards import Shard, as_laid
from lemonx.checkpoints.store import InBytes, TensorStore
from lemonx.checkpoints.values import read_into
from lemonx.errors import BadCheckpoint, raise_first

if TYPE_CHECKING:
    import torch


class NotDownloaded(BadCheckpoint):
    """A weight was asked for, but only the headers of the weights are here."""


class SafetensorsStore(InBytes):
    """The safetensors files of a folder, whose index and headers are validated when it is opened."""

    def __init__(self, folder: Path, config: bytes, file: Path) -> None:
        self._folder, self.descriptors = folder, dict[Path, int]()
        mapping = weight_map(folder) if has(folder, INDEX) else None
        shards = [WEIGHTS] if mapping is None else sorted(set(mapping.values()))
        raise_first(stray_weights(folder, set(shards)))
        try:
            for shard in shards:
                self.descriptors[folder / shard] = open_inside(folder, shard)
            headers = [read_header_from(fd, path) for path, fd in self.descriptors.items()]
            check_together(folder, headers, mapping)
            self.config, self._config_bytes, self._headers = parse_config(config, file), config, headers
            self.tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
            self._states = {path: identity(fd) for path, fd in self.descriptors.items()}
        except BaseException:
            self.close()
            raise

    @property
    def config_bytes(self) -> bytes:
        return self._config_bytes

    @cached_property
    def files(self) -> Sequence[Shard]:
        return [as_laid(file.path.name, file.header, file.tensors) for file in self._headers]

    @property
    def index_bytes(self) -> bytes | None:
        return read_inside(self._folder, INDEX) if has(self._folder, INDEX) else None

    def fill(self, info: TensorInfo, begin: int, buffer: memoryview) -> None:
        read_into(self.descriptors[info.file], info.file, info.begin + begin, buffer)

    def check_unchanged(self) -> None:
        for path, fd in self.descriptors.items():
            if identity(fd) != self._states[path]:
                raise changed(path)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


class HeadersOnly(TensorStore):
    """Tensors of which everything can be asked but a number: enough for a plan."""

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, TensorInfo],
        origin: Path,
        *,
        converted: str | None = None,
        nbytes: int | None = None,
    ) -> None:
        self.config, self.tensors, self.converted = dict(config), tensors, converted  # pyright: ignore
        self._origin, self._nbytes = origin, nbytes

    @property
    def nbytes(self) -> int:
        return super().nbytes if self._nbytes is None else self._nbytes

    def read(self, name: str, rows: range, columns: range, out: torch.Tensor) -> None:
        raise NotDownloaded("is open for its headers only", "download and open it first", file=self._origin)


def headers_only(config: bytes, files: Sequence[SafetensorsFile], origin: Path) -> HeadersOnly:
    """Return the store of validated headers, without the files behind them."""
    check_together(origin, list(files), None)
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    return HeadersOnly(parse_config(config, origin / "config.json"), tensors, origin)
