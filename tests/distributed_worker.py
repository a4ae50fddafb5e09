"""What each of two processes does for test_distributed.py: expand, save and train a model that they share.

Run by torchrun with a folder that holds `jobs.json`; every process writes what it found to `found-RANK.json`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers.utils import logging

import lemonx
import pico
from lemonx import api
from lemonx.checkpoints import Checkpoint
from lemonx.errors import LemonxError
from lemonx.execution import row_readers
from lemonx.fsdp import bytes_read, fill, held_tensors, load_expanded, shares
from lemonx.in_place import measuring, shared
from lemonx.training import sharded
from lemonx_lab.training import model as models
from lemonx_lab.training import trainer
from lemonx_lab.training.recipe import parse_recipe
from lemonx_lab.training.run import run

# Loops in which each process trains a copy, and gradients are exchanged.
COPIES = ("loop", "trainer", "accelerate", "lightning")
# Families whose modules keep several tensors of the files in one parameter.
FUSED = ("mixtral",)


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


def differing(model: Any, target: Path) -> tuple[list[str], int]:
    """The tensors of which this process holds something else than a folder has, and the bytes of the folder's."""
    wrong, count = [], 0
    with Checkpoint.open(target) as written:
        held = held_tensors(model)
        assert held.keys() == written.tensors.keys()
        for name, one in held.items():
            stored = written.read(name)
            boxes = [tuple(slice(axis.start, axis.stop) for axis in piece.box) for piece in one.pieces]
            count += sum(piece.local.numel() for piece in one.pieces)
            if not all(piece.local.equal(stored[box]) for piece, box in zip(one.pieces, boxes, strict=True)):
                wrong.append(name)
        assert count == sum(p.to_local().numel() for p in model.parameters()), "nothing is held twice or forgotten"
        return wrong, sum(info.nbytes for info in written.tensors.values())


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
    wrong, whole = differing(model, target)
    placements = {str(placement) for parameter in model.parameters() for placement in parameter.placements}  # pyright: ignore
    # Afterwards: a forward pass leaves the root's parameters gathered.
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())  # pyright: ignore
    if name not in FUSED:
        sharded.save(model, folder / name / "saved")
    # torch's grouped product takes no experts of these sizes.
    outputs = torch.zeros(0) if name in FUSED else pico.outputs(model.eval(), pico.inputs(model, seed=1))
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
    return said


