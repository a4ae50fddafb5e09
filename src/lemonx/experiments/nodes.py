"""The pieces of an experiment, each named by a digest of all that decides it: rerun only what changed.

source  a model trained from scratch
grown   a target made from a source by a method
trained a grown target, trained on
tuned   a trained target, fine-tuned on a downstream task
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lemonx.checkpoints.creating import remove, write_whole
from lemonx.experiments.fingerprint import GROWTH, TRAINING, fingerprint
from lemonx.experiments.spec import Arm, Downstream, Experiment

SOURCE, GROWN, TRAINED, TUNED = "source", "grown", "trained", "tuned"


@dataclass(frozen=True)
class Node:
    """One piece of work: `after` holds what must be there first, `what` decides the rest.

    `key` names the folder of its result; two experiments that ask for the same piece share it.
    """

    kind: str
    what: Mapping[str, Any]
    after: tuple[Node, ...] = ()
    label: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        content = {"kind": self.kind, "what": self.what, "after": [node.key for node in self.after]}
        content |= fingerprint(GROWTH if self.kind == GROWN else TRAINING)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def steps(self) -> int:
        return int(self.what.get("steps") or 0)

    def folder(self, cache: Path) -> Path:
        return cache / f"{self.kind}-{self.key}"

    def done(self, cache: Path) -> bool:
        return (self.folder(cache) / DONE).exists()


DONE = "done.json"


@dataclass(frozen=True)
class Cell:
    """One measurement of an experiment: an arm, a length, a seed, and the nodes behind it."""

    arm: str
    length: float
    seed: int
    source: Node
    trained: Node
    downstream: Mapping[str, Node]


def cells(experiment: Experiment) -> Iterator[Cell]:
    """Every measurement that an experiment asks for; seeds outermost, so that a first answer comes early."""
    for seed in experiment.seeds:
        for arm in experiment.arms:
            source = _source(experiment, arm.source, seed)
            grown = _grown(experiment, arm, source, seed)
            for length in experiment.lengths_of(arm):
                trained = _trained(experiment, arm, grown, length, seed)
                tuned = {task.name: _tuned(task, trained, seed) for task in experiment.downstream}
                yield Cell(arm.label, length, seed, source, trained, tuned)


def _source(experiment: Experiment, name: str, seed: int) -> Node:
    recipe = {**experiment.train, **experiment.sources[name], "seed": seed}
    return Node(SOURCE, recipe, label=f"source {name}, seed {seed}")


def _grown(experiment: Experiment, arm: Arm, source: Node, seed: int) -> Node:
    # Knowledge inheritance starts as training from scratch does: one fresh target serves all.
    from lemonx import methods

    method = "scratch" if methods.find(arm.method).inherits else arm.method
    options = {**experiment.target.expand, **arm.expand, "method": method, "seed": seed}
    return Node(GROWN, options, (source,), label=f"{arm.label}, seed {seed}")


def _trained(experiment: Experiment, arm: Arm, grown: Node, length: float, seed: int) -> Node:
    from lemonx import methods

    recipe = {**experiment.train, **experiment.target.train, **arm.train, "seed": seed}
    recipe["steps"] = max(1, round(experiment.steps * length))
    if kind := methods.find(arm.method).inherits:
        recipe["inheritance"] = {"kind": kind}
    return Node(TRAINED, recipe, (grown,), label=f"{arm.label}, {recipe['steps']} steps, seed {seed}")


def _tuned(task: Downstream, trained: Node, seed: int) -> Node:
    return Node(TUNED, {**task.train, "seed": seed}, (trained,), label=f"{task.name} after {trained.label}")


def run_node(node: Node, cache: Path) -> None:
    """Do one piece of work; its folder appears whole, or is resumed by the next try."""
    folder = node.folder(cache)
    if node.kind == GROWN:
        _grow(node, cache, folder)
        summary: dict[str, Any] = {}
    else:
        summary = _train(node, cache, folder)
    done = {"kind": node.kind, "what": node.what, "label": node.label, **summary}
    write_whole(folder / DONE, json.dumps(done, indent=1))


def _grow(node: Node, cache: Path, folder: Path) -> None:
    from lemonx import api
    from lemonx.algebra.free_parameters import Free, preset

    options = dict(node.what)
    options["fields"] = options.pop("set", {})
    if isinstance(free := options.get("free"), Mapping):
        base = preset(free["like"])
        options["free"] = Free(**{**vars(base), **{k: v for k, v in free.items() if k != "like"}})
    remove(folder)
    # The targets of other seeds differ in their noise alone: one proof is enough.
    api.expand(node.after[0].folder(cache), folder, verify=options["seed"] == 0, **options)


def _train(node: Node, cache: Path, folder: Path) -> dict[str, Any]:
    from lemonx.training.recipe import parse_recipe
    from lemonx.training.run import run

    recipe = dict(node.what)
    if node.after:
        recipe["source"] = str(node.after[0].folder(cache))
    if "inheritance" in recipe:
        teacher = node.after[0].after[0].folder(cache)
        recipe["inheritance"] = {**recipe["inheritance"], "teacher": str(teacher)}
    done = run(parse_recipe({"save_every": 0, **recipe}, node.label), folder, force=False)
    return {"final": done.final, "flops": done.flops, "seconds": done.seconds, "curve": done.curve}
