"""Rows under the names that files have: transformers renames tensors when it saves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lemonx.errors import Refused
from lemonx.models.building import disk_names
from lemonx.specs.rows import Row
from lemonx.specs.weights import Dropped, Linear, dropped
from lemonx.tracing.blocks import starred
from lemonx.tracing.table import Held, Table

_TABLE = "write a table for it (docs/add-an-architecture.md)"


@dataclass
class OnDisk:
    """The rows of a table by their names in a file, and what each stack is called there."""

    rows: dict[str, Row]
    stacks: dict[str, str]


def on_disk(table: Table, model: Any, stacks: Mapping[str, int]) -> OnDisk:
    """The rows of an inferred table as a file names them; `model`: one in which every stack has several blocks."""
    return _Renaming(table, disk_names(model, buffers=True), model, stacks).done()


@dataclass
class _Renaming:
    table: Table
    names: Mapping[str, str]
    model: Any
    stacks: Mapping[str, int]

    def done(self) -> OnDisk:
        called = {name: self._stack(name) for name in self.stacks}
        rows = {old: self._renamed(old, row, called) for old, row in self.table.small.rows.items()}
        new = {name: row for name, row in rows.values()}
        if len(new) < len(rows):
            raise Refused("several modules share a name in the file", _TABLE)
        new = {name: self._tie(row, rows) for name, row in new.items()}
        return OnDisk({**new, **self._buffers(called)}, called)

    def _stack(self, stack: str) -> str:
        """What a stack is called in a file: what stands before the number that two blocks differ in."""
        first = self.stacks[stack]
        inside = next((name for name in self.names if name.startswith(f"{stack}.{first}.")), None)
        if inside is None:
            raise Refused(f"{stack} has no parameters", _TABLE)
        other = inside.replace(f"{stack}.{first}.", f"{stack}.{first + 1}.", 1)
        one, two = self.names[inside].split("."), self.names.get(other, "").split(".")
        differ = [place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b]
        if len(one) != len(two) or len(differ) != 1 or one[differ[0]] != str(first):
            raise Refused(f"a file does not name the blocks of {stack} by their numbers", _TABLE)
        return ".".join(one[: differ[0]])

    def _renamed(self, old: str, row: Row, called: Mapping[str, str]) -> tuple[str, Row]:
        """A row under its name in a file."""
        found, changed = set[str](), row
        for suffix in row.tensors():
            tensor = f"{old}.{suffix}" if suffix else old
            held = self.table.held.get(tensor)
            if held is None:
                continue
            changed = self._laid_out(changed, held, tensor)
            name = self._in_file(held.parameter, called)
            if suffix and not name.endswith(f".{suffix}"):
                raise Refused(f"a file calls {held.parameter} {name!r}, which no row can say", _TABLE)
            found.add(name.removesuffix(f".{suffix}") if suffix else name)
        if len(found) > 1:
            raise Refused(f"a file keeps the parts of {old} apart", _TABLE)
        return (found.pop() if found else self._moved(old, called)), changed

    def _laid_out(self, row: Row, held: Held, tensor: str) -> Row:
        """The row of a parameter whose axes lie in another order than rows have them by themselves."""
        if not held.order and not held.columns:
            return row
        if isinstance(row, Linear) and not held.columns and held.order == (1, 0):
            return replace(row, transposed=True)
        raise Refused(f"the axes of {held.parameter} lie in a way that no row can say", _TABLE)

    def _in_file(self, parameter: str, called: Mapping[str, str]) -> str:
        """The name of a parameter in a file, with `*` where the parameter has one."""
        stack = next((name for name in self.stacks if parameter.startswith(f"{name}.*.")), None)
        if stack is None:
            return self._known(parameter)
        first = self.stacks[stack]
        name = self._known(parameter.replace("*", str(first), 1))
        begin = f"{called[stack]}.{first}."
        if not name.startswith(begin):
            raise Refused(f"a file keeps {parameter} outside of its block", _TABLE)
        return f"{called[stack]}.*.{name.removeprefix(begin)}"

    def _known(self, parameter: str) -> str:
        if parameter not in self.names:
            raise Refused(f"a file does not hold {parameter}", _TABLE)
        return self.names[parameter]

    def _moved(self, old: str, called: Mapping[str, str]) -> str:
        """The name of a row without tensors: it only has to be in the right stack."""
        stack = next((name for name in self.stacks if old.startswith(f"{name}.")), None)
        return old if stack is None else called[stack] + old.removeprefix(stack)

    def _tie(self, row: Row, rows: Mapping[str, tuple[str, Row]]) -> Row:
        tied = getattr(row, "tied", None)
        return replace(row, tied=rows[tied][0]) if tied is not None else row  # type: ignore[call-arg]

    def _buffers(self, called: Mapping[str, str]) -> dict[str, Dropped]:
        """Saved numbers that are not learned, such as positions: a model makes them itself."""
        made = {name for name, tensor in self.model.named_buffers() if not tensor.is_floating_point()}
        found = {}
        for name in sorted(made & self.names.keys()):
            if not name.endswith("num_batches_tracked"):
                found[self._in_file(starred(name, self.stacks)[0], called)] = dropped()
        return found
