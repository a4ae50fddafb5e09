"""Opens a model of the hub for a plan: of weights that are not in the cache, only the headers are fetched."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx.checkpoints import Checkpoint, quantised
from lemonx.checkpoints.creating import write_new
from lemonx.checkpoints.folder import CONFIG, INDEX, WEIGHTS
from lemonx.checkpoints.layout import write_empty
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.reader import NotDownloaded
from lemonx.checkpoints.safetensors_file import encode_header
from lemonx.checkpoints.temporary import Temporary
from lemonx.hub import download
from lemonx.hub.download import in_words
from lemonx.hub.names import HubName, meant

if TYPE_CHECKING:
    from huggingface_hub.utils import SafetensorsFileMetadata

_AT_ONCE = 8


def fetched(given: str | os.PathLike[str]) -> Checkpoint | None:
    """A model of the hub of which only headers are here; None if it is no model of the hub, or in the cache."""
    name = meant(given)
    if name is None:
        return None
    with in_words(name):
        if download.kept_weights(name) is None and (files := download.safetensors(name)):
            return _of_headers(name, *files)
    return None


def _of_headers(name: HubName, folder: Path, shards: set[str]) -> Checkpoint:
    """A folder with config.json, and with weights that have their headers but no numbers and take no room."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="lemonx")
    temporary = Temporary()
    try:
        write_new(temporary.path / CONFIG, read_inside(folder.resolve(), CONFIG))
        if shards != {WEIGHTS}:
            write_new(temporary.path / INDEX, read_inside(folder.resolve(), INDEX))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            parsed = pool.map(
                lambda shard: api.parse_safetensors_file_metadata(name.repo, shard, revision=folder.name),
                sorted(shards),
            )
            for shard, header in zip(sorted(shards), parsed, strict=True):
                _write_empty(temporary.path / shard, header)
        checkpoint = Checkpoint.of_headers(temporary, folder)
        if quantised.is_known(checkpoint.config):
            raise NotDownloaded("is quantised, so its weights decide what can be planned", file=folder)
        return checkpoint
    except BaseException:
        temporary.close()
        raise


def _write_empty(path: Path, header: SafetensorsFileMetadata) -> None:
    """A safetensors file with this header; the numbers behind it are a hole."""
    tensors = sorted(header.tensors.items(), key=lambda item: item[1].data_offsets)
    text = encode_header((name, info.dtype, tuple(info.shape)) for name, info in tensors)
    write_empty(path, text, max((info.data_offsets[1] for _, info in tensors), default=0))
