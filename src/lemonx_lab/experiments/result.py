"""What an experiment measured, and its answer, from what its runs left in the cache."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.errors import BadRecipe
from lemonx.training.curve import CurveRow
from lemonx.verification.certificate import FILE as CERTIFICATE
from lemonx.verification.certificate import versions
from lemonx_lab.experiments.answer import Costs, figure, reach, saved
from lemonx_lab.experiments.nodes import GROWN, Measurement, Node, cells
from lemonx_lab.experiments.result_file import (
    ArmResult,
    Curve,
    FigureAt,
    NoSource,
    PlanLine,
    Question,
    Result,
    RunResult,
    ShownCertificate,
    SourceResult,
)
from lemonx_lab.experiments.spec import Arm, Experiment


def result(experiment: Experiment, cache: Path, *, quick: bool) -> Result:
    """Everything a reader or a page needs, from what the cache holds."""
    measured: dict[str, list[RunResult]] = {arm.label: [] for arm in experiment.arms}
    for cell in cells(experiment):
        measured[cell.arm].append(_run(cell, experiment, cache))
    experiment = experiment.model_copy(update={"baseline": _best_baseline(experiment, measured)})
    baseline = measured[experiment.baseline]
    longest = max(run["steps"] for run in baseline)
    marks = {run["seed"]: run["final"] for run in baseline if run["steps"] == longest}
    grown = next(arm.method for arm in experiment.arms if arm.label == experiment.baseline) != "scratch"
    costs = _costs(baseline, longest, grown=grown)
    certificate, plan = _shown(experiment, cache)
    return {
        "experiment": _question(experiment),
        "recipe": _recipe(experiment),
        "quick": quick,
        "versions": versions(),
        "steps": longest,
        "mark": figure([marks[seed] for seed in sorted(marks)]),
        "sources": {name: _source(name, experiment, cache) for name in experiment.sources},
        "arms": [_arm(arm, experiment, measured[arm.label], marks, costs) for arm in experiment.arms],
        "curves": [_curve(cell, cache) for cell in cells(experiment) if cell.seed == experiment.seeds[0]],
        "certificate": certificate,
        "plan": plan,
    }


def _best_baseline(experiment: Experiment, measured: Mapping[str, Sequence[RunResult]]) -> str:
    """The best arm from scratch at the full length: under its best schedule and rate; or the baseline that is not one.

    A saving against a schedule that does not suit training from scratch would flatter growth.
    """
    methods = {arm.label: arm.method for arm in experiment.arms}
    if methods[experiment.baseline] != "scratch":
        return experiment.baseline
    longest = max(run["steps"] for run in measured[experiment.baseline])
    finals = {
        label: [run["final"] for run in measured[label] if run["steps"] == longest]
        for label, method in methods.items()
        if method == "scratch"
    }
    best = min if experiment.better == "lower" else max
    return best((label for label, values in finals.items() if values), key=lambda label: fmean(finals[label]))


_ANSWERED = {"train", "sources", "target", "arms", "downstream"}


def _question(experiment: Experiment) -> Question:
    content: Any = experiment.model_dump(mode="json", exclude={*_ANSWERED, "quick"})
    return content


def _recipe(experiment: Experiment) -> dict[str, JsonValue]:
    return experiment.model_dump(mode="json", include=_ANSWERED, exclude_defaults=True)


def _figure(final: CurveRow, metric: str) -> float:
    """A figure of a run's end; BadRecipe, which leaves all runs in the cache, if the experiment asks for another."""
    if metric not in final:
        known = sorted(final.keys() - {"step", "flops", "seconds"})
        raise BadRecipe(f"the runs measured no {metric!r}", f"choose a metric from {', '.join(known)}")
    return final[metric]


def _run(cell: Measurement, experiment: Experiment, cache: Path) -> RunResult:
    done, source = cell.trained.record(cache), cell.source.record(cache)
    start = next((row for row in done["curve"] if row.get("validation_loss") is not None), {})
    return {
        "length": cell.length,
        "steps": cell.trained.steps,
        "seed": cell.seed,
        "final": _figure(done["final"], experiment.metric),
        "start": start.get(experiment.metric),
        "source": _figure(source["final"], experiment.metric),
        "flops": done["flops"],
        "source_flops": _spent(cell.source, cache),
        "seconds": done["seconds"],
        "key": cell.trained.key,
        "downstream": {
            task.name: _figure(cell.downstream[task.name].record(cache)["final"], task.metric)
            for task in experiment.downstream
        },
        "beside": {name: [start[f"{name}_loss"], done["final"][f"{name}_loss"]] for name in _beside(cell.trained)},
    }


