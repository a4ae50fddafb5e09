"""The model card of a source: the base of the card of its expansion."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lemonx.checkpoints.folder import has
from lemonx.checkpoints.opening import MAX_TEXT, file_inside, read_open
from lemonx.checkpoints.replaceable import CARD
from lemonx.errors import BadCheckpoint
from lemonx.guards.shown import shown_lines
from lemonx.hub import names

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
