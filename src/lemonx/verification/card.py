"""The model card of an expansion: source, sizes and checks, and below them the card of the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lemonx.checkpoints.folder import CERTIFICATE, RAMP, has
from lemonx.checkpoints.opening import MAX_TEXT, file_inside, read_open
from lemonx.checkpoints.replaceable import CARD
from lemonx.errors import BadCheckpoint
from lemonx.guards.shown import as_code, shown, shown_lines
from lemonx.hub import names
from lemonx.hub.names import name_of
from lemonx.planning.plan import Plan
from lemonx.planning.summary import config_table
from lemonx.verification.certificate import Certificate
from lemonx.verification.comparison import Comparison
from lemonx.verification.stability import Stability
from lemonx.verification.verify import Verified


def model_card(plan: Plan, content: Certificate) -> str:
    """Return README.md of the output, which names the source, the sizes and the checks."""
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
| parameters | {content.source.parameters:,} | {content.target.parameters:,} |

{checked}
`{CERTIFICATE}` holds the certificate: digest of the source, rule and exactness of every tensor, figures.

Train on with the maximum learning rate of training from scratch and a faster decay.
{card.section()}"""


def stability_text(stability: Stability) -> str:
    """Say in a sentence how much rounding adds to a framed model."""
    if stability.source is None or stability.target is None:
        return f"Float32 noise and gradient were {stability.skipped}"
    before, after = stability.source, stability.target
    return (
        f"In float32 its noise is {after.noise:.1e} (source: {before.noise:.1e}) and the norm of its gradient "
        f"{after.gradient:.2g} (source: {before.gradient:.2g}); more than {stability.limit:g} times as much "
        "would be refused"
    )


def twin_text(outputs: Comparison) -> str:
    """Say in a sentence what was found for the twin of a rounded target."""
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
    """Say in sentences how a checkpoint was verified."""
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


# ----------------------------------------------------------------- the card of the source

# These fields hold for the source alone: its measured results, its relation to its own base, what its training emitted.
_OF_THE_SOURCE = frozenset({"model-index", "base_model_relation", "co2_eq_emissions"})


_PARTS = re.compile(r"\ufeff?\s*---[ \t]*\n(.*?)^---[ \t]*$(.*)", re.DOTALL | re.MULTILINE)


_LICENCE = re.compile(r"^(license|license_name|license_link):[ \t]+[\w.:/ -]+$", re.MULTILINE)
# How far into a text without a head a licence is looked for.
_HEAD = 2000
# A value with a tag of its own asks for a type, and readers of cards know none.
_TAGGED = re.compile(r"(:|^\s*-)[ \t]+!", re.MULTILINE)


@dataclass(frozen=True)
class SourceCard:
    """The fields of a card's head, each as the lines that were written, and the text below the head."""

    fields: dict[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    base_models: tuple[str, ...] = ()
    text: str = ""

    def head(self, base_model: str | None) -> str:
        """The head of the expansion's card; without the source's name on the hub, the source's own base is named."""
        bases = [base_model] if base_model else [name for name in self.base_models if names.parse(name)]
        ours = {
            "base_model": bases[0] if len(bases) == 1 else bases,
            "tags": list(dict.fromkeys((*self.tags, "lemonx", "model-expansion"))),
        }
        kept = {name: text for name, text in self.fields.items() if name not in _OF_THE_SOURCE | ours.keys()}
        lines = {"library_name": "library_name: transformers\n", **kept}
        written = yaml.safe_dump({name: value for name, value in ours.items() if value}, allow_unicode=True)
        return shown_lines("".join(lines.values()) + written)

    def section(self) -> str:
        """The text below the head, as the last section of the expansion's card."""
        if not self.text:
            return ""
        about = "Sizes, results and names in it are those of the source."
        return f"\n## The card of the source\n\n{about}\n\n{shown_lines(self.text.expandtabs())}\n"


def source_card(folder: Path) -> SourceCard:
    """The card in a folder; an empty one where there is none, or none that can be read."""
    try:
        if not has(folder, CARD):
            return SourceCard()
        with file_inside(folder.resolve(), CARD) as file:
            text = read_open(file, MAX_TEXT).decode(errors="replace").replace("\r\n", "\n")
    except (BadCheckpoint, OSError):
        return SourceCard()
    if "\0" in text:
        return SourceCard()
    parts = _PARTS.match(text)
    if parts and (card := _read(parts[1], parts[2].strip())):
        return card
    # A head that is not plain YAML: the licence must not be lost all the same.
    head, below = (parts[1], parts[2]) if parts else (text[:_HEAD], text)
    lines = [(found[1], f"{found[0]}\n") for found in _LICENCE.finditer(head)]
    return SourceCard(dict(lines) if len(dict(lines)) == len(lines) else {}, text=below.strip())


def _read(head: str, text: str) -> SourceCard | None:
    """The card with its fields cut out of the head: a value that is parsed and written again can change.

    None where the head is not plain YAML. YAML 1.1 reads `language: no` as false. No values are made, so nested aliases
    fill no memory.
    """
    try:
        root = yaml.compose(head, yaml.SafeLoader)
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(head, yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        return None
    if not isinstance(root, yaml.MappingNode) or aliases or any(key.start_mark.column for key, _ in root.value):
        return None
    begin = [key.start_mark.index for key, _ in root.value]
    ends = [*begin[1:], len(head)]
    values = {str(key.value): value for key, value in root.value}
    if len(values) < len(begin):  # a field is given twice
        return None
    cut = {name: head[a:b] for name, a, b in zip(values, begin, ends, strict=True)}
    fields = {name: lines for name, lines in cut.items() if not _TAGGED.search(lines)}
    return SourceCard(fields, _words(values.get("tags")), _words(values.get("base_model")), text)


def _words(value: yaml.Node | None) -> tuple[str, ...]:
    nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
    return tuple(node.value for node in nodes if isinstance(node, yaml.ScalarNode) and node.value)
