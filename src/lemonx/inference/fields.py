"""The sizes in a config: told from their names, and from what becomes of the parameters when one of them changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import LemonxError
from lemonx.inference.running import Runner, Values
from lemonx.inference.size_names import KEPT, meaning
from lemonx.planning.depth import arrange
from lemonx.specs.config import flat_fields, with_fields
from lemonx.specs.spec import Stack

DEPTH = "depth"
# By how much each size is multiplied where all grow together: those that agree by accident come apart.
_TIMES = {"width": 2, "heads": 2, "kv_heads": 2, "ffn": 3}
# So many blocks of each stack are enough to find out how it is made up.
FEW = 4
# Numbers of tokens, of labels and of attempts are no sizes.
_NO_SIZE = ("_token_id", "_token_index", "_id", "_ids", "_index", "num_return_sequences", "num_beams", "num_labels")
_LONGEST_LIST = 16


@dataclass(frozen=True)
class Field:
    """A number in a config: its name, dots leading into parts, and its place where it is in a list.

    `option`: what it is called on the command line, if anything. `value`: what it is in the config.
    """

    name: str
    value: int
    option: str = ""
    index: int | None = None

    @property
    def times(self) -> int:
        return _TIMES.get(self.option, 1)

    def read(self, flat: Mapping[str, JsonValue]) -> int:
        """Its value in another config of the same class."""
        value = flat[self.name]
        number = value[self.index] if isinstance(value, list) and self.index is not None else value
        assert isinstance(number, int)
        return number


def changed(values: Values, sizes: Mapping[Field, int]) -> dict[str, JsonValue]:
    """A config with other sizes."""
    flat, new = flat_fields(values), dict[str, JsonValue]()
    for field, size in sizes.items():
        old = new.get(field.name, flat.get(field.name))
        if field.index is None or not isinstance(old, list):
            new[field.name] = size
        else:
            new[field.name] = [size if place == field.index else value for place, value in enumerate(old)]
    return with_fields(values, new)


def block_lists(values: Values, depth: Field) -> list[str]:
    """The fields beside a depth that have an entry for every block.

    A list that stands beside one of sizes, by its first word, has an entry for each of those: the kernels of
    convolutions, of which there may be as many as blocks.

    >>> sizes = {"layer_types": ["full", "window"], "conv_dim": [32, 32], "conv_kernel": [10, 3]}
    >>> block_lists({"num_hidden_layers": 2, **sizes}, Field("num_hidden_layers", 2))
    ['layer_types']
    """
    part = depth.name.rpartition(".")[0]
    lists = {
        name.rpartition(".")[2]: name
        for name, value in flat_fields(values).items()
        if name.rpartition(".")[0] == part and isinstance(value, list) and len(value) == depth.value and value
    }
    sized = {last for last, name in lists.items() if meaning(last, flat_fields(values)[name])}
    words = {last.partition("_")[0] for last in sized}
    others = {last: name for last, name in lists.items() if last not in sized and last.partition("_")[0] not in words}
    return list(others.values()) if depth.index is None else []


def deeper(values: Values, fields: list[Field]) -> dict[str, JsonValue]:
    """A config with more blocks in every stack: one in the first, two in the second, so that each is known by it."""
    flat, lists = flat_fields(values), dict[str, JsonValue]()
    depths = {field: field.value + place for place, field in enumerate((f for f in fields if f.option == DEPTH), 1)}
    for depth, size in depths.items():
        for name in block_lists(values, depth):
            blocks = arrange(name, Stack(depth.value, ""), size)
            lists[name] = [_entry(flat[name], block.source) for block in blocks]
    return changed(with_fields(values, lists), depths)


def shallower(values: Values) -> dict[str, JsonValue]:
    """A config with few blocks in every stack, of every kind that its lists tell apart."""
    flat, new = flat_fields(values), dict[str, JsonValue]()
    for name, value in flat.items():
        if not isinstance(value, int) or value <= FEW or meaning(name.rpartition(".")[2], value) != DEPTH:
            continue
        lists = block_lists(values, Field(name, value, DEPTH))
        kinds: dict[str, int] = {}
        for block in range(value):
            kinds.setdefault(str([_entry(flat[other], block) for other in lists]), block)
        first = sorted(kinds.values())
        chosen = sorted({*first, *range(value)} if len(first) >= value else {*first, *_more(first, value)})
        new[name] = len(chosen)
        new |= {other: [_entry(flat[other], block) for block in chosen] for other in lists}
    return with_fields(values, new)


def _more(first: list[int], count: int) -> list[int]:
    """Further blocks, up to a few in all."""
    return [block for block in range(count) if block not in first][: max(0, FEW - len(first))]


def _entry(value: JsonValue, place: int) -> JsonValue:
    assert isinstance(value, list)
    return value[place]


def size_fields(runner: Runner, values: Values) -> list[Field]:
    """Every field that parameters depend on, and those that the heads of attention are known by."""
    before = runner.shapes(values)
    return [field for field in _candidates(values) if _is_size(runner, values, field, before)]


def _candidates(values: Values) -> Iterator[Field]:
    for name, value in flat_fields(values).items():
        last = name.rpartition(".")[2]
        if last in KEPT or last.endswith(_NO_SIZE) or last.startswith("_"):
            continue
        option = meaning(last, value)
        if isinstance(value, list) and len(value) <= _LONGEST_LIST:
            for place, number in enumerate(value):
                if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                    yield Field(name, number, option, place)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield Field(name, value, option)


def _is_size(runner: Runner, values: Values, field: Field, before: Mapping[str, tuple[int, ...]]) -> bool:
    size = field.value + 1 if field.option == DEPTH else 2 * field.value
    try:
        after = runner.shapes(changed(values, {field: size}))
    except LemonxError:  # it may not change alone
        return bool(field.option)
    if after.keys() != before.keys():
        return field.option == DEPTH
    return after != before or field.option in ("heads", "kv_heads")
