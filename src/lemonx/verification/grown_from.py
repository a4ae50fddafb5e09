"""What a checkpoint records of the source it was grown from, enough to read that source back out of it.

An expansion records it in lemonx.json. A run that trained only what was added (`train: new`) records the same in its
run.json, since what it wrote is no longer the source's function, and has no certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.folder import CERTIFICATE, RUN, has, parse_object
from lemonx.checkpoints.layout import Layout
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint
from lemonx.verification.certificate import Said, parse_certificate

# The key of run.json.
KEY = "grown"
_AGAIN = "expand again with this version"
_KEPT = ("method", "free", "seed", "dtype", "source", "layout")


@dataclass(frozen=True)
class GrownFrom:
    """How a checkpoint was grown, how its source lay on disk, and the digest of that; `trained`: it was trained since.

    `record`: the same as a run keeps it.
    """

    said: Said
    layout: Layout
    sha256: str
    trained: bool
    record: Mapping[str, JsonValue]


def grown_from(checkpoint: Checkpoint) -> GrownFrom:
    """What is recorded beside a checkpoint; BadCheckpoint if nothing is."""
    for name, trained in ((CERTIFICATE, False), (RUN, True)):
        if has(checkpoint.path, name):
            content: Any = parse_object(read_inside(checkpoint.path, name), checkpoint.path / name)
            content = content.get(KEY) if trained else content
            if isinstance(content, dict):
                return parse_grown(content, checkpoint.path / name, trained=trained)
    raise BadCheckpoint(
        f"has no {CERTIFICATE}, nor a {RUN} of a run with `train: new`, so nothing says what it was grown from",
        "give what `lemonx expand` wrote, or such a run",
        file=checkpoint.origin,
    )


def parse_grown(content: Mapping[str, Any], file: Path, *, trained: bool) -> GrownFrom:
    """What the content of a lemonx.json, or the record of a run, says; `file` is for messages."""
    try:
        said = parse_certificate(content, file)
    except BadCheckpoint as error:
        raise BadCheckpoint(error.found, _AGAIN, file=file) from None
    layout = Layout.parse(content.get("layout"))
    source = content.get("source")
    digest = source.get("sha256") if isinstance(source, dict) else None
    if layout is None or not isinstance(digest, str):
        raise BadCheckpoint("does not record how the source lay on disk", _AGAIN, file=file)
    return GrownFrom(said, layout, digest, trained, {key: content.get(key) for key in _KEPT})
