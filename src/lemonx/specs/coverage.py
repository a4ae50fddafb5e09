"""Coverage, both ways: every tensor of a file has one row, every row has its tensors, in every block."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lemonx.checkpoints import TensorInfo
from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint, raise_first
from lemonx.specs.config import field_at
from lemonx.specs.norms import Norm
from lemonx.specs.spec import LAST, Spec, is_bare
from lemonx.specs.weights import Dropped, Embedding, Linear

NO_ROW = (
    "if it belongs to the head, expand the base model without it, which "
    "AutoModel.from_pretrained(...).save_pretrained(...) saves"
)
NO_ROW_OF_THE_FAMILY = "`lemonx architectures --why` shows what else this checkpoint has that its family has not"
# Names that older files use for a norm's parameters.
OLD_NAMES = {"gamma": "weight", "beta": "bias"}
# The place of a unit's index in a row's name.
UNIT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Matched:
    """A tensor of a file and the row it belongs to; `stack` and `index` say which block it is in.

    `bare`: how many first letters of the stack's name this file leaves out, being a base model's. `unit`: which unit
    of a space it belongs to, if the row's name has one.
    """

    name: str
    row: str
    suffix: str
    stack: str | None
    index: int
    bare: int
    unit: int | None = None

    def named(self, index: int, unit: int | None = None) -> str:
        """The name of the same tensor in block `index`, of `unit`, with an old suffix brought up to date."""
        name = self.name
        if self.stack is not None:
            stack = self.stack[self.bare :]
            inside = self.name.removeprefix(f"{stack}.{self.index}.")
            if unit is not None:
                inside = inside.replace(f".{self.unit}.", f".{unit}.", 1)
            name = f"{stack}.{index}.{inside}"
        stem, _, last = name.rpartition(".")
        return f"{stem}.{self.suffix}" if OLD_NAMES.get(last) == self.suffix else name


def _patterns(spec: Spec) -> dict[str, tuple[str, str]]:
    """Tensor name, with `*` for a block's index -> (row, suffix)."""
    result = {}
    for name, row in spec.rows.items():
        for suffix in row.tensors():
            # Experts in one tensor have no module: their bias is named like their weight (`up_proj_bias`).
            full = f"{name}{suffix}" if suffix.startswith("_") else f"{name}.{suffix}" if suffix else name
            result[UNIT.sub("{}", full)] = (name, suffix)
        if isinstance(row, Norm):
            result |= {f"{name}.{old}": (name, new) for old, new in OLD_NAMES.items()}
    return result


def match(spec: Spec, names: Iterable[str]) -> list[Matched]:
    """Every tensor with its row; BadCheckpoint where one has none, or a row lacks a tensor."""
    found, unknown = matched(spec, names)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise BadCheckpoint(
            f"lemonx does not know what the tensor {unknown[0]!r}{more} does in this model",
            without_row(spec, unknown[0], is_base(found)),
        )
    raise_first(gaps(spec, found))
    return found


def is_base(found: Iterable[Matched]) -> bool:
    """Whether a file's names are those of a base model, which has no head to leave out."""
    return any(hit.bare for hit in found)


def without_row(spec: Spec, name: str, base: bool) -> str:
    """What to say of a tensor that has no row: a head can be left out, a part of a block or of a base model cannot."""
    in_a_block = any(_place(spec, full)[0] is not None for full in (name, spec.prefix + name))
    return NO_ROW_OF_THE_FAMILY if in_a_block or base else NO_ROW


def matched(spec: Spec, names: Iterable[str]) -> tuple[list[Matched], list[str]]:
    """Every tensor that has a row, and the names of those that have none."""
    patterns, found, unknown = _patterns(spec), list[Matched](), list[str]()
    for name in names:
        hit = next((hit for full in (name, spec.prefix + name) if (hit := _find(spec, patterns, name, full))), None)
        if hit is None:
            unknown.append(name)
        else:
            found.append(hit)
    return found, unknown


def gaps(spec: Spec, found: list[Matched]) -> Iterator[BadCheckpoint]:
    """A complaint for every tensor under two names, every block too many or too few, every row without a tensor."""
    yield from _repeated(found)
    for name, stack in spec.stacks.items():
        if stack.stored > len(found):  # a list of all that is missing might not fit into memory
            yield BadCheckpoint(
                f"says {stack.stored} layers in {name!r}, but the weights have {len(found)} tensors in all",
                "take config.json and the weights from the same save",
                file=CONFIG,
            )
            return
    yield from _odd_blocks(spec, found)
    yield from _empty_rows(spec, found)


