"""Downloads a model into the hub's ordinary cache: config, safetensors, tokenizer, card and certificate, no more.

huggingface_hub does it, with its own settings: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, the token of `hf auth login`.
It is imported when a name of the hub is given, not before.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx.checkpoints import adapters
from lemonx.checkpoints.folder import (
    ADAPTER,
    CERTIFICATE,
    CONFIG,
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    WEIGHTS,
    is_adapter,
    is_module_weights,
    is_wanted,
    pickled_weights,
    weight_map,
)
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.guards.shown import one_line
from lemonx.hub.names import COMMIT, HubName, cached, has_all_weights, meant

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

CARD = "README.md"
_LOGIN = "log in with `hf auth login` if it is private"
_OFFLINE = (
    "HF_HUB_OFFLINE keeps lemonx off the network",
    "unset it, or download the model elsewhere and give its folder",
)

Tell = Callable[[int, int], None]
"""Called with the bytes that have arrived, and the bytes to come in all."""


@dataclass(frozen=True)
class Wish:
    """What of a model is wanted. `whole`: also what is carried along, such as the tokenizer, not the weights alone."""

    whole: bool = True
    allow_pickle: bool | str = False
    tell: Tell | None = field(default=None, compare=False)


def located(given: str | os.PathLike[str], wish: Wish | None = None) -> Path:
    """The folder that is meant: the one of this name, or a model of the hub, which is downloaded if need be."""
    wish, name = wish or Wish(), meant(given)
    if name is None:
        return Path(os.path.expanduser(given))
    with in_words(name):
        from huggingface_hub import constants

        if not wish.whole and (kept := kept_weights(name)):
            return kept
        folder = _config(name).parent
        if not constants.is_offline_mode():
            return _download(name, folder, wish)
        if not has_all_weights(folder) and not (wish.allow_pickle and pickled_weights(folder)):
            raise BadCheckpoint(f"is in the hub's cache only in part, and {_OFFLINE[0]}", _OFFLINE[1], file=str(name))
        return folder


def kept_weights(name: HubName) -> Path | None:
    """The folder of the cache with all weights of this model; None if they must be fetched.

    The hub is asked whether a branch has moved on, unless it is out of reach.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode() or COMMIT.fullmatch(name.revision):
        return cached(Path(constants.HF_HUB_CACHE), name)
    folder = _config(name).parent
    return folder if has_all_weights(folder) else None


def located_config(given: str | os.PathLike[str]) -> Path:
    """The same, for whoever needs only the config.json of a model."""
    name = meant(given)
    if name is None:
        return Path(os.path.expanduser(given))
    with in_words(name):
        return _config(name).parent


def _config(name: HubName) -> Path:
    """The model's config.json in the cache, or an adapter's, as fresh as the hub allows."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    away = _unreachable(name)
    settings = dict(revision=name.revision, local_files_only=away is not None, **_told_apart())
    fetch = partial(hf_hub_download, name.repo, **settings)
    try:
        return Path(fetch(CONFIG))
    except EntryNotFoundError as error:
        try:
            return Path(fetch(ADAPTER))
        except EntryNotFoundError:
            raise error from away


def _unreachable(name: HubName) -> Exception | None:
    """Why the hub does not answer, asked once; None if it does, whatever it says.

    hf_hub_download asks six times within 23 s for each file that is not in the cache.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        url = hf_hub_url(name.repo, CONFIG, revision=name.revision)
        get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, **_told_apart())
    except HfHubHTTPError:
        return None
    except Exception as error:  # the classes of the library that makes the connection
        return error
    return None


def _told_apart() -> dict[str, Any]:
    from importlib.metadata import version

    return {"library_name": "lemonx", "library_version": version("lemonx")}


def safetensors(name: HubName) -> tuple[Path, set[str]] | None:
    """The model's folder in the cache, which has its config.json now, and its safetensors files; None without any."""
    folder = _config(name).parent
    there = _listed(name, folder.name)
    if not {WEIGHTS, INDEX} & there.keys():
        return None
    return folder, _shards(name, folder, there, WEIGHTS, INDEX, "safetensors")


def _listed(name: HubName, commit: str) -> dict[str, RepoSibling]:
    from huggingface_hub import HfApi

    listed = HfApi(**_told_apart()).model_info(name.repo, revision=commit, files_metadata=True).siblings or []
    return {entry.rfilename: entry for entry in listed}


def _shards(
    name: HubName, folder: Path, there: dict[str, RepoSibling], single: str, index: str, ending: str
) -> set[str]:
    """The files that hold the weights, as the index says if there is one; its names are checked to be plain."""
    if index not in there:
        return {single}
    _fetch(name, folder.name, [there[index]], None)
    shards = set(weight_map(folder.resolve(), index, ending).values())
    if missing := sorted(shards - there.keys()):
        found = f"has an index that names {missing[0]!r}, which is not there"
        raise BadCheckpoint(found, "choose another model, or an older revision", file=str(name))
    return shards


