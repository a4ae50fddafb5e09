"""The result of an experiment, from the records that its runs left in the cache."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import parse_json
from lemonx.errors import BadRecipe
from lemonx.training.curve import CurveRow
from lemonx.verification.certificate import FILE as CERTIFICATE
from lemonx.verification.certificate import versions
from lemonx_lab.experiments.answer import Costs, by_seed, figure, reach, saved
from lemonx_lab.experiments.nodes import GROWN, Measurement, Node, cells
from lemonx_lab.experiments.result_file import (
    LEMON,
    SCRATCH,
    ArmResult,
    Curve,
    FigureAt,
    FineTuned,
    NoSource,
    PlanLine,
    Question,
    Result,
    RunResult,
    ShownCertificate,
    SourceResult,
)
from lemonx_lab.experiments.spec import Arm, Experiment

_ANSWERED = {"train", "sources", "target", "arms", "downstream"}


def result(experiment: Experiment, cache: Path, *, quick: bool) -> Result:
    """Everything a reader or a page needs, from the cache."""
    all_cells = list(cells(experiment))
    measured: dict[str, list[RunResult]] = {arm.label: [] for arm in experiment.arms}
    for cell in all_cells:
        measured[cell.arm].append(_run(cell, experiment, cache))
    experiment = experiment.model_copy(update={"baseline": _best_baseline(experiment, measured)})
    baseline = measured[experiment.baseline]
    longest = max(run.steps for run in baseline)
    marks = {run.seed: run.final for run in sorted(baseline, key=lambda run: run.seed) if run.steps == longest}
    grown = {arm.label: arm.method != SCRATCH for arm in experiment.arms}
    costs = {label: _costs(runs, longest, grown=grown[label]) for label, runs in measured.items() if runs}
    certificate, plan = _shown(experiment, all_cells, cache)
    return Result(
        experiment=Question(**experiment.model_dump(mode="json", exclude={*_ANSWERED, "quick"})),
        recipe=experiment.model_dump(mode="json", include=_ANSWERED, exclude_defaults=True),
        quick=quick,
        versions=versions(),
        steps=longest,
        mark=figure(list(marks.values())),
        sources={name: _source(name, experiment, all_cells, cache) for name in experiment.sources},
        arms=[_arm(arm, experiment, measured[arm.label], marks, costs) for arm in experiment.arms],
        curves=[_curve(cell, cache) for cell in all_cells if cell.seed == experiment.seeds[0]],
        certificate=certificate,
        plan=plan,
    )


def _best_baseline(experiment: Experiment, measured: Mapping[str, Sequence[RunResult]]) -> str:
    """The best arm from scratch at the full length: under its best schedule and rate; or the baseline that is not one.

    A saving against a schedule that does not suit training from scratch would flatter growth.
    """
    scratch = [arm.label for arm in experiment.arms if arm.method == SCRATCH]
    if experiment.baseline not in scratch:
        return experiment.baseline
    longest = max(run.steps for run in measured[experiment.baseline])
    finals = {label: [run.final for run in measured[label] if run.steps == longest] for label in scratch}
    best = min if experiment.better == "lower" else max
    return best((label for label, values in finals.items() if values), key=lambda label: fmean(finals[label]))


def _figure(final: CurveRow, metric: str) -> float:
    """A figure of a run's end; BadRecipe, which leaves all runs in the cache, if the experiment asks for another."""
    if metric not in final:
        known = sorted(final.keys() - {"step", "flops", "seconds"})
        raise BadRecipe(f"the runs measured no {metric!r}", f"choose a metric from {', '.join(known)}")
    if not math.isfinite(final[metric]):
        raise BadRecipe(f"a run ended with {metric} {final[metric]}", "choose a metric that every run has")
    return final[metric]


def _run(cell: Measurement, experiment: Experiment, cache: Path) -> RunResult:
    done, source = cell.trained.record(cache), cell.source.record(cache)
    start = next((row for row in done["curve"] if row.get("validation_loss") is not None), CurveRow())
    first = start.get(experiment.metric, math.nan)
    beside = cell.trained.what.get("beside")
    return RunResult(
        length=cell.length,
        steps=cell.trained.steps,
        seed=cell.seed,
        final=_figure(done["final"], experiment.metric),
        start=first if math.isfinite(first) else None,
        source=_figure(source["final"], experiment.metric),
        flops=done["flops"],
        source_flops=_spent(cell.source, cache),
        seconds=done["seconds"],
        key=cell.trained.key,
        downstream={
            task.name: _figure(cell.downstream[task.name].record(cache)["final"], task.metric)
            for task in experiment.downstream
        },
        beside={
            name: [start[f"{name}_loss"], done["final"][f"{name}_loss"]]
            for name in (beside if isinstance(beside, dict) else ())
        },
    )