def unmatched(spec: Spec, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tensors without a row, and rows that must have a tensor and have none."""
    found, unknown = matched(spec, names)
    begun = {hit.row for hit in found}
    empty = [name for name, row in spec.rows.items() if not row.optional and row.tensors() and name not in begun]
    return unknown, empty


def _find(spec: Spec, patterns: Mapping[str, tuple[str, str]], name: str, full: str) -> Matched | None:
    stack, index = _place(spec, full)
    inside = full if stack is None else full.removeprefix(f"{stack}.{index}.")
    starred = full if stack is None else f"{stack}.*.{inside}"
    # A block's own row (`layers.0.conv`) goes before the general one (`layers.*.conv`).
    row, unit = patterns.get(full), None
    if not row and stack is not None and index == spec.stacks[stack].stored - 1:
        row = patterns.get(f"{stack}.{LAST}.{inside}")
    row = row or patterns.get(starred)
    if not row and (number := re.search(r"\.(\d+)\.", starred)):
        row, unit = patterns.get(starred.replace(number[0], ".{}.", 1)), int(number[1])
    return row and Matched(name, *row, stack, index, len(full) - len(name), unit if row else None)


def _place(spec: Spec, full: str) -> tuple[str | None, int]:
    """The stack and the index of the block that a tensor is in."""
    for stack in spec.stacks:
        index = full[len(stack) + 1 :].partition(".")[0]
        if full.startswith(f"{stack}.") and index.isdecimal():
            return stack, int(index)
    return None, 0


def _repeated(found: list[Matched]) -> Iterator[BadCheckpoint]:
    """No tensor under two names: an old suffix beside the new one, or with and without prefix."""
    seen: dict[tuple[str, str, int, int | None], str] = {}
    for hit in found:
        other = seen.setdefault((hit.row, hit.suffix, hit.index, hit.unit), hit.name)
        if other != hit.name:
            yield BadCheckpoint(
                f"the tensors {other!r} and {hit.name!r} are two names of one weight", "remove one of them"
            )


def _empty_rows(spec: Spec, found: list[Matched]) -> Iterator[BadCheckpoint]:
    """Rows that are not optional have tensors; rows with any tensor have their first (a tied weight is elsewhere)."""
    present = {(hit.row, hit.suffix) for hit in found}
    begun = {row for row, _ in present}
    for name, row in spec.rows.items():
        stack = spec.stack_of(name) if "*" in name else None
        asked = not row.optional and (stack is None or bool(_users(spec, stack, name)))
        tied = isinstance(row, Linear) and row.tied is not None
        first = next(iter(row.tensors()), None)
        if first is not None and (asked or name in begun) and (name, first) not in present and not tied:
            yield BadCheckpoint(
                f"the weights have no tensor for {name!r}, which config.json asks for", "save the whole model again"
            )


def _users(spec: Spec, stack: str, row: str) -> set[int]:
    """The blocks that use a general row: those without a row of their own under its name (a strided first block)."""
    own = {i for i in range(spec.stacks[stack].stored) if row.replace(f"{stack}.*.", f"{stack}.{i}.") in spec.rows}
    if row.replace(f"{stack}.*.", f"{stack}.{LAST}.") in spec.rows:
        own.add(spec.stacks[stack].stored - 1)
    return set(range(spec.stacks[stack].stored)) - own


def _odd_blocks(spec: Spec, found: list[Matched]) -> Iterator[BadCheckpoint]:
    blocks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for hit in found:
        if hit.stack is not None and "*" in hit.row and not isinstance(spec.rows[hit.row], Dropped):
            for row in (hit.row, UNIT.sub(str(hit.unit), hit.row)):
                blocks[hit.stack, row, hit.suffix].add(hit.index)
    yield from _odd_units(spec, found)
    for (stack, row, suffix), indices in blocks.items():
        size, wanted = spec.stacks[stack].stored, _users(spec, stack, row)
        for odd in sorted(indices ^ wanted):
            what = "lack" if odd in wanted else "have an extra"
            yield BadCheckpoint(
                f"says {size} layers in {stack!r}, but the weights {what} {row.replace('*', str(odd))}.{suffix}",
                "take config.json and the weights from the same save",
                file=CONFIG,
            )


def _odd_units(spec: Spec, found: list[Matched]) -> Iterator[BadCheckpoint]:
    """As many experts as the config says."""
    for row in {hit.row for hit in found if hit.unit is not None}:
        name = UNIT.findall(row)[0]
        size, units = spec.spaces[name].size, {hit.unit for hit in found if hit.row == row}
        if len(units) != size or units != set(range(size)):
            yield BadCheckpoint(
                f"says {size} {name}, but the weights have {len(units)} of {row}",
                "take config.json and the weights from the same save",
                file=CONFIG,
            )


def tied_copies(spec: Spec, found: Iterable[Matched]) -> list[tuple[Matched, str]]:
    """Tensors that a file repeats although they are tied, with the row they must equal."""
    return [
        (hit, row.tied)
        for hit in found
        if isinstance(row := spec.rows[hit.row], Linear | Embedding) and row.tied and hit.suffix == "weight"
    ]


def settled(spec: Spec, found: Iterable[Matched]) -> Spec:
    """The spec of this very file: decoders that it has a weight for are not tied, if they need not be."""
    stored = {hit.row for hit in found if hit.suffix == "weight"}
    free = {name: replace(row, tied=None) for name, row in spec.rows.items()
            if name in stored and isinstance(row, Linear) and row.own}  # fmt: skip
    return replace(spec, rows={**spec.rows, **free}) if free else spec


def tensor_problems(spec: Spec, hit: Matched, info: TensorInfo, floats: Iterable[str]) -> Iterator[BadCheckpoint]:
    """A complaint if a tensor's shape is not what the config makes it, or its dtype is none of `floats`.

    What a model computes by itself, and an expansion drops, may be of any shape and dtype.
    """
    row = spec.rows[hit.row]
    if isinstance(row, Dropped):
        return
    axes = row.tensors()[hit.suffix]
    wanted = tuple(spec.side_size(axis.side) for axis in axes)
    fits = len(wanted) == len(info.shape) and all(w in (None, s) for w, s in zip(wanted, info.shape, strict=True))
    if not fits:
        said = ["any" if w is None else w for w in wanted]
        yield BadCheckpoint(
            f"holds {hit.name} with shape {list(info.shape)}, but config.json makes it {said}",
            "give the config.json that belongs to these weights",
            file=info.file.name,
        )
    if info.dtype not in floats and axes:
        yield BadCheckpoint(
            f"holds {hit.name} as {info.dtype}, which is not a float that can be expanded",
            "dequantise it first",
            file=info.file.name,
        )


def lost_head(spec: Spec, rows: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """What is amiss if config.json names a class with a head, and of all that one could be made of, no row is there."""
    outside = [name for name, row in spec.rows.items()
               if not name.startswith(spec.prefix) and not isinstance(row, Dropped)]  # fmt: skip
    classes = config.get("architectures")
    named = next((name for name in classes if not is_bare(name)), None) if isinstance(classes, list) else None
    if not (spec.prefix and outside and named) or set(outside) & set(rows):
        return None
    return (
        f"names a {named}, but no file holds its head ({', '.join(outside)}), which transformers then draws at random"
    )


def eps_problems(spec: Spec, config: Mapping[str, Any]) -> Iterator[BadCheckpoint]:
    """A complaint for every eps of a norm that is no number to add to a variance: NaN, infinite, negative."""
    named = {spec.eps if row.eps is None else row.eps for row in spec.rows.values() if isinstance(row, Norm)}
    for field in sorted(name for name in named if isinstance(name, str)):
        value = config.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            yield BadCheckpoint(f"has {field} = {value!r}", "use a small positive number, such as 1e-5", file=CONFIG)


def list_problems(spec: Spec, config: Mapping[str, Any]) -> Iterator[BadCheckpoint]:
    """A complaint for every list of the config that should have one entry per block and does not."""
    for stack in spec.stacks.values():
        for field in stack.lists:
            if isinstance(value := field_at(config, field), list) and len(value) != stack.size:
                yield BadCheckpoint(
                    f"has {len(value)} entries in {field} for {stack.size} layers",
                    "give one entry per layer",
                    file=CONFIG,
                )
