"""Numbers of a result for the page: each knows its place in result.json, so that a test can compare the two."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lemonx_lab.experiments.report.charts import Text
from lemonx_lab.experiments.result_file import Result


@dataclass(frozen=True)
class Number:
    """A value, how it reads, and its path in the list of results (`0/mark/mean`)."""

    value: str
    text: str
    path: str


@dataclass(frozen=True)
class Mean:
    """A mean with its spread over seeds, words before it and a unit after it."""

    mean: Number
    spread: Number | None
    before: str = ""
    unit: str = ""


class Numbers:
    """Takes numbers out of one result."""

    def __init__(self, content: Result, index: int) -> None:
        self._content, self._index = content, index

    def one(self, *path: str | int, text: Text = str) -> Number:
        value: Any = self._content
        for key in path:
            value = value[key]
        assert isinstance(value, int | float | None), path
        return Number(json.dumps(value), "" if value is None else text(value), "/".join(map(str, (self._index, *path))))

    def mean(self, *path: str | int, text: Text = str, before: str = "", unit: str = "") -> Mean:
        spread = self.one(*path, "spread", text=text)
        mean = self.one(*path, "mean", text=text)
        return Mean(mean, None if spread.value == "null" else spread, before, unit)
