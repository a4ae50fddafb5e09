"""The pieces of an experiment, each named by a digest of everything that decides it. Only changed pieces run again.

source  a model trained from scratch
grown   a target made from a source by a method
trained a grown target after training
tuned   a trained target, fine-tuned on a downstream task
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from pydantic import ValidationError

from lemonx.checkpoints.creating import remove, write_whole
from lemonx.checkpoints.opening import read_inside
from lemonx.checkpoints.plain import JsonValue, parse_json
from lemonx.errors import BadRecipe
from lemonx.training.curve import CurveRow
from lemonx_lab.experiments.fingerprint import GROWTH, TRAINING, files, fingerprint
from lemonx_lab.experiments.spec import AS_IT_IS, GROWN_FROM, Arm, Downstream, Experiment

SOURCE, GROWN, TRAINED, TUNED = "source", "grown", "trained", "tuned"


@dataclass(frozen=True)
class Node:
    """One piece of work: `after` are the nodes it needs, `what` are its settings.

    `key` names the folder of its result; experiments that need the same piece share it.
    """

    kind: str
    what: Mapping[str, JsonValue]
    after: tuple[Node, ...] = ()
    label: str = field(default="", compare=False)

    @cached_property
    def key(self) -> str:
        # Once: a node takes its name along to the process that works on it, whatever the code on disk has become.
        content = {"kind": self.kind, "what": self.what, "after": [node.key for node in self.after]}
        content |= fingerprint(GROWTH if self.kind == GROWN else TRAINING)
        content |= {"files": digests} if (digests := [files(path) for path in self._paths()]) else {}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def _paths(self) -> Iterator[Path]:
        """The files and folders that its data sections name."""
        beside = self.what.get("beside")
        for section in (self.what.get("data"), *(beside.values() if isinstance(beside, dict) else ())):
            named = (section.get("path"), section.get("validation")) if isinstance(section, dict) else ()
            yield from (Path(one).expanduser() for one in named if isinstance(one, str))

    @property
    def steps(self) -> int:
        steps = self.what.get("steps")
        return steps if isinstance(steps, int) else 0

    def folder(self, cache: Path) -> Path:
        return cache / f"{self.kind}-{self.key}"

    def done(self, cache: Path) -> bool:
        """True if its own record is there; a run also takes along the record that lies beside its source."""
        if not (self.folder(cache) / DONE).exists():
            return False
        found = self.record(cache)
        return (found.get("kind"), found.get("what")) == (self.kind, self.what)

    def record(self, cache: Path) -> Trained:
        """The account of the finished work."""
        return parse_json(read_inside(self.folder(cache).resolve(), DONE))


DONE = "done.json"


class Trained(TypedDict):
    """done.json of a training; that of a growth ends with the label."""

    kind: str
    what: Mapping[str, JsonValue]
    label: str
    final: CurveRow
    flops: float
    seconds: float
    curve: list[CurveRow]


@dataclass(frozen=True)
class Measurement:
    """One measurement of an experiment: an arm, a length, a seed, and the nodes behind it."""

    arm: str
    length: float
    seed: int
    source: Node
    trained: Node
    downstream: Mapping[str, Node]


def cells(experiment: Experiment) -> Iterator[Measurement]:
    """Every measurement that an experiment asks for; seeds outermost, so that a first answer comes early."""
    for seed in experiment.seeds:
        for arm in experiment.arms:
            source = _source(experiment, arm.source, seed)
            grown = source if arm.method == AS_IT_IS else _grown(experiment, arm, source, seed)
            for length in experiment.lengths_of(arm):
                trained = _trained(experiment, arm, grown, length, seed)
                tuned = {task.name: _tuned(task, trained, seed) for task in experiment.downstream}
                yield Measurement(arm.label, length, seed, source, trained, tuned)


def with_needs(wanted: Iterable[Node]) -> dict[str, Node]:
    """Every node by key, after the nodes that it needs."""
    found: dict[str, Node] = {}
    for node in wanted:
        if node.key not in found:
            found |= with_needs(node.after) | {node.key: node}
    return found


def check(wanted: Iterable[Node]) -> None:
    """BadRecipe, before anything runs, that names the first piece of work whose settings make no sense."""
    from lemonx.training.growth_file import GrowthFile
    from lemonx.training.strict import first_problem
    from lemonx_lab.training.recipe import parse_recipe

    for node in with_needs(wanted).values():
        if node.kind != GROWN:
            parse_recipe({**node.what, **({"source": "its source"} if node.after else {})}, node.label)
            continue
        try:
            GrowthFile.model_validate(dict(node.what))
        except ValidationError as error:
            raise BadRecipe(*first_problem(error, GrowthFile)).about(node.label) from None


def _source(experiment: Experiment, name: str, seed: int) -> Node:
    recipe = {**experiment.train, **experiment.sources[name], "seed": seed}
    grown: Any = recipe.pop(GROWN_FROM, None)
    if grown is None:
        return Node(SOURCE, recipe, label=f"source {name}, seed {seed}")
    options = {**grown, "seed": seed}
    before = _source(experiment, options.pop("from"), seed)
    larger = Node(GROWN, {"method": "lemon", **options}, (before,), label=f"growth of {name}, seed {seed}")
    return Node(SOURCE, recipe, (larger,), label=f"source {name}, seed {seed}")


def _grown(experiment: Experiment, arm: Arm, source: Node, seed: int) -> Node:
    # Knowledge inheritance starts as training from scratch does: one fresh target serves all.
    from lemonx import methods

    method = "scratch" if methods.find(arm.method).inherits else arm.method
    options = {**experiment.target.expand, **arm.expand, "method": method, "seed": seed}
    return Node(GROWN, options, (source,), label=f"{arm.label}, seed {seed}")


def _trained(experiment: Experiment, arm: Arm, grown: Node, length: float, seed: int) -> Node:
    from lemonx import methods

    recipe = {**experiment.train, **experiment.target.train, **arm.train, "seed": seed}
    recipe["steps"] = experiment.steps_of(length)
    if arm.method != AS_IT_IS and (kind := methods.find(arm.method).inherits):
        recipe["inheritance"] = {"kind": kind}
    return Node(TRAINED, recipe, (grown,), label=f"{arm.label}, {recipe['steps']} steps, seed {seed}")


def _tuned(task: Downstream, trained: Node, seed: int) -> Node:
    return Node(TUNED, {**task.train, "seed": seed}, (trained,), label=f"{task.name} after {trained.label}")


def run_node(node: Node, cache: Path) -> None:
    """Do one piece of work; its folder appears whole, or is resumed by the next try."""
    folder = node.folder(cache)
    if node.kind == GROWN:
        _grow(node, cache, folder)
        done = {"kind": node.kind, "what": node.what, "label": node.label}
    else:
        done = _train(node, cache, folder)
    write_whole(folder / DONE, json.dumps(done, indent=1))


def _grow(node: Node, cache: Path, folder: Path) -> None:
    from lemonx import api

    options: dict[str, Any] = dict(node.what)  # keywords of api.expand
    remove(folder)
    # The targets of other seeds differ in their noise alone: one proof is enough.
    verify = options.pop("verify", True) and options["seed"] == 0
    api.expand(node.after[0].folder(cache), folder, verify=verify, **options)


def _train(node: Node, cache: Path, folder: Path) -> Trained:
    from lemonx_lab.training.recipe import parse_recipe
    from lemonx_lab.training.run import run

    recipe = dict(node.what)
    if node.after:
        recipe["source"] = str(node.after[0].folder(cache))
    if isinstance(inheritance := recipe.get("inheritance"), dict):
        teacher = node.after[0].after[0].folder(cache)
        recipe["inheritance"] = {**inheritance, "teacher": str(teacher)}
    done = run(parse_recipe({"save_every": 0, **recipe}, node.label), folder, force=False)
    return {
        "kind": node.kind,
        "what": node.what,
        "label": node.label,
        "final": done.final,
        "flops": done.flops,
        "seconds": done.seconds,
        "curve": done.curve,
    }
