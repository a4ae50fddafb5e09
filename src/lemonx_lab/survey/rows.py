"""The rows of a survey, one for every model type in a task, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lemonx.checkpoints.creating import write_whole
from lemonx.checkpoints.opening import read_file
from lemonx.errors import BadData

# The outputs are equal, or as close as the certificate said.
EXACT, UP_TO_EPS = "exact", "to eps"
# lemonx refused before it wrote anything; accepted a plan, and its own verification then failed; failed with a crash.
REFUSED, NOT_VERIFIED, FAILED = "refused", "not verified", "failed"
# lemonx certified the larger model, and its outputs differ. No output has a size or a beginning to compare.
WRONG, NOT_COMPARED = "wrong", "not compared"

_LARGEST_FILE = 2**26
# An exact growth counts if the outputs that are compared read at least this share of the parameters.
ENOUGH = 0.98

# A column -> the options of `lemonx expand`.
COLUMNS: Mapping[str, Sequence[str]] = {
    "width 2x": ("--width", "2x"),
    "width 1.5x": ("--width", "1.5x"),
    "depth +1": ("--depth", "+1"),
}


@dataclass(frozen=True)
class Cell:
    """The result of one growth; `difference`: of the outputs, relative to the largest; `why`: if not plainly exact."""

    kind: str
    difference: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One model type in one task: whether its tiny model runs, what its inputs read, and the result of each growth.

    `share` and `unread`: of the parameters, what the compared outputs depend on. `cells`: column -> result.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    model_type: str
    task: str
    model_class: str = ""
    built: bool = False
    why: str = ""
    share: float | None = None
    unread: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        """The tiny model ran."""
        return bool(self.inputs)

    @property
    def is_read(self) -> bool:
        """The compared outputs read enough of the parameters."""
        return (self.share or 0.0) >= ENOUGH

    def grown(self, *kinds: str) -> set[str]:
        """The columns with one of these results; none of a row that is read too little."""
        return {column for column, cell in self.cells.items() if cell.kind in kinds} if self.is_read else set()


@dataclass(frozen=True)
class Record:
    """Rows, and the version of transformers that they were measured with."""

    transformers: str
    rows: list[Row]

    @staticmethod
    def read(path: Path | None) -> Record:
        """A record; an empty one if there is no file yet."""
        if path is None or not path.exists():
            return Record(version("transformers"), [])
        try:
            return TypeAdapter(Record).validate_json(read_file(path, _LARGEST_FILE))
        except ValidationError as error:
            found = error.errors()[0]["msg"]
            raise BadData(f"is not a record of a survey ({found})", "give another file", file=path) from None

    def write(self, path: Path) -> None:
        """Replace the file as a whole; a row is a line, without fields that have their default."""
        entries = (TypeAdapter(Row).dump_python(row, exclude_defaults=True) for row in self.rows)
        lines = ",\n".join(map(json.dumps, entries))
        write_whole(path, f'{{"transformers": {json.dumps(self.transformers)}, "rows": [\n{lines}\n]}}\n')
