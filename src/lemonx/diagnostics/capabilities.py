"""What can grow in which family, and how exactly: derived from the specs by asking the type check.

Each family is tried at the default sizes of its transformers config, once for every size that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

from lemonx import architectures
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import LemonxError, Refused
from lemonx.options.sizes import Relative
from lemonx.planning.notices import conditions
from lemonx.planning.request import Target, target_config
from lemonx.planning.typecheck import check, with_tied
from lemonx.specs.config import TIED
from lemonx.specs.family import Architecture, FieldSize

COLUMNS = ("width x2", "width x1.5", "depth", "heads", "kv_heads", "ffn", "head_dim", "vocab", "experts")


class Verdict(Enum):
    """Whether a size of a family can grow without changing the function; NONE: the family has no such size."""

    EXACT = "exact"
    REFUSED = "refused"
    NONE = "-"


@dataclass(frozen=True)
class Cell:
    """Whether a size can grow, under which conditions (`notes`), or why it cannot (`refusal`).

    `target`: the sizes that were asked for.
    """

    verdict: Verdict
    notes: tuple[str, ...] = ()
    refusal: LemonxError | None = None
    target: Target | None = None

    @property
    def note(self) -> str:
        """What a reader should know besides the verdict; may be empty."""
        return str(self.refusal) if self.refusal else ", ".join(self.notes)

    def as_dict(self) -> dict[str, JsonValue]:
        refusal = self.refusal and self.refusal.as_dict()
        return {"verdict": self.verdict.value, "notes": list(self.notes), "refusal": refusal}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Cell:
        """The cell of which `as_dict` gave this."""
        said = stored["refusal"]
        refusal = Refused(said["found"], said["remedy"], file=said["file"]) if said else None
        return cls(Verdict(stored["verdict"]), tuple(stored["notes"]), refusal)


def matrix() -> dict[str, dict[str, Cell]]:
    """Model type -> column -> cell."""
    return {name: row(name) for name in sorted(architectures.families())}


def row(model_type: str) -> dict[str, Cell]:
    """Column -> cell of one family."""
    family, config = architectures.families()[model_type], {**default_config(model_type), "model_type": model_type}
    return {column: cell(family, config, column) for column in COLUMNS}


def default_config(model_type: str) -> Mapping[str, JsonValue]:
    """The config of a family with transformers' default sizes."""
    from transformers import AutoConfig

    from lemonx import models
    from lemonx.models.foreign import quiet

    models.register()
    with quiet():  # some defaults of transformers' own do not please it
        return AutoConfig.for_model(model_type).to_dict()


def cell(family: Architecture, config: Mapping[str, JsonValue], column: str) -> Cell:
    """The first of the ways to grow this size that is exact; else the last way's refusal."""
    answers = [_answer(family, config, wanted, note) for wanted, note in _ways(family, config, column)]
    exact = [answer for answer in answers if answer.verdict is Verdict.EXACT]
    return next(iter([*exact, *answers[::-1]]), Cell(Verdict.NONE))


def _answer(family: Architecture, config: Mapping[str, JsonValue], wanted: Target, note: str) -> Cell:
    values = family.config(config)
    try:
        new = target_config(family, config, wanted)
        source, target = family.spec(config), family.spec(new)
        rows = with_tied(source, [n for n, row in source.rows.items() if not row.optional])
        types = check(source, target, rows, values)
    except LemonxError as refusal:
        return Cell(Verdict.REFUSED, refusal=refusal, target=wanted)
    notes = [note, "by a change of basis" if types.framed else "", *conditions(source, target, types)]
    try:
        check(source, target, with_tied(source, list(source.rows)), values)
    except LemonxError as refusal:
        notes.append(f"not with every head: {refusal}")
    return Cell(Verdict.EXACT, tuple(filter(None, notes)), target=wanted)


def _ways(family: Architecture, config: Mapping[str, JsonValue], column: str) -> Iterator[tuple[Target, str]]:
    """Targets that grow this size: alone, or with what it is coupled to, as the note says."""
    if column == "ffn" and column not in family.sizes:
        column = "ffn_ratio"  # it is given in widths
    if column == "width x2":
        yield Target(width=Relative(times=Fraction(2))), ""
    elif column == "width x1.5":
        yield Target(width=Relative(times=Fraction(3, 2))), ""
        if family.spec(config).ties:
            yield Target(width=Relative(times=Fraction(3, 2)), fields={TIED: False}), f"with {TIED}=false"
        # Three heads cannot grow by half, but by a third; a prime number of heads by one.
        yield Target(width=Relative(times=Fraction(4, 3))), "at x4/3"
        if isinstance(heads := _sizes(family, config, "heads").get(family.sizes.get("heads", ("",))[0]), int):
            yield Target(width=Relative(times=Fraction(heads + 1, heads))), f"at x{heads + 1}/{heads}"
    elif column == "head_dim" and column not in family.sizes and "heads" in family.sizes:
        kept = _sizes(family, config, "heads") | _sizes(family, config, "kv_heads")
        yield Target(width=Relative(times=Fraction(2)), fields=kept), "together with the width"
    elif column in family.sizes and _is_asked(family, config, column):
        yield Target(fields=_grown(family, config, column)), ""
        if column == "head_dim":
            kept = _sizes(family, config, "heads") | _grown(family, config, column)
            yield Target(width=Relative(times=Fraction(2)), fields=kept), "together with the width"
        if column == "kv_heads":
            together = _grown(family, config, "heads") | _grown(family, config, "kv_heads")
            yield Target(fields=together), "together with heads"
        for stack in family.spec(config).stacks.values() if column == "depth" else ():
            if stack.stored != stack.size:
                grown = _grown(family, config, column)
                own = grown | {stack.sets_in: max(size for size in grown.values() if isinstance(size, int))}
                yield Target(fields=own), "with weights of its own for every layer"
        if column in ("heads", "kv_heads"):
            yield Target(width=Relative(times=Fraction(2))), "together with the width"


def _is_asked(family: Architecture, config: Mapping[str, JsonValue], column: str) -> bool:
    """Whether a model with this config has such a size; a Falcon whose heads share one key has no count of keys."""
    asked = family.config(config)
    family.build(asked)
    return not asked.asked.isdisjoint(family.sizes[column])


def _sizes(family: Architecture, config: Mapping[str, JsonValue], column: str) -> dict[str, FieldSize]:
    """The fields behind a column that have a size here, given or derived."""
    values = family.config(config)
    derived = family.build(values).config
    fields = [name for name in family.sizes.get(column, ()) if name in values.asked]
    return {name: size for name in fields if (size := derived.get(name) or values[name])}


def _grown(family: Architecture, config: Mapping[str, JsonValue], column: str) -> dict[str, FieldSize]:
    fields, values = family.sizes[column], family.config(config)
    grow: Callable[[int], int] = (lambda n: n + 2) if column == "depth" else (lambda n: n * 2)
    given = _sizes(family, config, column)
    if not given:
        # A size that follows the width unless it is given, such as GPT-2's inner size or all heads' own.
        base = values[family.sizes["heads" if column == "kv_heads" else "width"][0]]
        return {name: base * (2 if column == "kv_heads" else 8) for name in fields}
    return {n: [grow(v) for v in value] if isinstance(value, list) else grow(value) for n, value in given.items()}
