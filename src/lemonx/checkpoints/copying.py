"""Writes the copy that a source is converted to, tensors in pieces and files carried along; or links to its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lemonx.checkpoints.creating import write_new
from lemonx.checkpoints.folder import CONFIG, INDEX, WEIGHTS
from lemonx.checkpoints.plain import JsonValue
from lemonx.checkpoints.safetensors_file import TensorInfo
from lemonx.checkpoints.shards import Entry
from lemonx.checkpoints.writer import CheckpointWriter

if TYPE_CHECKING:
    import torch

_SHARD = 5 * 10**9
# Bytes of a piece, so that a model larger than memory can be converted.
BLOCK = 1 << 24


def write_copy(
    output: Path,
    entries: Sequence[Entry],
    pieces: Iterable[tuple[str, int, torch.Tensor]],
    config: Mapping[str, JsonValue] | bytes,
    beside: Mapping[str, Callable[[], BinaryIO]],
) -> Path:
    """The folder `output`, a temporary one, with these tensors; a piece is a name, a first row, and rows."""
    text = config.decode() if isinstance(config, bytes) else json.dumps(config, indent=2, sort_keys=True) + "\n"
    with CheckpointWriter(output, entries, max_shard_size=_SHARD, kept=False) as writer:
        for name, start, rows in pieces:
            writer.write(name, start, rows)
        writer.add_text(CONFIG, text)
        for name, opened in beside.items():
            with opened() as file:
                writer.add_file(file, name)
    return output


def link_weights(folder: Path, descriptors: Iterable[Path], tensors: Mapping[str, TensorInfo]) -> Path:
    """Put links to files of weights into a folder, under the names that loaders know."""
    descriptors = list(descriptors)
    count = len(descriptors)
    names = {path: f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i, path in enumerate(descriptors)}
    if count == 1:
        names = dict.fromkeys(names, WEIGHTS)
    for path in descriptors:
        (folder / names[path]).symlink_to(path.resolve())
    if count > 1:
        index = {name: names[info.file] for name, info in tensors.items()}
        write_new(folder / INDEX, json.dumps({"metadata": {}, "weight_map": index}).encode())
    return folder


def row_pieces(rows: int, nbytes: int, block: int) -> Iterator[tuple[int, int]]:
    """Where pieces of at most `block` bytes, or of one row, begin and end in a tensor of so many bytes.

    >>> list(row_pieces(5, 50, 20))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, block * rows // max(1, nbytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
