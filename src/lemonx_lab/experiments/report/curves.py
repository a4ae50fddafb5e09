"""The charts of a result: final quality by length of the schedule, then the learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lemonx.planning.summary import human
from lemonx_lab.experiments import wording
from lemonx_lab.experiments.report.charts import Chart, ChartAxis, Series, Style, Text, finite
from lemonx_lab.experiments.result_file import Curve, Result

LOSS = "validation_loss"
# The first steps are far above all that follows: the frame begins where this part of the longest run is done.
_SETTLED = 0.1
_PADDING = 0.06
_MOST_TICKS = 6


class Across(NamedTuple):
    """An x axis before its ends are known."""

    column: str
    label: str
    text: Text
    unit: str


def charts(content: Result, looks: Mapping[str, Style], key: str) -> dict[str, Chart | None]:
    """The charts by name; a chart without curves is None."""
    shown = shown_curves(content)
    steps = Across("step", "steps", wording.steps, "steps")
    flops = Across("flops", "FLOPs of the target's training", human, "FLOPs")
    time = Across("seconds", "seconds of training", wording.seconds, "s")

    def course(name: str, across: Across, column: str = LOSS, text: Text = wording.metric) -> Chart | None:
        return _course(content, looks, shown, f"{key}-{name}", across, column, text)

    return {
        "finals": _finals(content, looks, f"{key}-finals"),
        "steps": course("steps", steps),
        "flops": course("flops", flops),
        "time": course("time", time),
        "rate": course("rate", steps, "learning_rate", wording.rate),
    }


def _finals(content: Result, looks: Mapping[str, Style], key: str) -> Chart:
    series: list[Series] = []
    mark, metric = content.mark.mean, wording.name(content.experiment.metric)
    ends = [mark]
    for arm in content.arms:
        points = tuple((float(at.steps), at.mean) for at in arm.at)
        series.append(Series(arm.label, looks[arm.label], points, tuple(at.spread for at in arm.at)))
        ends += [at.mean + sign * (at.spread or 0.0) for at in arm.at for sign in (-1, 1)]
    lengths = sorted({*map(float, content.lengths), float(content.steps)})
    every = -(-len(lengths) // _MOST_TICKS)
    return Chart(
        key,
        f"Final {metric} against the length of the schedule",
        f"Each point is the mean of the runs of one length over seeds, with its spread; the mark is {metric} "
        f"{wording.metric(mark)}, which {content.experiment.baseline} reaches.",
        # Between two lengths the answer is interpolated in log steps: there the lines are straight. The ends have room
        # for labels.
        ChartAxis(
            "steps of the schedule (log scale)", lengths[0] / 1.06, lengths[-1] * 1.04, wording.steps, "steps",
            log=True, ticks=tuple(reversed(lengths[::-1][::every])),
        ),
        ChartAxis(metric, *_padded(ends), wording.metric, short=_digits(ends)),
        tuple(series),
        mark=(mark, f"mark {wording.metric(mark)}"),
    )  # fmt: skip


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = _PADDING * (high - low) or abs(high) * _PADDING or 1.0
    return low - pad, high + pad


def _digits(values: Sequence[float]) -> Text:
    """A format with enough digits to make the ticks differ."""
    width = max(values) - min(values)
    digits = next((n for n in range(1, 5) if width * 10**n >= 20), 4)
    return lambda value: f"{value:.{digits}f}"


def shown_curves(content: Result) -> list[Curve]:
    """One run per arm: the shortest that reaches the mark, or else the longest."""
    mark, better = content.mark.by_seed[0], content.experiment.better  # curves are of the first seed
    found: list[Curve] = []
    for arm in content.arms:
        own = sorted((c for c in content.curves if c.arm == arm.label), key=lambda c: c.steps)
        finals = {(run.steps, run.seed): run.final for run in arm.runs}
        passed = {at for at, final in finals.items() if (final <= mark if better == "lower" else final >= mark)}
        reached = [c for c in own if (c.steps, c.seed) in passed and not content.is_baseline(arm)]
        found += reached[:1] or own[-1:]
    return found


def _course(
    content: Result,
    looks: Mapping[str, Style],
    shown: Sequence[Curve],
    key: str,
    across: Across,
    y_name: str,
    y_text: Text,
) -> Chart | None:
    series: list[Series] = []
    for curve in shown:
        points = finite(list(zip(getattr(curve, across.column), getattr(curve, y_name), strict=True)))
        series += [Series(curve.arm, looks[curve.arm], points)] if points else []
    if not series:
        return None
    mark = content.mark.by_seed[0] if y_name == content.experiment.metric == LOSS else None
    values = [y for one in series for _, y in one.points]
    if y_name == LOSS:
        begin = _SETTLED * max(curve.steps for curve in shown)
        courses = [finite(list(zip(curve.step, curve.validation_loss, strict=True))) for curve in shown]
        settled = [y for course in courses for step, y in course if step >= begin]
        low, high = _padded([*(settled or values), *([] if mark is None else [mark])])
    else:
        low, high = 0.0, max(values) * (1 + _PADDING) or 1.0
    right = max(x for one in series for x, _ in one.points) or 1.0
    y_label = wording.name(y_name)
    ends = "; ".join(f"{one.label}: {y_text(one.points[-1][1])}" for one in series)
    return Chart(
        key,
        f"{y_label.capitalize()} against {across.label}",
        f"One line an arm. Last values: {ends}.",
        ChartAxis(across.label, 0.0, right, across.text, across.unit),
        ChartAxis(y_label, low, high, y_text, short=_digits([low, high]) if y_name == LOSS else None),
        tuple(series),
        mark=None if mark is None else (mark, f"mark {wording.metric(mark)}"),
    )
