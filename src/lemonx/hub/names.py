"""What a model is called on the hub, and where the hub's cache keeps it. Nothing here reaches the network."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lemonx.checkpoints.adapters import WEIGHTS as ADAPTER_WEIGHTS
from lemonx.checkpoints.folder import CONFIG, INDEX, WEIGHTS, has, is_adapter, weight_map
from lemonx.checkpoints.opening import MAX_TEXT, read_file
from lemonx.errors import BadCheckpoint

# What the hub itself allows; no part begins or ends with a dot, so that no name can leave the cache.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9_-][A-Za-z0-9._/-]{{0,120}}))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A model on the hub: `org/name`, and the branch, tag or commit that is wanted of it.

    >>> str(HubName("org/small", "v1")), str(HubName("org/small"))
    ('org/small@v1', 'org/small')
    """

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def parse(text: str) -> HubName | None:
    """A name of the hub, `org/name` or `org/name@revision`; None if the text cannot be one.

    >>> parse("org/small@v1.0"), parse("./org/small"), parse("small"), parse("org/../small")
    (HubName(repo='org/small', revision='v1.0'), None, None, None)
    """
    match = _ID.fullmatch(text)
    if match is None or ".." in text or "--" in match[1] or match[1].endswith(".git"):
        return None
    return HubName(match[1], match[2] or "main")


def meant(given: str | os.PathLike[str]) -> HubName | None:
    """The model of the hub that is meant by a text; None for a Path, and where something of this name exists."""
    return parse(given) if isinstance(given, str) and not os.path.lexists(given) else None


def name_of(folder: Path) -> str | None:
    """What a folder of the hub's cache is called on the hub; None for any other folder.

    >>> name_of(Path("/cache/models--org--small/snapshots/0123")), name_of(Path("models/small"))
    ('org/small', None)
    """
    kind, *parts = folder.parent.parent.name.split("--")
    return "/".join(parts) if kind == "models" and parts and folder.parent.name == "snapshots" else None


def cached(cache: Path, name: HubName) -> Path | None:
    """The folder in the hub's cache with all of the model's weights; None if it is not there."""
    kept = cache / f"models--{name.repo.replace('/', '--')}"
    try:
        known = COMMIT.fullmatch(name.revision)
        commit = name.revision if known else read_file(kept / "refs" / name.revision, MAX_TEXT).decode().strip()
    except (OSError, ValueError):
        return None
    folder = kept / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and has_all_weights(folder) else None


def has_all_weights(folder: Path) -> bool:
    """Whether a folder of the cache has config.json, or an adapter's, and all safetensors files that belong to it."""
    if is_adapter(folder):
        return (folder / ADAPTER_WEIGHTS).exists()
    try:
        shards = set(weight_map(folder.resolve()).values()) if has(folder, INDEX) else {WEIGHTS}
    except BadCheckpoint:
        return False
    return all((folder / name).exists() for name in (CONFIG, *shards))
