"""The learning curve of a run: rows from Trainer's log, as CSV and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

COLUMNS = ("step", "learning_rate", "train_loss", "validation_loss")
_AFTER = ("flops", "seconds")
_NAMES = {"loss": "train_loss", "eval_loss": "validation_loss"}
_SPEED = ("_runtime", "_per_second", "_preparation_time")  # of an evaluation alone: the seconds say as much

# The figures of a step, by name.
CurveRow = dict[str, float]


def rows(history: Iterable[Mapping[str, float]]) -> list[CurveRow]:
    """One row per step from Trainer's log, which has separate lines for training and for every evaluation."""
    found: dict[float, CurveRow] = {}
    for line in history:
        if "train_runtime" in line:  # Trainer's summary at the end of a stage
            continue
        row = found.setdefault(line["step"], {"step": line["step"]})
        for key, value in line.items():
            if not key.endswith(_SPEED) and key not in ("step", "epoch", "grad_norm"):
                row[_NAMES.get(key, key.removeprefix("eval_"))] = value
    return [found[step] for step in sorted(found)]


@dataclass(frozen=True)
class Phase:
    """The steps of a run at one size, and the FLOPs of these alone."""

    start: int
    end: int
    flops: float


def phases(curve: Sequence[CurveRow], ends: Sequence[int]) -> tuple[Phase, ...]:
    """What each stage cost, by the steps they end at; every stage is evaluated at its end."""
    spent = {row["step"]: row["flops"] for row in curve if "flops" in row}
    starts = [0, *ends[:-1]]
    return tuple(
        Phase(start, end, spent[end] - (spent[start] if start else 0.0))
        for start, end in zip(starts, ends, strict=True)
    )


def columns(curve: Sequence[CurveRow]) -> list[str]:
    """The columns of a curve, with metrics between the losses and the cost."""
    metrics = sorted({key for row in curve for key in row} - {*COLUMNS, *_AFTER})
    return [*COLUMNS, *metrics, *_AFTER]


def csv_text(curve: Sequence[CurveRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(curve), lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve)
    return text.getvalue()


def picture(curve: Sequence[CurveRow]) -> bytes:
    """Losses above, the learning rate below, over steps; a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for key in ("train_loss", "validation_loss"):
        points = [(row["step"], row[key]) for row in curve if key in row]
        losses.plot(*zip(*points, strict=True), label=key.replace("_", " "))
    losses.set_ylabel("loss")
    losses.legend()
    points = [(row["step"], row["learning_rate"]) for row in curve if "learning_rate" in row]
    rates.plot(*zip(*points, strict=True))
    rates.set_ylabel("learning rate")
    rates.set_xlabel("step")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    return drawn.getvalue()
