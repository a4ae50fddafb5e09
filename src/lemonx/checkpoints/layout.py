"""How a checkpoint lies on disk, byte for byte, without its numbers: enough to write the same files again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lemonx.checkpoints.creating import write_new
from lemonx.checkpoints.folder import CONFIG, INDEX
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.checkpoints.reader import Checkpoint
from lemonx.checkpoints.shards import Shard
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint

# Larger than any file of weights, so that a forged header cannot ask for a hole of any size.
_MOST_BYTES = 1 << 50


@dataclass(frozen=True)
class Layout:
    """The text of config.json and of the index, if there is one, and of the header of every file of weights."""

    config: str
    index: str | None
    headers: Mapping[str, str]

    def as_dict(self) -> dict[str, JsonValue]:
        return asdict(self)

    @classmethod
    def parse(cls, content: Any) -> Layout | None:
        """What `as_dict` wrote; None if it is something else."""
        try:
            found = cls(**content)
            texts = [found.config, *found.headers, *found.headers.values()]
        except (TypeError, AttributeError):
            return None
        whole = all(isinstance(text, str) for text in texts) and isinstance(found.index, str | None)
        return found if whole and found.headers else None


def layout_of(checkpoint: Checkpoint) -> Layout | None:
    """The layout of an open checkpoint; None where a text is not UTF-8, and JSON could not hold it as it is.

    A distributed checkpoint has none: how its processes cut the tensors is nothing that has to come back.
    """
    if checkpoint.run is not None:
        return None
    try:
        texts = {name: raw.decode() for name, raw in checkpoint.opening_bytes().items()}
    except UnicodeDecodeError:
        return None
    return Layout(texts.pop(CONFIG), texts.pop(INDEX, None), texts)


def without_numbers(layout: Layout, origin: Path) -> Checkpoint:
    """The checkpoint of a layout, of which everything can be asked but a number."""
    temporary = Temporary()
    try:
        write_new(temporary.path / CONFIG, layout.config.encode())
        if layout.index is not None:
            write_new(temporary.path / INDEX, layout.index.encode())
        for name, header in layout.headers.items():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise BadCheckpoint(f"names {name[:80]!r}, which is not a file of weights", "expand again", file=origin)
            write_empty(temporary.path / name, _with_length(header), _data_bytes(header, origin))
        return Checkpoint.of_headers(temporary, origin)
    except BaseException:
        temporary.close()
        raise


def write_empty(path: Path, header: bytes, data: int) -> None:
    """A safetensors file with this header; the numbers behind it are a hole, which takes no room."""
    write_new(path, header)
    os.truncate(path, len(header) + data)


def shards(layout: Layout, checkpoint: Checkpoint) -> tuple[Shard, ...]:
    """The files of a layout, to be written again; `checkpoint` is the one `without_numbers`."""
    found = []
    for name, text in layout.headers.items():
        infos = [info for info in checkpoint.tensors.values() if info.file.name == name]
        header = _with_length(text)
        size = max([len(header), *(info.end for info in infos)])
        entries = tuple((info.name, info.dtype, info.shape) for info in infos)
        found.append(Shard(name, header, entries, tuple(info.begin for info in infos), size))
    return tuple(found)


def _with_length(header: str) -> bytes:
    text = header.encode()
    return len(text).to_bytes(8, "little") + text


def _data_bytes(header: str, origin: Path) -> int:
    try:
        content = parse_json(header.encode())
        ends = [int(entry["data_offsets"][1]) for name, entry in content.items() if name != "__metadata__"]
        size = max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        size = -1
    if not 0 <= size <= _MOST_BYTES:
        raise BadCheckpoint("holds a header of weights that is not one", "expand again", file=origin)
    return size
