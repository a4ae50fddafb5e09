"""How tensors are laid out over safetensors files: pure arithmetic, decided before a byte is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from lemonx.checkpoints.chunks import Chunk, contiguous
from lemonx.checkpoints.folder import INDEX, WEIGHTS
from lemonx.checkpoints.safetensors_file import TensorInfo, encode_header, item_size

Entry: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype, shape."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be: its name, its opening bytes, its tensors and where each begins."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Files:
    """Files to be, of any form, before a number is written.

    `sizes`: by name; `opening`: the bytes around the numbers, by file and place; `entries` and `places`: every tensor
    and the chunks that it is written to, from the byte on that is the first of the chunk's item; `beside`: small files;
    `check`: raises unless the finished files can be read back from a folder.
    """

    sizes: Mapping[str, int]
    opening: Sequence[tuple[str, int, bytes]]
    entries: Mapping[str, Entry]
    places: Mapping[str, tuple[Chunk, ...]]
    check: Callable[[Path], None]
    beside: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


def together(first: Files, second: Files) -> Files:
    """The files of both."""

    def check(folder: Path) -> None:
        first.check(folder)
        second.check(folder)

    return Files(
        {**first.sizes, **second.sizes},
        [*first.opening, *second.opening],
        {**first.entries, **second.entries},
        {**first.places, **second.places},
        check,
        {**first.beside, **second.beside},
    )


def safetensors_files(shards: Sequence[Shard], *, indexed: bool, check: Callable[[Path], None]) -> Files:
    """Safetensors files, with an index where there is more than one."""
    placed = [
        (entry, Chunk(Path(shard.name), (0,) * len(entry[2]), entry[2], contiguous(entry[2]), item=(offset, 0)))
        for shard in shards
        for entry, offset in zip(shard.entries, shard.offsets, strict=True)
    ]
    return Files(
        {shard.name: shard.size for shard in shards},
        [(shard.name, 0, shard.header) for shard in shards],
        {entry[0]: entry for entry, _ in placed},
        {entry[0]: (chunk,) for entry, chunk in placed},
        check,
        {INDEX: index_text(shards).encode()} if indexed and len(shards) > 1 else {},
    )


def entry_bytes(entry: Entry) -> int:
    """The bytes that a tensor takes.

    >>> entry_bytes(("w", "BF16", (3, 4)))
    24
    """
    return math.prod(entry[2]) * item_size(entry[1])


def lay_out(entries: Iterable[Entry], max_shard_size: int) -> tuple[Shard, ...]:
    """The shards for `entries`: in the given order, each of at most `max_shard_size` bytes of tensors.

    A larger tensor gets its own shard. The names are those that transformers uses.

    >>> [s.name for s in lay_out([("a", "F32", (2,)), ("b", "F32", (2,))], max_shard_size=8)]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    groups: list[list[Entry]] = [[]]
    filled = 0
    seen: set[str] = set()
    for entry in entries:
        if entry[0] in seen:
            raise ValueError(f"tensor {entry[0]!r} is listed twice")
        seen.add(entry[0])
        if groups[-1] and filled + entry_bytes(entry) > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry_bytes(entry)
    count = len(groups)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return tuple(_shard(name, group) for name, group in zip(names, groups, strict=True))


def config_text(config: Mapping[str, object]) -> str:
    """Return the text of a config.json."""
    return json.dumps(dict(config), indent=2, sort_keys=True) + "\n"


def as_laid(name: str, header: bytes, infos: Sequence[TensorInfo]) -> Shard:
    """Return a file that has this header already, with its tensors in the order of their bytes."""
    entries = tuple((info.name, info.dtype, info.shape) for info in infos)
    size = max([len(header), *(info.end for info in infos)])
    return Shard(name, header, entries, tuple(info.begin for info in infos), size)


def _shard(name: str, group: Sequence[Entry]) -> Shard:
    # Wider elements first: every tensor is then aligned to its own element, without which the
    # safetensors library cannot hand out a view of a mapped file.
    ordered = sorted(group, key=lambda entry: -item_size(entry[1]))
    header = encode_header(ordered)
    offsets: list[int] = []
    position = len(header)
    for entry in ordered:
        offsets.append(position)
        position += entry_bytes(entry)
    return Shard(name, header, tuple(ordered), tuple(offsets), position)


def index_text(shards: Sequence[Shard]) -> str:
    """The text of model.safetensors.index.json for these shards."""
    total = sum(entry_bytes(entry) for shard in shards for entry in shard.entries)
    weight_map = {entry[0]: shard.name for shard in shards for entry in shard.entries}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
