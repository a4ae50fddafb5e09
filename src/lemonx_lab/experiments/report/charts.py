"""Charts: where lines, ticks and labels lie. page.html draws them as inline SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Text = Callable[[float], str]
Point = tuple[float, float]

WIDTH, HEIGHT = 460.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 22.0, 14.0, 44.0
STRIP_WIDTH = 150.0
# The frame of every chart, for the template.
FRAME = {
    "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM
}  # fmt: skip
# A letter of the labels, about, in units of the drawing; enough to keep labels apart.
_LETTER, _LINE = 6.6, 14.0
_LONGEST_LABEL = 26
# Where the name of a line may stand, from its end.
_OFFSETS = (-8, 18, -22, 32, -36, 46)


@dataclass(frozen=True)
class Style:
    """The look of an arm everywhere: a colour and a dash of the style sheet; `strong` lines are drawn thicker."""

    colour: int
    dash: int
    strong: bool
    labelled: bool = False

    @property
    def classes(self) -> str:
        return f"c{self.colour} d{self.dash}{' strong' if self.strong else ''}"


@dataclass(frozen=True)
class ChartAxis:
    """An axis from `low` to `high`; `text` formats values, followed by the unit, and `short` formats ticks.

    `ticks` where they are given, round numbers otherwise.
    """

    label: str
    low: float
    high: float
    text: Text
    unit: str = ""
    short: Text | None = None
    log: bool = False
    ticks: tuple[float, ...] = ()

    def marks(self) -> list[tuple[float, str]]:
        """The place of each tick, from 0 to 1, and its text."""
        found = self.ticks or ticks(self.low, self.high)
        return [(self.place(value), (self.short or self.text)(value)) for value in found]

    def place(self, value: float) -> float:
        """The place of a value, from 0 to 1."""
        shape = math.log if self.log else float
        low, high = shape(self.low), shape(self.high)
        return 0.5 if high == low else (shape(value) - low) / (high - low)


@dataclass(frozen=True)
class Series:
    label: str
    style: Style
    points: tuple[Point, ...]
    spreads: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Label:
    """The name of a line, which ends at (x, y)."""

    series: Series
    text: str
    x: float
    y: float


@dataclass(frozen=True)
class Chart:
    """A chart; `mark`: a horizontal line and its label."""

    key: str
    title: str
    description: str
    x: ChartAxis
    y: ChartAxis
    series: tuple[Series, ...]
    mark: tuple[float, str] | None = None

    def across(self, place: float) -> float:
        return LEFT + place * (WIDTH - LEFT - RIGHT)

    def down(self, place: float) -> float:
        return TOP + (1 - place) * (HEIGHT - TOP - BOTTOM)

    def at(self, point: Point) -> Point:
        return self.across(self.x.place(point[0])), self.down(self.y.place(point[1]))

    def lines(self) -> list[Series]:
        """The emphasised lines last: a later line lies on top."""
        return sorted(self.series, key=lambda one: one.style.strong)

    def hints(self, series: Series) -> str:
        """The place of every point and the words that are shown beside it, as JSON."""
        spreads = series.spreads or (None,) * len(series.points)
        found: list[tuple[float, float, str]] = []
        for point, spread in zip(series.points, spreads, strict=True):
            (x, y), behind = self.at(point), "" if spread is None else f" ± {self.y.text(spread)}"
            words = f"{self.y.label} {self.y.text(point[1])}{behind} at {self.x.text(point[0])} {self.x.unit}"
            found.append((round(x, 1), round(y, 1), words))
        return json.dumps(found)

    def whiskers(self, series: Series) -> list[tuple[float, float, float]]:
        """A vertical line for every point with a spread: x, and its two ends."""
        pairs = zip(series.points, series.spreads, strict=False)
        return [(*self.at((x, y - spread)), self.at((x, y + spread))[1]) for (x, y), spread in pairs if spread]

    def mark_at(self) -> tuple[float, float]:
        """The height of the mark, and of its text: below the line, or above it where the axis is near."""
        assert self.mark is not None
        y = self.down(self.y.place(self.mark[0]))
        return y, y + 13 if y + 16 < HEIGHT - BOTTOM else y - 5

    def labels(self) -> Iterator[Label]:
        """Names of lines at their ends, each in the first place where it covers no other label."""
        taken: list[tuple[float, float, float]] = []
        if self.mark:
            taken.append((LEFT, LEFT + _LETTER * len(self.mark[1]), self.mark_at()[1]))
        for series in self.series:
            if not series.style.labelled or not series.points:
                continue
            text, (x, y) = shortened(series.label), self.at(series.points[-1])
            width = _LETTER * len(text)
            # To the left of the line's end where there is more room; a long name stays inside the drawing.
            left = max(x - width, LEFT) if x > (LEFT + WIDTH - RIGHT) / 2 else min(x, WIDTH - RIGHT - width)
            lines = [min(max(y + offset, TOP + 8), HEIGHT - BOTTOM - 4) for offset in _OFFSETS]
            clear = (n for n in lines if all(abs(n - m) >= _LINE or left > b or left + width < a for a, b, m in taken))
            line = next(clear, lines[0])
            taken.append((left, left + width, line))
            yield Label(series, text, left + width, line)


@dataclass(frozen=True)
class Strip:
    """Steps on a line from 0 to `full`, which is ticked: rings for seeds, a dot for the mean, an arrow for more."""

    seeds: Sequence[float]
    mean: float
    full: float
    style: Style
    is_open: bool
    title: str

    def across(self, value: float) -> float:
        return 6 + min(value / self.full, 1.12) * (STRIP_WIDTH - 12) / 1.12

    @property
    def tip(self) -> float:
        return min(self.across(self.mean) + 8, STRIP_WIDTH - 1)


def finite(points: Sequence[tuple[float | None, float | None]]) -> tuple[Point, ...]:
    """The points that can be drawn: a run that diverged has others."""
    return tuple((x, y) for x, y in points if x is not None and y is not None and math.isfinite(x) and math.isfinite(y))


def ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Round numbers, about `count` of them.

    >>> ticks(0, 1000)
    (0.0, 200.0, 400.0, 600.0, 800.0, 1000.0)
    """
    if not high > low:
        return (low,)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= raw * 0.999), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return tuple(n * step for n in range(first, math.floor(high / step + 1e-9) + 1))


def shortened(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
