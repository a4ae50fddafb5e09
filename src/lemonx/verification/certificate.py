"""lemonx.json: what was expanded from what, how exactly, and what was measured; and the model card."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx import methods
from lemonx.algebra.free_parameters import Free, checked
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.config import class_names
from lemonx.checkpoints.folder import CERTIFICATE, RAMP, has, parse_object
from lemonx.checkpoints.layout import Layout, layout_of
from lemonx.checkpoints.opening import read_inside
from lemonx.errors import BadCheckpoint, BadTarget
from lemonx.guards.shown import as_code, shown
from lemonx.hub.names import name_of
from lemonx.planning.notices import notes
from lemonx.planning.plan import Plan
from lemonx.planning.summary import changed_fields, config_table, lost_to_eps, parameters, size_table
from lemonx.verification.comparison import Comparison
from lemonx.verification.source_card import source_card
from lemonx.verification.stability import Stability
from lemonx.verification.verify import Verified

if TYPE_CHECKING:
    from lemonx.optimizer_state.on_disk import GrownState

FILE = CERTIFICATE


def versions() -> dict[str, str]:
    """What computed a result."""
    packages = ("lemonx", "torch", "transformers", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: _installed(name) for name in packages}}


@cache
def _installed(package: str) -> str:
    """The version of a package, for whose name every installed one is looked through."""
    return version(package)


@dataclass(frozen=True)
class Said:
    """What a certificate says of how its checkpoint was made: enough to plan it again."""

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
    """What the content of a lemonx.json says; BadCheckpoint if it is not one."""
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
class Before:
    """A size, or a field of config.json, in the source and in the target."""

    source: object
    target: object


@dataclass(frozen=True)
class Provenance:
    """Where a tensor of the target comes from, by which rule, and how exactly."""

    origin: str
    rule: str
    exactness: str


@dataclass(frozen=True)
class Certificate:
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
    parameters: int
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
    # How the source lay on disk, so that `lemonx shrink` can write the same files again.
    layout: Layout | None = None
    optimizer: GrownState | None = None
    files: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """As it stands in lemonx.json."""
        return {
            "method": self.method,
            "paper": self.paper,
            "lossless": self.lossless,
            "notes": self.notes,
            "source": asdict(self.source),
            "table": self.table,
            "target": {"parameters": self.parameters},
            "sizes": {name: asdict(sizes) for name, sizes in self.sizes.items()},
            "config": {name: asdict(values) for name, values in self.config.items()},
            "free": asdict(self.free),
            "seed": self.seed,
            "dtype": self.dtype,
            "versions": self.versions,
            "expected_loss": self.expected_loss,
            "exactness": self.exactness,
            "tensors": {
                name: {"from": made.origin, "rule": made.rule, "exactness": made.exactness}
                for name, made in self.tensors.items()
            },
            "not_written": self.not_written,
            "left_behind": self.left_behind,
            "verified": self.verified.as_dict(),
            "optimizer": self.optimizer and asdict(self.optimizer),
            "layout": self.layout and self.layout.as_dict(),
            "files": list(self.files),
        }


def certificate(plan: Plan, source: Checkpoint, found: Verified) -> Certificate:
    """What a plan says of its target, and what was measured."""
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
        parameters=after,
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


def certificate_text(content: Certificate) -> str:
    return json.dumps(content.as_dict(), indent=2, sort_keys=False) + "\n"


def model_card(plan: Plan, content: Certificate) -> str:
    """README.md of the output: what it is, from what, and how it was checked."""
    sizes = "\n".join(
        f"| {name} | {' | '.join('-' if size is None else str(size) for size in both)} |"
        for name, *both in config_table(plan)
    )
    checked = shown(" ".join(_checked(content.verified)))
    base = content.source.name
    if plan.policy.lossless:
        computes = "computes" if content.verified.passed else "was made to compute"
        claim = f"This checkpoint {computes} the same function as {as_code(base)} and has more capacity to train on."
        if (lost := content.expected_loss) is not None:
            claim += (
                f"\nIt does so up to the eps of its norms, {lost['eps']:g}: added blocks norm the stream again at "
                f"{lost['places']} places,\nwhich changes it by at most {lost['of_stream']:.1e} of itself in all."
            )
        if plan.ramp:
            claim += (
                f"\nIts added layers write nothing yet: `{RAMP}` holds their copied output weights, which come in "
                "during training."
            )
    else:
        claim = f"This checkpoint was grown from {as_code(base)} by a method that is not lossless."
    if adapter := content.verified.adapter:
        claim += (
            f"\n`{adapter.folder}` holds the LoRA adapter {as_code(adapter.name)}, grown along: the two together "
            "compute what it and its base did."
        )
    if content.source.converted:
        claim += f"\nThe source was read as: {shown(content.source.converted)}."
    card = source_card(plan.source)
    return f"""---
{card.head(name_of(plan.source))}---
# {as_code(base)}, expanded