def in_place(folder: Path) -> dict[str, Any]:
    """The example of a bare loop under FSDP2, and what is refused before anything is changed."""
    example = load_example("grow_in_place")
    found = {"fsdp": vars(example.fsdp(folder))}
    # Copies of one model, each with half of the texts; test_examples verifies them.
    example.GROWTH["verify"] = False
    found |= {name: vars(example.EXAMPLES[name](folder / name)) for name in COPIES}
    split: Any = sharded.shard(example.small(), sharded.start())
    said = []
    for options in ({}, {"shard": lambda model: None, "width": 33}):
        try:
            lemonx.grow_in_place(split, **{**example.GROWTH, **options})
        except LemonxError as error:
            said.append(f"{type(error).__name__}: {error}")
    split(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    if dist.get_rank() == 0:
        split.zero_grad()  # one process alone must not go on
    try:
        lemonx.grow_in_place(split, shard=lambda model: None, **example.GROWTH)
    except LemonxError as error:
        said.append(f"{type(error).__name__}: {error}")
    return {**found, "said": said, "as_it_was": as_it_was(example)}


def tampered(example: Any) -> dict[str, Any]:
    """Growths that go wrong in one process, and what both say; the model that was to grow trains on as if never asked.

    A weight is wrong in its file too. A buffer is in no file, and only running the model itself shows it. A disk that
    is full stops one process.
    """
    mesh, patch = sharded.start(), pytest.MonkeyPatch()

    def shard(model: Any) -> None:
        sharded.shard(model, mesh)

    def weight(model: Any) -> None:
        if dist.get_rank() == 1:
            model.model.layers[1].mlp.up_proj.weight.to_local()[0, 0] += 0.1

    def frequencies(model: Any) -> None:
        if dist.get_rank() == 1:
            model.model.rotary_emb.inv_freq *= 1.01

    def disk(model: Any) -> None:
        if dist.get_rank() == 0:
            patch.setattr(measuring, "measured", full)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    model: Any = example.small().train()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before, random, said = example.measured(model), torch.get_rng_state(), {}
    model.model.layers[0].eval()
    for attack in (weight, frequencies, disk):

        def wrong(large: Any, *given: Any, attack: Any = attack, **options: Any) -> Any:
            fill(large, *given, **options)
            with torch.no_grad():
                attack(large)
            return large

        patch.setattr(shared, "fill", wrong)
        try:
            lemonx.grow_in_place(model, optimizer, shard=shard, **{**example.GROWTH, "verify": True})
        except (LemonxError, OSError) as error:
            said[attack.__name__] = f"{type(error).__name__}: {error}"
        finally:
            patch.undo()
    found = {
        "said": said,
        "modes": [block.training for block in model.model.layers],
        "slices": all(isinstance(p, DTensor) for p in model.parameters()),
        "random": torch.get_rng_state().equal(random),
        "losses": [before, example.measured(model)],
    }
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    large = lemonx.grow_in_place(model, optimizer, shard=shard, **{**example.GROWTH, "verify": True}).model
    return {**found, "then": [example.measured(model), example.measured(large)]}


def as_it_was(example: Any) -> dict[str, Any]:
    """A model of a derived class, gathered, partly frozen and still, with settings of its own, and what it becomes."""

    class Derived(example.LlamaForCausalLM):
        pass

    def shard(model: Any) -> None:
        for block in model.model.layers:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)

    model: Any = Derived(example.small().config).train()
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].self_attn.attention_dropout = 0.25
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.generation_config.max_new_tokens = 7
    shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = example.measured(model)  # which leaves all parameters gathered
    eps, model.model.norm.variance_epsilon = model.model.norm.variance_epsilon, 0.5
    try:
        said = ""
        lemonx.grow_in_place(model, optimizer, shard=shard, width="2x")
    except LemonxError as error:
        said = str(error)
    model.model.norm.variance_epsilon = eps
    model.model.layers[0].eval()
    large: Any = lemonx.grow_in_place(model, optimizer, shard=shard, depth="+2", width="2x").model
    blocks = large.model.layers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        "refused": said,
        "class": [kind.__name__ for kind in type(large).__mro__[:3]],
        "modes": [block.training for block in blocks],
        "trained": [block.mlp.up_proj.weight.requires_grad for block in blocks],
        "held": [id(block.mlp.up_proj.weight) in held for block in blocks],
        "dropout": [block.self_attn.attention_dropout for block in blocks],
        "checkpointed": [block.gradient_checkpointing for block in blocks],
        "new_tokens": large.generation_config.max_new_tokens,
        "losses": [before, example.measured(large)],
    }


def load_example(name: str) -> Any:
    place = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def columns(folder: Path, name: str, options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Every tensor is cut along its last axis, as half of those of tensor parallelism are."""
    source, target = folder / name / "source", folder / name / "target"
    empty = models.empty("causal-lm", target, {})
    fully_shard(empty, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    model = empty.to_empty(device="cpu")
    model.tie_weights()
    with Counted() as counted, CommDebugMode() as sent:
        load_expanded(model, source, **options)
    made, held = api.plan(source, solve=True, **options), held_tensors(model)
    paper = sum(bytes_read(made, step, held[step.name].rows, held[step.name].columns) for step in made.steps)
    read = counted.bytes - 2 * opening(source)
    return {"wrong": differing(model, target)[0], "read": read, "on_paper": paper, "sent": sent.get_total_counts()}


def distributed_run(folder: Path, name: str, options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """A run that two processes save with torch is grown by one, for three processes, and both load what it wrote."""
    source, target = folder / name / "source", folder / name / "target"
    model = sharded.allocate(models.empty("causal-lm", source, {}), mesh)
    assert sharded.load(model, source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # moments of zeros, and weights that decay
    assert sharded.load(model, source)
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "run")
    if dist.get_rank() == 0:
        config = source / "config.json"
        lemonx.expand(
            folder / "run", folder / "run-out", config=config, verify=False, shards=3, with_optimizer=True, **options
        )
    dist.barrier()
    large = sharded.allocate(models.empty("causal-lm", target, {}), mesh)
    optimizer = torch.optim.AdamW(large.parameters(), lr=1e-3)
    weights, moments = cast("tuple[Any, Any]", get_state_dict(large, optimizer))
    state_dict_loader.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "run-out")
    steps = {float(entry["step"]) for entry in moments["state"].values()}
    return {"wrong": differing(large, target)[0], "steps": sorted(steps)}


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
    found["columns"] = columns(folder, name, jobs["expand"][name], mesh)
    found["run"] = distributed_run(folder, name, jobs["expand"][name], mesh)
    row_readers.BLOCK = usual
    for name, job in jobs["train"].items():
        found["train"][name] = train(folder, name, job["recipe"], job["stop"], job["resume"])
    found["in_place"] = in_place(folder / "in-place")
    found["tampered"] = tampered(load_example("grow_in_place"))
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
