"""How a checkpoint lies on disk, byte for byte, without its numbers: enough to write the same files again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.checkpoints.reader import Checkpoint
from lemonx.checkpoints.safetensors_file import SafetensorsFile, parsed
from lemonx.checkpoints.safetensors_store import headers_only
from lemonx.checkpoints.shards import Shard, as_laid
from lemonx.errors import BadCheckpoint

# Larger than any file of weights.
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
        """Return what `as_dict` wrote; None for anything else."""
        try:
            found = cls(**content)
            texts = [found.config, *found.headers, *found.headers.values()]
        except (TypeError, AttributeError):
            return None
        whole = all(isinstance(text, str) for text in texts) and isinstance(found.index, str | None)
        return found if whole and found.headers else None


def layout_of(checkpoint: Checkpoint) -> Layout | None:
    """Return the layout of an open checkpoint; None where a text is not UTF-8, and JSON could not hold it as it is.

    A distributed checkpoint has none: how its processes cut the tensors is nothing that has to come back.
    """
    store = checkpoint.store
    index = store.index_bytes
    if not store.files:
        return None
    try:
        headers = {file.name: file.header[8:].decode() for file in store.files}
        return Layout(store.config_bytes.decode(), None if index is None else index.decode(), headers)
    except UnicodeDecodeError:
        return None


def without_numbers(layout: Layout, origin: Path) -> Checkpoint:
    """Return the checkpoint of a layout, of which everything can be asked but a number."""
    return Checkpoint(headers_only(layout.config.encode(), _files(layout, origin), origin), origin)


def shards(layout: Layout, origin: Path) -> tuple[Shard, ...]:
    """Return the files of a layout, to be written again."""
    return tuple(as_laid(file.path.name, file.header, file.tensors) for file in _files(layout, origin))


def _files(layout: Layout, origin: Path) -> list[SafetensorsFile]:
    for name in layout.headers:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise BadCheckpoint(f"names {name[:80]!r}, which is not a file of weights", "expand again", file=origin)
    texts = {name: text.encode() for name, text in layout.headers.items()}
    return [
        parsed(len(text).to_bytes(8, "little") + text, 8 + len(text) + _data_bytes(text, origin), origin / name)
        for name, text in texts.items()
    ]


def _data_bytes(header: bytes, origin: Path) -> int:
    try:
        content = parse_json(header)
        ends = [int(entry["data_offsets"][1]) for name, entry in content.items() if name != "__metadata__"]
        size = max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        size = -1
    if not 0 <= size <= _MOST_BYTES:
        raise BadCheckpoint("holds a header of weights that is not one", "expand again", file=origin)
    return size