def _spent(node: Node, cache: Path) -> float:
    """FLOPs of a source's training, and of all that it was grown from."""
    own = 0.0 if node.kind == GROWN else node.record(cache)["flops"]
    return own + sum(_spent(before, cache) for before in node.after)


def _arm(
    arm: Arm,
    experiment: Experiment,
    runs: Sequence[RunResult],
    marks: Mapping[int, float],
    costs: Mapping[str, Costs],
) -> ArmResult:
    answer = reach(marks, by_seed(runs), experiment.better)
    is_baseline = arm.label == experiment.baseline
    by_length: dict[int, list[RunResult]] = {}
    for run in sorted(runs, key=lambda run: run.steps):
        by_length.setdefault(run.steps, []).append(run)
    longest = by_length[max(by_length)]  # alone: the spread is one over seeds, not over lengths
    finals = {steps: dict(figure([run.final for run in found])) for steps, found in by_length.items()}
    tuned = {task.name: dict(figure([run.downstream[task.name] for run in longest])) for task in experiment.downstream}
    return ArmResult(
        label=arm.label,
        method=arm.method,
        source=arm.source,
        runs=[*runs],
        at=[FigureAt(steps=steps, **found) for steps, found in finals.items()],
        reach=answer,
        saved=None if is_baseline else saved(answer, costs[arm.label], costs[experiment.baseline]),
        downstream={task.name: FineTuned(metric=task.metric, **tuned[task.name]) for task in experiment.downstream},
    )


def _costs(runs: Sequence[RunResult], steps: int, *, grown: bool) -> Costs:
    """Training from scratch needs no source."""
    source = fmean(run.source_flops for run in runs) if grown else 0.0
    return Costs(fmean(run.flops / run.steps for run in runs), source, steps)


def _source(
    name: str, experiment: Experiment, all_cells: Sequence[Measurement], cache: Path
) -> SourceResult | NoSource:
    arms = {arm.label for arm in experiment.arms if arm.source == name}
    used = {cell.seed: cell.source for cell in all_cells if cell.arm in arms}
    nodes = [used[seed] for seed in sorted(used)]
    if not nodes:
        return NoSource()
    return SourceResult(
        final=figure([node.record(cache)["final"][experiment.metric] for node in nodes]),
        flops=fmean(_spent(node, cache) for node in nodes),
        steps=nodes[0].steps,
    )


def _curve(cell: Measurement, cache: Path) -> Curve:
    rows = [row for row in cell.trained.record(cache)["curve"] if row.get("validation_loss") is not None]
    names = Curve.model_fields.keys() - {"arm", "steps", "seed"}
    columns: Any = {name: [row.get(name) for row in rows] for name in names}
    return Curve(arm=cell.arm, steps=cell.trained.steps, seed=cell.seed, **columns)


def _shown(
    experiment: Experiment, all_cells: Sequence[Measurement], cache: Path
) -> tuple[ShownCertificate | None, list[PlanLine]]:
    """The certificate of the first LEMON target, and its plan."""
    first = next((arm.label for arm in experiment.arms if arm.method == LEMON), "")
    cell = next((cell for cell in all_cells if cell.arm == first), None)
    if cell is None:
        return None, []
    content = parse_json(read_inside(cell.trained.after[0].folder(cache).resolve(), CERTIFICATE))
    shown = {name: value for name, value in content.items() if name not in ("tensors", "files", "layout")}
    return ShownCertificate(**shown, arm=first), plan_lines(content["tensors"])


def plan_lines(tensors: Mapping[str, Mapping[str, str]]) -> list[PlanLine]:
    """The tensors of a certificate, those that differ by the number of their block alone counted together.

    >>> step = {"rule": "copied", "exactness": "bit-exact"}
    >>> plan_lines({"h.0.w": step, "h.1.w": step, "out": step})[0]
    PlanLine(tensor='h.*.w', rule='copied', exactness='bit-exact', count=2)
    """
    lines = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), step["rule"], step["exactness"]) for name, step in tensors.items()
    )
    return [
        PlanLine(tensor=tensor, rule=rule, exactness=exactness, count=count)
        for (tensor, rule, exactness), count in lines.items()
    ]