def _download(name: HubName, folder: Path, wish: Wish) -> Path:
    there = _listed(name, folder.name)
    files = (adapters.WEIGHTS, adapters.PICKLE) if is_adapter(folder) else (WEIGHTS, PICKLE)
    pickled = wish.allow_pickle and not {files[0], INDEX} & there.keys()
    single, index, ending = (files[1], PICKLE_INDEX, "bin") if pickled else (files[0], INDEX, "safetensors")
    if not {single, index} & there.keys():
        raise _no_safetensors(name, set(there))
    beside = {other for other in there if is_wanted(other) or other in (CARD, CERTIFICATE)}
    modules = {other for other in there if is_module_weights(other)}
    shards = _shards(name, folder, there, single, index, ending)
    wanted = [there[file] for file in sorted(beside | modules | shards) if not (folder / file).exists()]
    if wanted:
        _fetch(name, folder.name, wanted, wish.tell)
    return folder


def _no_safetensors(name: HubName, files: set[str]) -> BadCheckpoint:
    found = {PICKLE, PICKLE_INDEX, adapters.PICKLE} & files
    if found:
        return BadCheckpoint(
            f"has no safetensors on the hub, only {min(found)}",
            "use --allow-pickle to read it as plain tensors, which refuses anything else",
            file=str(name),
        )
    other = sorted(file for file in files if file.endswith((".gguf", ".safetensors", ".pt", ".pth", ".ckpt", ".h5")))
    what, packed = f" (but {other[0]})" if other else "", [file for file in other if file.endswith(".gguf")]
    fetch = f"download one of its files (`hf download {name.repo} {packed[0]}`) and give that" if packed else ""
    return BadCheckpoint(
        f"has neither {WEIGHTS} nor {INDEX} on the hub{what}",
        fetch or "choose a model that transformers can load",
        file=str(name),
    )


def _fetch(name: HubName, commit: str, files: list[RepoSibling], tell: Tell | None) -> None:
    """Download these files of a commit into the cache."""
    from huggingface_hub import snapshot_download

    total = sum(entry.size or 0 for entry in files)
    snapshot_download(
        name.repo,
        revision=commit,
        allow_patterns=[glob.escape(entry.rfilename) for entry in files],
        tqdm_class=_bar_class(total, tell),
        **_told_apart(),
    )


def _bar_class(total: int, tell: Tell | None) -> Any:
    """A kind of tqdm that prints nothing and tells how many bytes there are by now."""
    from tqdm import tqdm

    counts: dict[int, float] = {}

    class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        def __init__(self, *given: Any, unit: str = "it", **settings: Any) -> None:
            super().__init__(*given, **{**settings, "disable": True})
            self._counts = unit == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts and tell:
                # What came over the network and what was put together are counted each by a bar of its own.
                counts[id(self)] = self.n
                tell(min(total, int(max(counts.values()))), total)

    return Bar


@contextmanager
def in_words(name: HubName) -> Iterator[None]:
    """A context in which whatever the hub answers, or does not, becomes one line about `name`."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what matters is said in that line
    try:
        yield
    except (LemonxError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and not _is_answer(error):
            raise  # the machine's trouble: a full disk, say
        found, remedy = _words(name, error)
        raise BadCheckpoint(found, remedy, file=str(name)) from error
    finally:
        logging.set_verbosity(level)


def _is_answer(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(error, errors.HfHubHTTPError | errors.LocalEntryNotFoundError | ConnectionError)


def _words(name: HubName, error: Exception) -> tuple[str, str]:
    """What was found, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, errors.GatedRepoError):
        return "is gated on the hub", "ask for access on its page there, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"is on the hub, but has no revision {name.revision!r}", "give a branch, tag or commit that it has"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is neither a folder nor a model on the hub", f"check the name, or {_LOGIN}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if constants.is_offline_mode():
            return f"is neither a folder nor in the hub's cache, and {_OFFLINE[0]}", _OFFLINE[1]
        return f"is no folder, and the hub cannot be reached ({reason(error)})", "check the network, or give a folder"
    if isinstance(error, errors.EntryNotFoundError):
        return "has no config.json on the hub", "choose a model that transformers can load"
    if isinstance(error, errors.HfHubHTTPError):
        return f"could not be read from the hub ({reason(error)})", f"try again later, or {_LOGIN}"
    return f"could not be downloaded ({reason(error)})", "check the network, and start again"


def reason(error: BaseException) -> str:
    """What an error of huggingface_hub's says, in one line; where it only says that there is no file, its cause."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    if isinstance(error, HfHubHTTPError):
        text = text.partition(". ")[0]  # after that come addresses and advice
    return one_line(text) or type(error).__name__