def _beside(node: Node) -> list[str]:
    """The names of the sections that a run was evaluated on beside its own."""
    found = node.what.get("beside")
    return list(found) if isinstance(found, dict) else []


def _spent(node: Node, cache: Path) -> float:
    """FLOPs of a source's training, and of all that it was grown from."""
    own = 0.0 if node.kind == GROWN else node.record(cache)["flops"]
    return own + sum(_spent(before, cache) for before in node.after)


def _arm(
    arm: Arm, experiment: Experiment, runs: Sequence[RunResult], marks: Mapping[int, float], baseline: Costs
) -> ArmResult:
    answer = reach(marks, runs, experiment.better)
    scratch = arm.label == experiment.baseline
    costs = _costs(runs, baseline.steps, grown=arm.method != "scratch")
    lengths = sorted({run["steps"] for run in runs})
    at: list[FigureAt] = [{"steps": n, **figure([run["final"] for run in runs if run["steps"] == n])} for n in lengths]
    return {
        "label": arm.label,
        "method": arm.method,
        "source": arm.source,
        "runs": [*runs],
        "at": at,
        "reach": answer,
        "saved": None if scratch else saved(answer, costs, baseline),
        "downstream": {
            # Of the longest runs alone: the spread is one over seeds, not over lengths.
            task.name: {
                "metric": task.metric,
                **figure([run["downstream"][task.name] for run in runs if run["steps"] == lengths[-1]]),
            }
            for task in experiment.downstream
        },
    }


def _costs(runs: Sequence[RunResult], steps: int, *, grown: bool) -> Costs:
    """Training from scratch needs no source."""
    source = fmean(run["source_flops"] for run in runs) if grown else 0.0
    return Costs(fmean(run["flops"] / run["steps"] for run in runs), source, steps)


def _source(name: str, experiment: Experiment, cache: Path) -> SourceResult | NoSource:
    arms = {arm.label for arm in experiment.arms if arm.source == name}
    used = {cell.seed: cell.source for cell in cells(experiment) if cell.arm in arms}
    nodes = [used[seed] for seed in sorted(used)]
    if not nodes:
        return {}
    done = [node.record(cache) for node in nodes]
    return {
        "final": figure([run["final"][experiment.metric] for run in done]),
        "flops": fmean(_spent(node, cache) for node in nodes),
        "steps": nodes[0].steps,
    }


def _curve(cell: Measurement, cache: Path) -> Curve:
    rows = [row for row in cell.trained.record(cache)["curve"] if row.get("validation_loss") is not None]
    return {
        "arm": cell.arm,
        "steps": cell.trained.steps,
        "seed": cell.seed,
        "step": [row["step"] for row in rows],
        "validation_loss": [row["validation_loss"] for row in rows],
        "train_loss": [row.get("train_loss") for row in rows],
        "learning_rate": [row.get("learning_rate") for row in rows],
        "flops": [row.get("flops") for row in rows],
        "seconds": [row.get("seconds") for row in rows],
    }


def _shown(experiment: Experiment, cache: Path) -> tuple[ShownCertificate | None, list[PlanLine]]:
    """The certificate of the first LEMON target, and its plan: the tensors of all blocks in one line."""
    arm = next((arm.label for arm in experiment.arms if arm.method == "lemon"), None)
    cell = next((cell for cell in cells(experiment) if cell.arm == arm), None)
    if cell is None:
        return None, []
    grown = cell.trained.after[0].folder(cache)
    content = parse_json(read_inside(grown.resolve(), CERTIFICATE))
    certificate: Any = {name: value for name, value in content.items() if name not in ("tensors", "files", "layout")}
    certificate["arm"] = arm
    return certificate, plan_lines(content["tensors"])


def plan_lines(tensors: Mapping[str, Mapping[str, str]]) -> list[PlanLine]:
    """The tensors of a certificate, those that differ by the number of their block alone counted together.

    >>> step = {"rule": "copied", "exactness": "bit-exact"}
    >>> plan_lines({"h.0.w": step, "h.1.w": step, "out": step})[0]
    {'tensor': 'h.*.w', 'rule': 'copied', 'exactness': 'bit-exact', 'count': 2}
    """
    lines = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), step["rule"], step["exactness"]) for name, step in tensors.items()
    )
    return [
        {"tensor": tensor, "rule": rule, "exactness": exactness, "count": count}
        for (tensor, rule, exactness), count in lines.items()
    ]
