"""result.json: what an experiment measured, and its answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import parse_json
from lemonx.experiments.answer import Costs, figure, reach, saved
from lemonx.experiments.nodes import DONE, Cell, Node, cells
from lemonx.experiments.spec import Experiment
from lemonx.verification.certificate import FILE as CERTIFICATE
from lemonx.verification.certificate import versions

FILE = "result.json"


def result(experiment: Experiment, cache: Path, *, quick: bool) -> dict[str, Any]:
    """Everything a reader or a page needs, from what the cache holds."""
    measured = [_run(cell, experiment, cache) for cell in cells(experiment)]
    baseline = [run for run in measured if run["arm"] == experiment.baseline]
    longest = max(run["steps"] for run in baseline)
    marks = {run["seed"]: run["final"] for run in baseline if run["steps"] == longest}
    costs = Costs(fmean(run["flops"] / run["steps"] for run in baseline), 0.0, longest)
    arms = [_arm(arm.label, arm.method, arm.source, experiment, measured, marks, costs) for arm in experiment.arms]
    shown = _shown(experiment, cache)
    return {
        "experiment": experiment.model_dump(exclude={"train", "sources", "target", "arms", "downstream", "quick"}),
        "recipe": experiment.model_dump(
            include={"train", "sources", "target", "arms", "downstream"}, exclude_defaults=True
        ),
        "quick": quick,
        "versions": versions(),
        "steps": longest,
        "mark": asdict(figure([marks[seed] for seed in sorted(marks)])),
        "sources": {name: _source(name, experiment, cache) for name in experiment.sources},
        "arms": arms,
        "curves": [_curve(cell, cache) for cell in cells(experiment) if cell.seed == experiment.seeds[0]],
        **shown,
    }


def _read(node: Node, cache: Path) -> dict[str, Any]:
    return parse_json(read_inside(node.folder(cache).resolve(), DONE))


def _run(cell: Cell, experiment: Experiment, cache: Path) -> dict[str, Any]:
    done, source = _read(cell.trained, cache), _read(cell.source, cache)
    start = next((row for row in done["curve"] if row.get("validation_loss") is not None), {})
    return {
        "arm": cell.arm,
        "length": cell.length,
        "steps": cell.trained.steps,
        "seed": cell.seed,
        "final": done["final"][experiment.metric],
        "start": start.get(experiment.metric),
        "source": source["final"][experiment.metric],
        "flops": done["flops"],
        "source_flops": source["flops"],
        "seconds": done["seconds"],
        "key": cell.trained.key,
        "downstream": {
            task.name: _read(cell.downstream[task.name], cache)["final"][task.metric] for task in experiment.downstream
        },
    }


def _arm(
    label: str,
    method: str,
    source: str,
    experiment: Experiment,
    measured: list[dict[str, Any]],
    marks: Mapping[int, float],
    baseline: Costs,
) -> dict[str, Any]:
    runs = [run for run in measured if run["arm"] == label]
    answer = reach(marks, runs, experiment.better)
    scratch = label == experiment.baseline
    costs = Costs(
        fmean(run["flops"] / run["steps"] for run in runs),
        # Training from scratch needs no source.
        0.0 if scratch or method == "scratch" else fmean(run["source_flops"] for run in runs),
        baseline.steps,
    )
    lengths = sorted({run["steps"] for run in runs})
    tasks = {task.name: task for task in experiment.downstream}
    return {
        "label": label,
        "method": method,
        "source": source,
        "runs": [{name: value for name, value in run.items() if name != "arm"} for run in runs],
        "at": [{"steps": n, **asdict(figure([run["final"] for run in runs if run["steps"] == n]))} for n in lengths],
        "reach": asdict(answer),
        "saved": None if scratch else saved(answer, costs, baseline),
        "downstream": {
            # Of the longest runs alone: the spread is one over seeds, not over lengths.
            name: {
                "metric": task.metric,
                **asdict(figure([r["downstream"][name] for r in runs if r["steps"] == lengths[-1]])),
            }
            for name, task in tasks.items()
        },
    }


def _source(name: str, experiment: Experiment, cache: Path) -> dict[str, Any]:
    arm_cells = {cell.source.key: cell.source for cell in cells(experiment)}
    arms = {arm.label for arm in experiment.arms if arm.source == name}
    used = {cell.source.key for cell in cells(experiment) if cell.arm in arms}
    done = [_read(arm_cells[key], cache) for key in sorted(used)]
    return {} if not done else {
        "final": asdict(figure([run["final"][experiment.metric] for run in done])),
        "flops": fmean(run["flops"] for run in done),
        "steps": done[0]["what"]["steps"],
    }  # fmt: skip


COLUMNS = ("step", "validation_loss", "train_loss", "learning_rate", "flops", "seconds")


def _curve(cell: Cell, cache: Path) -> dict[str, Any]:
    rows = [row for row in _read(cell.trained, cache)["curve"] if row.get("validation_loss") is not None]
    series = {name: [row.get(name) for row in rows] for name in COLUMNS}
    return {"arm": cell.arm, "steps": cell.trained.steps, "seed": cell.seed, **series}


def _shown(experiment: Experiment, cache: Path) -> dict[str, Any]:
    """The certificate of the first LEMON target, and its plan: the tensors of all blocks in one line."""
    arm = next((arm.label for arm in experiment.arms if arm.method == "lemon"), None)
    cell = next((cell for cell in cells(experiment) if cell.arm == arm), None)
    if cell is None:
        return {"certificate": None, "plan": []}
    grown = cell.trained.after[0].folder(cache)
    content: Mapping[str, Any] = parse_json(read_inside(grown.resolve(), CERTIFICATE))
    certificate = {name: value for name, value in content.items() if name not in ("tensors", "files")}
    return {"certificate": {**certificate, "arm": arm}, "plan": plan_lines(content["tensors"])}


def plan_lines(tensors: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """The tensors of a certificate, those that differ by the number of their block alone counted together.

    >>> step = {"rule": "copied", "exactness": "bit-exact"}
    >>> plan_lines({"h.0.w": step, "h.1.w": step, "out": step})[0]
    {'tensor': 'h.*.w', 'rule': 'copied', 'exactness': 'bit-exact', 'count': 2}
    """
    lines = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), step["rule"], step["exactness"]) for name, step in tensors.items()
    )
    names = ("tensor", "rule", "exactness", "count")
    return [dict(zip(names, (*line, count), strict=True)) for line, count in lines.items()]
