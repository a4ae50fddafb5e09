"""What each of two processes does for test_distributed.py: expand, save and train a model that they share.

Run by torchrun with a folder that holds `jobs.json`; every process writes what it found to `found-RANK.json`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard
from transformers.utils import logging

import lemonx
import pico
from lemonx import api
from lemonx.checkpoints import Checkpoint
from lemonx.errors import LemonxError
from lemonx.execution import row_readers
from lemonx.fsdp import load_expanded, local_rows, shares, tensors_on_disk
from lemonx.training import model as models
from lemonx.training import sharded, trainer
from lemonx.training.recipe import parse_recipe
from lemonx.training.run import run


class Counted:
    """Counts the bytes that are read from files by preadv, the reader's only way to read tensors."""

    def __enter__(self) -> Counted:
        self.bytes, self._real = 0, os.preadv
        os.preadv = self._read
        return self

    def _read(self, *arguments: Any) -> int:
        count = self._real(*arguments)
        self.bytes += count
        return count

    def __exit__(self, *_: Any) -> None:
        os.preadv = self._real


def opening(source: Path) -> int:
    """Bytes of the headers."""
    with Counted() as counted, Checkpoint.open(source):
        return counted.bytes


def expand(folder: Path, name: str, options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Expand into a sharded model and compare every slice with the folder that one process wrote."""
    source, target = folder / name / "source", folder / name / "target"
    model_class = type(pico.PICO[name]())
    config = model_class.config_class.from_pretrained(target)  # pyright: ignore
    with torch.device("meta"):
        empty = model_class(config)
    model = sharded.allocate(empty.to(torch.float32), mesh)
    with Counted() as counted:
        load_expanded(model, source, **options)
    wrong, placements = [], set()
    with Checkpoint.open(target) as written:
        for tensor_name, tensor in tensors_on_disk(model).items():
            assert isinstance(tensor, DTensor)
            rows = local_rows(tensor)
            placements |= {str(placement) for placement in tensor.placements}
            if not tensor.to_local().equal(written.read(tensor_name, rows.start, rows.stop)):
                wrong.append(tensor_name)
        whole = sum(info.nbytes for info in written.tensors.values())
    # Afterwards: a forward pass leaves the root's parameters gathered.
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())  # pyright: ignore
    sharded.save(model, folder / name / "saved")
    outputs = pico.outputs(model.eval(), pico.inputs(model, seed=1))
    made = api.plan(source, solve=True, **options)
    return {
        "wrong": wrong,
        "placements": sorted(placements),
        "held": held,
        "whole": whole,
        "read": counted.bytes - 2 * opening(source),  # for the plan, and for the tensors
        "on_paper": [share.read for share in shares(made, dist.get_world_size())],
        "outputs": outputs.tolist(),
    }


def train(folder: Path, name: str, recipe: dict[str, Any], stop: int | None, resume: bool) -> dict[str, Any]:
    """The curve of a run; with `stop`, of one that was interrupted after that step and then went on, or did not."""
    kinds: set[str] = set()
    slices: list[float] = []
    step_end = trainer.Rhythm.on_step_end

    def watched(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        shared = [p for p in more["model"].parameters() if isinstance(p, DTensor)]
        kinds.update(f"{type(p).__name__} {p.placements}" for p in shared)
        assert len(shared) == len(list(more["model"].parameters()))
        slices.append(sum(p.to_local().nbytes for p in shared) / sum(p.numel() * p.itemsize for p in shared))
        if stop is not None and state.global_step == stop and not (folder / f"{name}-stopped").exists():
            dist.barrier()
            (folder / f"{name}-stopped").touch()
            raise KeyboardInterrupt
        return step_end(self, args, state, control, **more)

    trainer.Rhythm.on_step_end = watched
    try:
        try:
            done = run(parse_recipe(recipe), folder / name)
        except KeyboardInterrupt:
            if not resume:
                return {}
            done = run(parse_recipe(recipe), folder / name)
    finally:
        trainer.Rhythm.on_step_end = step_end
    return {"curve": done.curve, "kinds": sorted(kinds), "slices": slices, "updates": len(slices)}


def refusals(folder: Path, name: str, options: dict[str, Any], mesh: Any) -> dict[str, str]:
    """What cannot be filled is refused in one line."""
    from torch.distributed.fsdp import fully_shard

    source, target = folder / name / "source", folder / name / "target"
    said = {}

    def attempt(what: str, model: Any) -> None:
        try:
            load_expanded(model, source, **options)
            said[what] = "nothing"
        except LemonxError as error:
            said[what] = f"{type(error).__name__}: {error}"

    empty = models.empty("causal-lm", target, {})
    attempt("on the meta device", sharded.shard(empty, mesh))
    empty = models.empty("causal-lm", target, {})
    columns = fully_shard(empty, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    attempt("another axis", columns.to_empty(device="cpu"))
    return said


def in_place(folder: Path) -> dict[str, Any]:
    """The example of a bare loop under FSDP2, and what is refused before anything is changed."""
    example = load_example("grow_in_place")
    found = {"fsdp": vars(example.fsdp(folder))}
    # Copies of one model, each with half of the texts; test_examples verifies them.
    example.GROWTH["verify"] = False
    found |= {name: vars(example.EXAMPLES[name](folder / name)) for name in ("loop", "trainer", "accelerate")}
    shared: Any = sharded.shard(example.small(), sharded.start())
    said = []
    for options in ({}, {"shard": lambda model: None, "width": 33}):
        try:
            lemonx.grow_in_place(shared, **{**example.GROWTH, **options})
        except LemonxError as error:
            said.append(f"{type(error).__name__}: {error}")
    shared(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    if dist.get_rank() == 0:
        shared.zero_grad()  # one process alone must not go on
    try:
        lemonx.grow_in_place(shared, shard=lambda model: None, **example.GROWTH)
    except LemonxError as error:
        said.append(f"{type(error).__name__}: {error}")
    return {**found, "said": said}


def load_example(name: str) -> Any:
    place = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    jobs = json.loads((folder / "jobs.json").read_text())
    usual, row_readers.BLOCK = row_readers.BLOCK, jobs["block"]
    mesh = sharded.start()
    found: dict[str, Any] = {"expand": {}, "train": {}}
    for name, options in jobs["expand"].items():
        found["expand"][name] = expand(folder, name, options, mesh)
    name = next(iter(jobs["expand"]))
    found["refused"] = refusals(folder, name, jobs["expand"][name], mesh)
    row_readers.BLOCK = usual
    for name, job in jobs["train"].items():
        found["train"][name] = train(folder, name, job["recipe"], job["stop"], job["resume"])
    found["in_place"] = in_place(folder / "in-place")
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
