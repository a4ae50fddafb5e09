"""Results without training: a cache of runs with hand-made numbers, read by the code that reads real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lemonx_lab.experiments import nodes
from lemonx_lab.experiments.answer import figure
from lemonx_lab.experiments.result import result
from lemonx_lab.experiments.result_file import ArmResult, FigureAt, Question, Reach, Result, RunResult
from lemonx_lab.experiments.spec import Experiment, parse

# How fast an arm learns: the final loss is FLOOR + GAP / (steps * speed) ** 0.5, and seeds are JITTER apart.
FLOOR, GAP, JITTER = 1.0, 12.0, 0.004
SPEEDS = {"scratch": 1.0, "lemon": 1.6, "fpi": 0.9, "aki": 1.25, "ki-soft": 1.02, "ki-hard": 1.1}
SEEDS = (0, 1, 2)

EXPERIMENT: dict[str, Any] = {
    "name": "vit",
    "title": "ViT: 2 blocks to 4, width 32 to 64",
    "claim": "LEMON reaches the loss of training from scratch in fewer steps than scratch, FPI, AKI, soft and hard KI.",
    "cost": "about 25 minutes on 2 cores.",
    "command": "lemonx compare vit",
    "paper": {"finding": "LEMON saves 56.7 % of the cost of training from scratch.", "recipes": ["vit-imagenet"]},
    "lengths": [0.4, 0.6, 0.8],
    "seeds": list(SEEDS),
    "train": {"task": "image-classification", "data": {"kind": "digits"}, "batch_size": 64},
    "sources": {"source": {"config": {"model_type": "vit", "hidden_size": 32}, "steps": 1000, "learning_rate": 4e-3}},
    "target": {"expand": {"width": 64, "depth": 4}, "train": {"steps": 1000, "learning_rate": 2e-3}},
    "arms": [
        {"label": "scratch", "method": "scratch", "lengths": [1.0]},
        {"label": "LEMON"},
        {"label": "FPI", "method": "fpi", "lengths": [0.6, 0.8, 1.0]},
        {"label": "AKI", "method": "aki", "lengths": [0.6, 0.8, 1.0]},
        {"label": "soft KI", "method": "ki-soft", "lengths": [0.8, 1.0]},
        {"label": "hard KI", "method": "ki-hard", "lengths": [0.8, 1.0]},
    ],
}

CERTIFICATE: dict[str, Any] = {
    "method": "lemon",
    "paper": "LEMON: Lossless Model Expansion, ICLR 2024",
    "lossless": True,
    "notes": [],
    "source": {"name": "source-0", "model_type": "vit", "architectures": [], "sha256": "ab" * 32, "parameters": 28138},
    "target": {"parameters": 205066},
    "sizes": {"residual": {"source": 32, "target": 64}, "blocks": {"source": 2, "target": 4}},
    "config": {"hidden_size": {"source": 32, "target": 64}},
    "free": {"name": "vision", "even": True, "phi": 0.02, "depth_type": 2},
    "seed": 0,
    "versions": {"lemonx": "0.1.0"},
    "exactness": {"bit-exact": 60, "exact-sum": 8},
    "tensors": {
        f"layer.{n}.{part}": {"from": f"layer.{n // 2}.{part}", "rule": rule, "exactness": "bit-exact"}
        for n in range(4)
        for part, rule in (("norm.weight", "LayerNorm"), ("mlp.weight", "col-circ + jitter"))
    },
    "not_written": {},
    "verified": {
        "outputs": {
            "difference": 1.3e-15,
            "tolerance": 1e-10,
            "noise": None,
            "largest_output": 3.2,
            "outputs": ["logits"],
            "tokens_equal": None,
            "kl": 0.0,
            "odd_keys": [],
            "inputs": "pixel_values (2, 1, 16, 16)",
            "passed": True,
        },
        "symmetry": {"copies": 416, "twins": 0, "where": []},
        "skipped": None,
    },
}


def experiment(**changes: Any) -> Experiment:
    return parse({**EXPERIMENT, **changes}, Path("pretend"))


def final_loss(speed: float, steps: float, seed: int) -> float:
    return FLOOR + GAP / math.sqrt(steps * speed) + JITTER * (seed - 1)


def made(asked: Experiment, cache: Path, speeds: Mapping[str, float] = SPEEDS, *, quick: bool = False) -> Result:
    """A result of which every run was `speeds` fast, by label or by method."""
    for cell in nodes.cells(asked):
        arm = next(arm for arm in asked.arms if arm.label == cell.arm)
        speed = speeds.get(arm.label, speeds.get(arm.method, 1.0))
        ended = _done(cell.source, cache, 0.6, 5.0, 1e9)
        # Lossless: it starts where its source ended.
        _done(cell.trained, cache, speed, ended if arm.method == "lemon" else 5.0 / speed, 4e9)
        _write(cell.trained.after[0].folder(cache) / "lemonx.json", CERTIFICATE)
        for number, node in enumerate(cell.downstream.values()):
            score = 0.8 + 0.02 * number - 0.1 / speed + 0.01 * (cell.seed - 1)
            _write(node.folder(cache) / nodes.DONE, {"final": {"accuracy": score, "validation_loss": 1 - score}})
    return result(asked, cache, quick=quick)


def arm(label: str, method: str, runs: list[RunResult], source: str = "source") -> ArmResult:
    """An arm with these runs alone; its answers are left open."""
    lengths = sorted({run.steps for run in runs})
    finals = {n: dict(figure([run.final for run in runs if run.steps == n])) for n in lengths}
    at = [FigureAt(steps=n, **found) for n, found in finals.items()]
    reach = Reach(steps=None, bound="not reached", reached=0, seeds=1, short_of=0.0)
    return ArmResult(
        label=label, method=method, source=source, runs=runs, at=at, reach=reach, saved=None, downstream={}
    )


def ended(seed: int, steps: int, final: float, **more: Any) -> RunResult:
    """A run that ends so."""
    spent: dict[str, Any] = {"flops": 0.0, "source_flops": 0.0, "seconds": 0.0}
    rest: dict[str, Any] = {"length": 1.0, "start": None, "source": None, "key": "", "downstream": {}}
    return RunResult(seed=seed, steps=steps, final=final, **{**spent, **rest, **more})


def compared(arms: list[ArmResult], **asked: Any) -> Result:
    """A result of these arms, whose mark 1.0 scratch reaches in 1000 steps with each of its seeds."""
    question = {"baseline": "scratch", "better": "lower", "metric": "validation_loss", "reference": None, **asked}
    mark = figure([1.0 if question["better"] == "lower" else -1.0] * len({run.seed for run in arms[0].runs}))
    return Result.model_construct(experiment=Question.model_construct(**question), steps=1000, mark=mark, arms=arms)


def _done(node: nodes.Node, cache: Path, speed: float, start: float, flops: float) -> float:
    """One run, from its first loss to its last, which is returned."""
    steps, seed = node.steps, node.what["seed"]
    end, curve = final_loss(speed, steps, seed), []
    for n in range(11):
        step = round(steps * n / 10)
        loss = end + (start - end) * (1 - n / 10) ** 3
        rate = node.what["learning_rate"] * min(1.0, n) * (0.55 + 0.45 * math.cos(math.pi * n / 10))
        row = {"step": step, "validation_loss": loss, "train_loss": loss + 0.02, "accuracy": 1 / loss}
        curve.append({**row, "learning_rate": rate, "flops": flops * step, "seconds": 0.011 * step})
    content = {"what": node.what, "final": curve[-1], "flops": flops * steps, "seconds": 0.011 * steps, "curve": curve}
    _write(node.folder(cache) / nodes.DONE, content)
    return end


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