{claim}
It was written by lemonx {content.versions["lemonx"]}: method {plan.policy.method}, free parameters
{plan.free.name}, seed {plan.seed}.

| config.json | source | this |
|---|---|---|
{sizes}
| parameters | {content.source.parameters:,} | {content.parameters:,} |

{checked}
`{FILE}` holds the certificate: digest of the source, rule and exactness of every tensor, figures.

Train on with the maximum learning rate of training from scratch and a faster decay.
{card.section()}"""


def stability_text(stability: Stability) -> str:
    """How steadily a framed model computes, in a sentence."""
    if stability.source is None or stability.target is None:
        return f"Float32 noise and gradient were {stability.skipped}"
    before, after = stability.source, stability.target
    return (
        f"In float32 its noise is {after.noise:.1e} (source: {before.noise:.1e}) and the norm of its gradient "
        f"{after.gradient:.2g} (source: {before.gradient:.2g}); more than {stability.limit:g} times as much "
        "would be refused"
    )


def twin_text(outputs: Comparison) -> str:
    """What the twin of a rounded target shows, in a sentence."""
    twin = outputs.twin
    assert twin is not None
    text = (
        f"With all {twin.tensors} tensors of kinds that are rounded made again in float64, nothing is: then the "
        f"outputs differ by at most {twin.difference:.1e} of the largest "
        f"(tolerance {twin.tolerance:.1e}: {twin.derived})"
    )
    if outputs.amplified:
        text += (
            "; the stored weights differ from these by one rounding each, which this model amplifies beyond its "
            "tolerance"
        )
    return text


def _checked(verified: Verified) -> Iterator[str]:
    """How a checkpoint was verified, in sentences."""
    algebra, structure, outputs = verified.algebra, verified.structure, verified.outputs
    if algebra:
        yield (
            f"Verified entry by entry: all {algebra.entries:,} numbers in {algebra.tensors} tensors obey the "
            "rule that makes them from the source's."
        )
    if structure:
        yield f"Verified block by block: {structure.blocks} blocks are wired like the blocks they come from."
    if outputs:
        # The result of a method that is not lossless is kept, whatever was measured.
        done, limit = (
            ("Verified", "the tolerance was") if outputs.passed else ("Compared", "they are not equal, within")
        )
        yield (
            f"{done} in float64 after a reload from disk: on random inputs "
            f"({outputs.inputs}) the outputs differ by at most {outputs.difference:.1e} of the largest; "
            f"{limit} {outputs.tolerance:.1e} ({outputs.derived})."
        )
        if outputs.twin:
            yield f"{twin_text(outputs)}."
        if outputs.stream_loss:
            yield (
                "That is against the source with its norms applied as often; against the source as it is, it is "
                f"{outputs.output_loss:.1e}."
            )
        if outputs.stability:
            yield f"{stability_text(outputs.stability)}."
    else:
        yield f"{'Outputs were not compared' if algebra else 'Not verified'}: {verified.skipped}."
