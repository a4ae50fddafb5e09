"""lemonx.json: what was expanded from what, how exactly, and what was measured.

A certificate says enough to plan its checkpoint again, and to read the source back out of it. A run that trained only
what was added (`train: new`) records the same in its run.json, since what it wrote is no longer the source's function,
and has no certificate.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx import methods
from lemonx.algebra.free_parameters import Free, checked
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.config import class_names
from lemonx.checkpoints.folder import CERTIFICATE, RUN, has, parse_object
from lemonx.checkpoints.layout import Layout, layout_of
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadTarget
from lemonx.guards.results import Result
from lemonx.guards.shown import shown
from lemonx.hub.names import name_of
from lemonx.planning.notices import notes
from lemonx.planning.plan import Plan
from lemonx.planning.summary import changed_fields, lost_to_eps, parameters, size_table
from lemonx.verification.check_result import as_json
from lemonx.verification.verify import Verified

if TYPE_CHECKING:
    from lemonx.optimizer_state.on_disk import GrownState

FILE = CERTIFICATE


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that computed a result."""
    packages = ("lemonx", "torch", "transformers", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: _installed(name) for name in packages}}


@cache
def _installed(package: str) -> str:
    """The version of a package, for whose name every installed one is looked through."""
    return version(package)


@dataclass(frozen=True)
class Said:
    """The options in a certificate by which its checkpoint can be planned again."""

    method: str
    free: Free
    seed: int
    dtype: str | None


def read_certificate(checkpoint: Checkpoint) -> Said | None:
    """The certificate of a checkpoint; None if it has none, BadCheckpoint if it is not one."""
    return certificate_in(checkpoint.path)


def certificate_in(folder: Path) -> Said | None:
    """The certificate in a folder; None if there is none, or no such folder."""
    if not has(folder, FILE):
        return None
    return parse_certificate(parse_object(read_inside(folder, FILE), folder / FILE), folder / FILE)


def parse_certificate(content: Mapping[str, Any], path: Path) -> Said:
    """Read the options in the content of a lemonx.json; BadCheckpoint if it is not a certificate."""
    try:
        told = Said(content["method"], checked(Free(**content["free"])), content["seed"], content.get("dtype"))
        if not (isinstance(told.method, str) and isinstance(told.seed, int) and isinstance(told.dtype, str | None)):
            raise TypeError
    except (KeyError, TypeError, BadTarget):
        raise BadCheckpoint(
            "is not a certificate that lemonx wrote: method, free, seed or dtype is missing, or of another kind",
            "remove it to compare outputs alone",
            file=path,
        ) from None
    return told


@dataclass(frozen=True)
class ExpandedFrom:
    """The checkpoint that was expanded: its folder's name, or its name and commit on the hub."""

    name: str
    revision: str | None
    model_type: str
    architectures: list[str] | None
    sha256: str
    parameters: int
    # What its weights were read from, where that was not floats in safetensors.
    converted: str | None


@dataclass(frozen=True)
class Size:
    """The size of the checkpoint that was written."""

    parameters: int


@dataclass(frozen=True)
class Before:
    """A size, or a field of config.json, in the source and in the target."""

    source: object
    target: object


@dataclass(frozen=True)
class Provenance:
    """The origin of a tensor of the target, its rule, and the exactness of that rule."""

    origin: str
    rule: str
    exactness: str


@dataclass(frozen=True, repr=False)
class Certificate(Result, printer="expansion:print_certificate"):
    """lemonx.json: everything a reader needs to check the claim again.

    `table`: where the table of the family is from: lemonx, "inferred", a package or a file. `expected_loss`: what the
    eps of added Post-LN blocks costs at most; None where nothing is lost. `not_written`: tensors
    of the source that the target has no use for, and why; `left_behind`: files beside the weights.
    """

    method: str
    paper: str
    lossless: bool
    notes: list[str]
    source: ExpandedFrom
    table: str
    target: Size
    sizes: Mapping[str, Before]
    config: Mapping[str, Before]
    free: Free
    seed: int
    dtype: str | None
    versions: Mapping[str, str]
    expected_loss: Mapping[str, float] | None
    exactness: Mapping[str, int]
    tensors: Mapping[str, Provenance]
    not_written: Mapping[str, str]
    left_behind: list[str]
    verified: Verified
    optimizer: GrownState | None = None
    # How the source lay on disk, so that `lemonx shrink` can write the same files again.
    layout: Layout | None = None
    files: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters of the checkpoint that was written."""
        return self.target.parameters

    def as_dict(self) -> dict[str, Any]:
        """The content of lemonx.json."""
        content = {field.name: as_json(getattr(self, field.name)) for field in fields(self)}
        tensors = {name: {"from": made.pop("origin"), **made} for name, made in content["tensors"].items()}
        return {**content, "tensors": tensors}


def certificate(plan: Plan, source: Checkpoint, found: Verified) -> Certificate:
    """Return the certificate of a plan's target, with the evidence that was found."""
    before, after = parameters(plan)
    return Certificate(
        method=plan.policy.method,
        paper=methods.find(plan.policy.method).paper,
        lossless=plan.policy.lossless,
        notes=notes(plan),
        source=ExpandedFrom(
            name=shown(name_of(plan.source) or plan.source.name, 200),
            revision=shown(plan.source.name, 200) if name_of(plan.source) else None,
            model_type=str(plan.source_config.get("model_type", plan.family.model_types[0])),
            architectures=class_names(plan.source_config) if "architectures" in plan.source_config else None,
            sha256=source.content_digest(),
            parameters=before,
            converted=source.converted,
        ),
        table=plan.family.table or "lemonx",
        target=Size(after),
        sizes={name: Before(a, b) for name, a, b in size_table(plan)},
        config={name: Before(a, b) for name, a, b in changed_fields(plan)},
        free=plan.free,
        seed=plan.seed,
        dtype=plan.dtype,
        versions=versions(),
        expected_loss=lost_to_eps(plan),
        exactness=dict(Counter(step.exactness for step in plan.steps)),
        tensors={step.name: Provenance(step.origin, step.rule, step.exactness) for step in plan.steps},
        not_written=dict(plan.dropped),
        left_behind=[shown(name, 200) for name in source.left_behind],
        verified=found,
        layout=layout_of(source),
    )


# ----------------------------------------------------------------- what a checkpoint says of its source

# The key of run.json.
KEY = "grown"
_AGAIN = "expand again with this version"
_KEPT = ("method", "free", "seed", "dtype", "source", "layout")


@dataclass(frozen=True)
class GrownFrom:
    """The record of a checkpoint's source: the options, the layout on disk and the digest.

    `trained`: the checkpoint was trained since. `record`: the record as a run keeps it.
    """

    said: Said
    layout: Layout
    sha256: str
    trained: bool
    record: Mapping[str, JsonValue]


def grown_from(checkpoint: Checkpoint) -> GrownFrom:
    """Read the record beside a checkpoint; BadCheckpoint if there is no record."""
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
    """Read the content of a lemonx.json, or the record of a run; messages name `file`."""
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
