"""Opens whatever may be given as a source: a folder, a model of the hub, an adapter with its base, a GGUF file."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.adapters import GIVE, Adapter, Names, merged
from lemonx.checkpoints.folder import ADAPTER, has, is_adapter
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.hub import headers, names
from lemonx.hub.download import Wish, located
from lemonx.models.run_names import naming


def opened(
    given: str | os.PathLike[str],
    *,
    allow_pickle: bool | str = False,
    adapter: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """The checkpoint that is meant, for a plan. Reading a weight raises NotDownloaded if only headers were read."""
    if adapter is None and (found := headers.fetched(given)):
        return found
    folder = located(given, Wish(whole=False, allow_pickle=allow_pickle))
    if adapter is None and _is_gguf(folder):
        from lemonx.models.gguf import open_gguf

        return open_gguf(folder, headers=True)
    return open_source(folder, allow_pickle=allow_pickle, adapter=adapter, config=config)


def open_source(
    given: Path,
    *,
    allow_pickle: bool | str = False,
    adapter: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    run: bool = False,
) -> Checkpoint:
    """The checkpoint in a folder, or what it is converted to; with an adapter, both as one model.

    `config`: the config.json of a run that has none, as a file or as the folder of a model. `run`: the weights are
    those of a run's own checkpoint, where safetensors lie beside it.
    """
    if adapter is None and not is_adapter(given):
        return _model(given, allow_pickle, None if config is None else Path(config), run)
    base, found = open_pair(given, adapter, allow_pickle=allow_pickle)
    try:
        return merged(base, found, in_files(base))
    except BaseException:
        base.close()
        raise


def open_pair(
    given: Path, adapter: str | os.PathLike[str] | None, *, allow_pickle: bool | str = False
) -> tuple[Checkpoint, Adapter]:
    """A base and its adapter; without an adapter, what is given must be one that names its base."""
    if adapter is None:
        found = _adapter(given, allow_pickle)
        given = base_of(found)
    else:
        found = _adapter(located(adapter, Wish(allow_pickle=allow_pickle)), allow_pickle)
    return _model(given, allow_pickle), found


def _model(given: Path, allow_pickle: bool | str, config: Path | None = None, run: bool = False) -> Checkpoint:
    if _is_gguf(given):
        from lemonx.models.gguf import open_gguf

        return open_gguf(given)
    return Checkpoint.open(given, allow_pickle=allow_pickle, config=config, naming=naming, run=run)


def _is_gguf(given: Path) -> bool:
    return given.suffix.lower() == ".gguf" and given.is_file()


def _adapter(folder: Path, allow_pickle: bool | str) -> Adapter:
    if not has(folder, ADAPTER):
        what = f"holds no {ADAPTER}" if folder.is_dir() else "is not a folder"
        remedy = "name the folder that PEFT saved, with --adapter"
        raise BadCheckpoint(f"{what}, so it is no adapter", remedy, file=folder)
    return Adapter(folder, called=names.name_of(folder), allow_pickle=allow_pickle)


def base_of(adapter: Adapter) -> Path:
    """The folder of the model that an adapter names; what its files say never leads to a download."""
    name, revision = adapter.base
    if os.path.isdir(name):
        return Path(name)
    hub = names.parse(f"{name}@{revision}" if revision else name)
    if hub is not None:
        from huggingface_hub import constants

        if kept := names.cached(Path(constants.HF_HUB_CACHE), hub):
            return kept
    raise BadCheckpoint(
        f"is an adapter of {name[:200]!r}, which is neither a folder nor in the hub's cache", GIVE, file=adapter.folder
    )


def in_files(base: Checkpoint) -> Names:
    """A function from the name of a tensor in the model to its name in the base's files, where they differ."""

    @cache
    def known() -> dict[str, str]:
        from lemonx.models.building import disk_names, skeleton

        try:
            return disk_names(skeleton(base.config), buffers=True)
        except LemonxError:  # experts in other shapes, or a class that cannot be built: only equal names count
            return {}

    return lambda name: found if (found := known().get(name)) in base.tensors else None
