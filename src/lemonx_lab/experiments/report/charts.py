"""Charts as inline SVG: thin lines, one colour per method, a mark to reach; hovering over a point shows its value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

Text = Callable[[float], str]
Point = tuple[float, float]

WIDTH, HEIGHT = 460.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 22.0, 14.0, 44.0
STRIP_WIDTH, STRIP_HEIGHT = 150.0, 18.0
# A letter of the labels, about, in units of the drawing; enough to keep labels apart.
_LETTER, _LINE = 6.6, 14.0
_LONGEST_LABEL = 26
# Where the name of a line may stand, from its end.
_OFFSETS = (-8, 18, -22, 32, -36, 46)


@dataclass(frozen=True)
class Style:
    """How an arm looks everywhere: a colour and a dash of the style sheet; `strong` lines are drawn thicker."""

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

    def tick(self, value: float) -> str:
        return escape((self.short or self.text)(value))

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
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
class Chart:
    """A chart; `mark`: a horizontal line and its label."""

    key: str
    title: str
    description: str
    x: ChartAxis
    y: ChartAxis
    series: tuple[Series, ...]
    mark: tuple[float, str] | None = None

    def at(self, point: Point) -> Point:
        across = LEFT + self.x.place(point[0]) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (1 - self.y.place(point[1])) * (HEIGHT - TOP - BOTTOM)


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


def svg(chart: Chart) -> str:
    """The drawing; everything that is not a number is escaped."""
    return "".join(_parts(chart))


def _parts(chart: Chart) -> Iterator[str]:
    key = escape(chart.key)
    yield (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{escape(chart.title)}</title>'
        f'<desc id="{key}-desc">{escape(chart.description)}</desc>'
        f'<clipPath id="{key}-clip"><rect x="{LEFT:g}" y="{TOP - 4:g}" width="{WIDTH - LEFT - RIGHT + 6:g}" '
        f'height="{HEIGHT - TOP - BOTTOM + 6:g}"/></clipPath>'
    )
    yield from _axes(chart)
    if chart.mark:
        yield from _mark(chart, *chart.mark)
    yield f'<g clip-path="url(#{key}-clip)">'
    # The emphasised lines last: what is drawn later lies on top.
    for series in sorted(chart.series, key=lambda s: s.style.strong):
        yield from _line(chart, series)
    yield "</g>"
    yield from _labels(chart)
    yield "</svg>"


def _axes(chart: Chart) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in chart.y.ticks or ticks(chart.y.low, chart.y.high):
        y = chart.at((chart.x.low, value))[1]
        yield f'<line class="grid" x1="{LEFT:g}" y1="{y:.1f}" x2="{right:g}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{chart.y.tick(value)}</text>'
    yield f'<line class="axis" x1="{LEFT:g}" y1="{bottom:g}" x2="{right:g}" y2="{bottom:g}"/>'
    for value in chart.x.ticks or ticks(chart.x.low, chart.x.high):
        x = chart.at((value, chart.y.low))[0]
        yield f'<line class="axis" x1="{x:.1f}" y1="{bottom:g}" x2="{x:.1f}" y2="{bottom + 4:g}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 17:g}" text-anchor="middle">{chart.x.tick(value)}</text>'
    middle = (LEFT + right) / 2
    yield f'<text class="name" x="{middle:g}" y="{HEIGHT - 6:g}" text-anchor="middle">{escape(chart.x.label)}</text>'


def _mark(chart: Chart, value: float, label: str) -> Iterator[str]:
    y = chart.at((chart.x.low, value))[1]
    yield f'<line class="mark" x1="{LEFT:g}" y1="{y:.1f}" x2="{WIDTH - RIGHT:g}" y2="{y:.1f}"/>'
    yield f'<text class="marked" x="{LEFT + 4:g}" y="{_beside(y):.1f}">{escape(label)}</text>'


def _beside(y: float) -> float:
    """The line of text below the mark, or above it where the axis is near."""
    return y + 13 if y + 16 < HEIGHT - BOTTOM else y - 5


def _line(chart: Chart, series: Series) -> Iterator[str]:
    placed = [chart.at(point) for point in series.points]
    values = [[round(x, 1), round(y, 1), _value(chart, series, index)] for index, (x, y) in enumerate(placed)]
    yield (
        f'<g class="series {series.style.classes}" data-arm="{escape(series.label)}" '
        f'data-points="{escape(json.dumps(values))}"><title>{escape(series.label)}</title>'
    )
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}"/>'
    for point, spread in zip(series.points, series.spreads, strict=False):
        x, y = chart.at(point)
        if spread:
            (_, low), (_, high) = chart.at((point[0], point[1] - spread)), chart.at((point[0], point[1] + spread))
            yield f'<line class="whisker" x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if not series.spreads and placed:
        yield f'<circle cx="{placed[-1][0]:.1f}" cy="{placed[-1][1]:.1f}" r="2.5"/>'
    yield "</g>"


def _value(chart: Chart, series: Series, index: int) -> str:
    """`validation loss 1.5250 ± 0.0031 at 600 steps`."""
    x, y = series.points[index]
    spread = series.spreads[index] if series.spreads else None
    behind = "" if spread is None else f" ± {chart.y.text(spread)}"
    return f"{chart.y.label} {chart.y.text(y)}{behind} at {chart.x.text(x)} {chart.x.unit}"


def _labels(chart: Chart) -> Iterator[str]:
    """Names of lines at their ends, each in the first place where it covers no other label."""
    taken: list[tuple[float, float, float]] = []
    if chart.mark:
        value, text = chart.mark
        taken.append((LEFT, LEFT + _LETTER * len(text), _beside(chart.at((chart.x.low, value))[1])))
    for series in chart.series:
        if not series.style.labelled or not series.points:
            continue
        text, (x, y) = shortened(series.label), chart.at(series.points[-1])
        width = _LETTER * len(text)
        # To the left of the line's end where there is more room; a long name stays inside the drawing.
        left = max(x - width, LEFT) if x > (LEFT + WIDTH - RIGHT) / 2 else min(x, WIDTH - RIGHT - width)
        lines = [min(max(y + offset, TOP + 8), HEIGHT - BOTTOM - 4) for offset in _OFFSETS]
        clear = (n for n in lines if all(abs(n - m) >= _LINE or left > b or left + width < a for a, b, m in taken))
        line = next(clear, lines[0])
        taken.append((left, left + width, line))
        yield (
            f'<text class="label {series.style.classes}" x="{left + width:.1f}" y="{line:.1f}" text-anchor="end" '
            f'data-arm="{escape(series.label)}">{escape(text)}</text>'
        )


def shortened(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def strip(values: Sequence[float], mean: float, *, full: float, style: Style, open_end: bool, title: str) -> str:
    """Steps on a line from 0 to `full`, which is ticked: rings for seeds, a dot for the mean, an arrow for more."""
    pad = 6.0

    def across(value: float) -> float:
        return pad + min(value / full, 1.12) * (STRIP_WIDTH - 2 * pad) / 1.12

    middle, end = STRIP_HEIGHT / 2, across(full)
    parts = [
        f'<svg class="strip" viewBox="0 0 {STRIP_WIDTH:g} {STRIP_HEIGHT:g}" role="img"><title>{escape(title)}</title>',
        f'<line class="grid" x1="{pad:g}" y1="{middle:g}" x2="{STRIP_WIDTH - pad:g}" y2="{middle:g}"/>',
        f'<line class="mark" x1="{end:.1f}" y1="1" x2="{end:.1f}" y2="{STRIP_HEIGHT - 1:g}"/>',
        f'<g class="series {style.classes}">',
        f'<line class="bar" x1="{pad:g}" y1="{middle:g}" x2="{across(mean):.1f}" y2="{middle:g}"/>',
    ]
    if open_end:
        tip = min(across(mean) + 8, STRIP_WIDTH - 1)
        parts.append(f'<path class="arrow" d="M{tip - 5:.1f} {middle - 4:g}L{tip:.1f} {middle:g}l-5 4"/>')
    else:
        parts += [f'<circle class="seed" cx="{across(v):.1f}" cy="{middle:g}" r="3.2"/>' for v in values]
        parts.append(f'<circle cx="{across(mean):.1f}" cy="{middle:g}" r="3.6"/>')
    return "".join([*parts, "</g></svg>"])
