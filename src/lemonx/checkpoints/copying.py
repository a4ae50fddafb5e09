"""Gives loaders that take only safetensors what a checkpoint holds: links to its files, or a copy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from lemonx.checkpoints.creating import write_new
from lemonx.checkpoints.folder import CONFIG, INDEX, WEIGHTS
from lemonx.checkpoints.safetensors_file import TensorInfo
from lemonx.checkpoints.shards import index_text, lay_out
from lemonx.checkpoints.store import PIECE, TensorStore, read_rows, row_pieces
from lemonx.checkpoints.writer import CheckpointWriter

_SHARD = 5 * 10**9


def copy_weights(output: Path, store: TensorStore) -> Path:
    """Write the folder `output`, a temporary one, with all tensors of a store, and return it."""
    entries = [(info.name, info.dtype, info.shape) for info in store.tensors.values()]
    with CheckpointWriter(output, entries, max_shard_size=_SHARD, kept=False) as writer:
        for name, info in store.tensors.items():
            for start, stop in row_pieces(info.shape[0] if info.shape else 1, info.nbytes, PIECE):
                writer.write(name, start, read_rows(store, name, start, stop))
        writer.add_text(CONFIG, store.config_bytes.decode())
    return output


def hollow_weights(folder: Path, store: TensorStore) -> Path:
    """Write safetensors files with the headers of a store's tensors, and a hole in place of the numbers."""
    files = lay_out([(info.name, info.dtype, info.shape) for info in store.tensors.values()], _SHARD)
    for file in files:
        write_new(folder / file.name, file.header)
        os.truncate(folder / file.name, file.size)
    if len(files) > 1:
        write_new(folder / INDEX, index_text(files).encode())
    return folder


def link_weights(folder: Path, files: Iterable[Path], tensors: Mapping[str, TensorInfo]) -> Path:
    """Put links to files of weights into a folder, under the names that loaders know."""
    paths = list(files)
    names = {path: f"model-{i + 1:05d}-of-{len(paths):05d}.safetensors" for i, path in enumerate(paths)}
    if len(paths) == 1:
        names = dict.fromkeys(names, WEIGHTS)
    for path in paths:
        (folder / names[path]).symlink_to(path.resolve())
    if len(paths) > 1:
        index = {name: names[info.file] for name, info in tensors.items()}
        write_new(folder / INDEX, json.dumps({"metadata": {}, "weight_map": index}).encode())
    return folder
