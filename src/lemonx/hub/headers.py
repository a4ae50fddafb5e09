"""Opens a model of the hub for a plan: of weights that are not in the cache, only the headers are fetched."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from lemonx.checkpoints import Checkpoint, quantised
from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.safetensors_file import SafetensorsFile, encode_header, parsed
from lemonx.checkpoints.safetensors_store import NotDownloaded, headers_only
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
    """Return a checkpoint whose weights have their headers but no numbers."""
    from huggingface_hub import HfApi

    api, config = HfApi(library_name="lemonx"), read_inside(folder.resolve(), CONFIG)
    if quantised.is_known(parse_config(config, folder / CONFIG)):
        raise NotDownloaded("is quantised, so its weights decide what can be planned", file=folder)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        headers = pool.map(
            lambda shard: api.parse_safetensors_file_metadata(name.repo, shard, revision=folder.name), sorted(shards)
        )
        files = [_file(folder / shard, header) for shard, header in zip(sorted(shards), headers, strict=True)]
    return Checkpoint(headers_only(config, files, folder), folder)


def _file(path: Path, header: SafetensorsFileMetadata) -> SafetensorsFile:
    """Return the validated header of a file that is not here."""
    tensors = sorted(header.tensors.items(), key=lambda item: item[1].data_offsets)
    text = encode_header((name, info.dtype, tuple(info.shape)) for name, info in tensors)
    return parsed(text, len(text) + max((info.data_offsets[1] for _, info in tensors), default=0), path)
