"""The charts of a result: final quality by length of the schedule, then the learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from lemonx.planning.summary import human
from lemonx_lab.experiments import wording
from lemonx_lab.experiments.report.charts import Chart, ChartAxis, Series, Style, Text, finite, svg
from lemonx_lab.experiments.report.parts import Charts, Keyed
from lemonx_lab.experiments.result_file import Curve, Result

# The first steps are far above all that follows: the frame begins where this part of the longest run is done.
_SETTLED = 0.1
_PADDING = 0.06
_MOST_TICKS = 6


def rate(value: float) -> str:
    """A learning rate.

    >>> rate(0.002), rate(0.000025)
    ('0.002', '2.5e-05')
    """
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """
    >>> seconds(41.52), seconds(0.4)
    ('41.5', '0.4')
    """
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


Column = Literal["step", "validation_loss", "learning_rate", "flops", "seconds"]


class Across(NamedTuple):
    """An x axis before its ends are known."""

    label: str
    text: Text
    unit: str


def charts(content: Result, looks: Mapping[str, Style], key: str) -> Charts:
    """The charts as SVG; without a curve there is none of its course."""
    shown = _shown(content)

    def course(name: str, column: Column, across: Across, y: Column = "validation_loss", text: Text = wording.metric):
        chart = _course(content, looks, shown, f"{key}-{name}", column, across, y, text)
        return svg(chart) if chart else ""

    steps = Across("steps", wording.steps, "steps")
    return Charts(
        finals=svg(_finals(content, looks, f"{key}-finals")),
        steps=course("steps", "step", steps),
        flops=course("flops", "flops", Across("FLOPs of the target's training", human, "FLOPs")),
        time=course("time", "seconds", Across("seconds of training", seconds, "s")),
        rate=course("rate", "step", steps, "learning_rate", rate),
        legend=[Keyed(label, look.classes) for label, look in looks.items()],
        seed=shown[0]["seed"] if shown else None,
    )


def _finals(content: Result, looks: Mapping[str, Style], key: str) -> Chart:
    series = []
    for arm in content["arms"]:
        points = [(at["steps"], at["mean"], at["spread"]) for at in arm["at"] if finite([(at["steps"], at["mean"])])]
        shape = tuple((float(n), mean) for n, mean, _ in points)
        series.append(Series(arm["label"], looks[arm["label"]], shape, tuple(spread for *_, spread in points)))
    mark, metric = content["mark"]["mean"], wording.name(content["experiment"]["metric"])
    ends = [
        y + sign * (spread or 0.0)
        for one in series
        for (_, y), spread in zip(one.points, one.spreads, strict=True)
        for sign in (-1, 1)
    ]
    lengths = sorted({x for one in series for x, _ in one.points} | {float(content["steps"])})
    return Chart(
        key,
        f"Final {metric} against the length of the schedule",
        f"Each point is the mean of the runs of one length over seeds, with its spread; the mark is {metric} "
        f"{wording.metric(mark)}, which {content['experiment']['baseline']} reaches.",
        # Between two lengths the answer is interpolated in log steps: there the lines are straight.
        ChartAxis(
            "steps of the schedule (log scale)", *_wide(lengths), wording.steps, "steps", None, True, _thinned(lengths)
        ),
        ChartAxis(metric, *_padded([*ends, mark]), wording.metric, short=_digits([*ends, mark])),
        tuple(series),
        mark=(mark, f"mark {wording.metric(mark)}"),
    )


def _wide(lengths: Sequence[float]) -> tuple[float, float]:
    """Room for the labels at both ends."""
    return lengths[0] / 1.06, lengths[-1] * 1.04


def _thinned(lengths: Sequence[float]) -> tuple[float, ...]:
    every = -(-len(lengths) // _MOST_TICKS)
    return tuple(reversed(lengths[::-1][::every]))


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = _PADDING * (high - low) or abs(high) * _PADDING or 1.0
    return low - pad, high + pad


def _digits(values: Sequence[float]) -> Text:
    """As many digits as are needed to make the ticks differ."""
    width = max(values) - min(values)
    digits = next((n for n in range(1, 5) if width * 10**n >= 20), 4)
    return lambda value: f"{value:.{digits}f}"


def _shown(content: Result) -> list[Curve]:
    """One run per arm: the shortest that reaches the mark, or else the longest."""
    mark, better = content["mark"]["by_seed"][0], content["experiment"]["better"]  # curves are of the first seed
    found = []
    for arm in content["arms"]:
        own = sorted((c for c in content["curves"] if c["arm"] == arm["label"]), key=lambda c: c["steps"])
        passed = {
            (run["steps"], run["seed"])
            for run in arm["runs"]
            if (run["final"] <= mark if better == "lower" else run["final"] >= mark)
        }
        reached = [c for c in own if (c["steps"], c["seed"]) in passed and not wording.is_baseline(content, arm)]
        found += reached[:1] or own[-1:]
    return found


def _course(
    content: Result,
    looks: Mapping[str, Style],
    shown: Sequence[Curve],
    key: str,
    x_name: Column,
    across: Across,
    y_name: Column,
    y_text: Text,
) -> Chart | None:
    series = [Series(c["arm"], looks[c["arm"]], finite(list(zip(c[x_name], c[y_name], strict=True)))) for c in shown]
    series = [one for one in series if one.points]
    if not series:
        return None
    is_loss = y_name == "validation_loss"
    mark = content["mark"]["by_seed"][0] if is_loss and content["experiment"]["metric"] == y_name else None
    values = [y for one in series for _, y in one.points]
    if is_loss:
        longest = max(c["steps"] for c in shown)
        settled = [
            y for c in shown for s, y in finite(list(zip(c["step"], c[y_name], strict=True))) if s >= _SETTLED * longest
        ]
        low, high = _padded([*(settled or values), *([] if mark is None else [mark])])
    else:
        low, high = 0.0, max(values) * (1 + _PADDING) or 1.0
    right = max(x for one in series for x, _ in one.points) or 1.0
    y_label = wording.name(y_name)
    return Chart(
        key,
        f"{y_label.capitalize()} against {across.label}",
        _described(series, y_text),
        ChartAxis(across.label, 0.0, right, across.text, across.unit),
        ChartAxis(y_label, low, high, y_text, short=_digits([low, high]) if is_loss else None),
        tuple(series),
        mark=None if mark is None else (mark, f"mark {wording.metric(mark)}"),
    )


def _described(series: Sequence[Series], text: Text) -> str:
    ends = "; ".join(f"{one.label}: {text(one.points[-1][1])}" for one in series)
    return f"One line an arm. Last values: {ends}."
