"""Expand a folder, or a model in memory: plan, write, verify, certify. The output appears whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lemonx import methods
from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.adapters import Adapter
from lemonx.checkpoints.dcp import DcpFolder
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.replaceable import CARD
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.checkpoints.shards import config_text
from lemonx.checkpoints.temporary import Temporary
from lemonx.checkpoints.universal import UniversalFolder
from lemonx.errors import BadTarget, NotVerified
from lemonx.execution.ramp import write_ramp
from lemonx.execution.runner import Sink, WantedRows, everything, run_plan, write_made
from lemonx.execution.sidecar_files import Carried, companions
from lemonx.guards.results import Result
from lemonx.models import in_memory
from lemonx.models.building import check_builds
from lemonx.models.sources import open_pair, open_source
from lemonx.optimizer_state.on_disk import GrownState
from lemonx.options.declared import Expansion, PathLike, Writing
from lemonx.options.sizes import parse_shards
from lemonx.planning.plan import Plan
from lemonx.verification.card import model_card
from lemonx.verification.certificate import FILE, Certificate, certificate
from lemonx.verification.fitting import require_as_built, require_fitting
from lemonx.verification.verify import Verified, measure
from lemonx.workflows.adapters import GrowingAdapter
from lemonx.workflows.planning import plan_growth
from lemonx.workflows.ranks import Ranks
from lemonx.workflows.run_output import RunOutput
from lemonx.workflows.tables import require_sample, table_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class Expanded(Result, os.PathLike[str], printer="expansion:print_expanded"):
    """A checkpoint that was written: where, by which plan, and what was measured.

    It can be used wherever a path is wanted: `AutoModel.from_pretrained(expanded)`, `expanded / "config.json"`.
    """

    path: Path
    plan: Plan
    verified: Verified
    certificate: Certificate

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def push(self, repo: str, *, private: bool = True) -> str:
        """Upload it, with its model card, to the hub as `org/name`. Return the address where it is then."""
        from lemonx.hub.upload import push

        return push(self.path, repo, private=private)


def expand_model(model: PreTrainedModel, options: Expansion) -> tuple[PreTrainedModel, Plan]:
    """A larger model of the same class, from tensor to tensor, and the plan by which it was made."""
    from lemonx.execution.held import HeldSink  # what is shared takes torch longer to import than a folder to grow

    with Temporary() as folder, in_memory.opened(model, folder / "source", verify=options.verify) as checkpoint:
        if options.verify:
            require_as_built(model, checkpoint.config)
        with table_for(checkpoint, options):
            plan = plan_growth(checkpoint, options)
            if plan.ramp:
                raise BadTarget("a ramp travels in a file beside the checkpoint", "expand a folder, or leave ramp out")
            beside = _checked(plan, checkpoint, options)
            weights = {step.name: torch.empty(step.shape, dtype=torch_dtype(step.dtype)) for step in plan.steps}
            _write_tensors(plan, checkpoint, HeldSink.whole(weights), options)
            with in_memory.written(folder / "target", plan, beside, weights) as target:
                if options.verify:
                    measured(plan, checkpoint, target)
                return in_memory.load_like(model, target, plan), plan


def expand_folder(source: Path, given: PathLike, options: Expansion) -> Expanded:
    """Write the expansion of a checkpoint."""
    output = Path(os.path.expanduser(given))
    kept: Adapter | None = None
    if options.keep_adapter:
        opened, kept = open_pair(source, options.adapter, allow_pickle=options.pickled)
    else:
        opened = open_source(
            source,
            allow_pickle=options.pickled,
            adapter=options.adapter,
            config=options.config,
            run=options.with_optimizer,
        )
    with opened as checkpoint, table_for(checkpoint, options), ExitStack() as stack:
        plan = plan_growth(checkpoint, options)
        beside_it = stack.enter_context(GrowingAdapter(kept, checkpoint, plan, output)) if kept else None
        beside = _checked(plan, checkpoint, options)
        entries = [(step.name, step.dtype, step.shape) for step in plan.steps]
        ranks = Ranks.of_torchrun() if isinstance(checkpoint.run, DcpFolder) else Ranks()
        run = _run_output(plan, checkpoint, options, ranks)
        files = run.files() if run else None

        def writer(into: Path | None = None) -> CheckpointWriter:
            own = run.own(ranks) if run and ranks.count > 1 else None
            size, force, origin = parse_shards(options.shards)[0], options.force, checkpoint.origin
            return CheckpointWriter(
                output, entries, max_shard_size=size, force=force, source=origin, files=files, own=own, into=into
            )

        if not ranks.first:
            folder = ranks.at_first(Path)
            with writer(folder) as shared:
                ranks.together(lambda: _write(plan, checkpoint, shared, options, run, ranks))
            ranks.wait()
            verified, certified = ranks.at_first(_nothing)
            ranks.part()
            return Expanded(output, plan, verified, certified)
        with writer() as made:
            ranks.at_first(lambda: made.folder)
            optimizer = ranks.together(lambda: _write(plan, checkpoint, made, options, run, ranks))
            if plan.ramp:
                write_ramp(plan, checkpoint, made, threads=options.threads)
            made.add_text(CONFIG, config_text(plan.target_config))
            for name, content in beside.items():
                if isinstance(content, str):
                    made.add_text(name, content)
                else:
                    with content() as file:
                        made.add_file(file, name)
            if beside_it:
                beside_it.write(made)
            ranks.wait()  # what the others wrote is complete, and on the disk
            verified, certified = ranks.at_first(
                lambda: _certify(plan, checkpoint, made, options, beside_it, optimizer)
            )
        ranks.part()
    return Expanded(output, plan, verified, certified)


def _nothing() -> tuple[Verified, Certificate]:
    raise AssertionError("only the first process verifies")


def _write(
    plan: Plan,
    checkpoint: Checkpoint,
    writer: CheckpointWriter,
    options: Expansion,
    run: RunOutput | None,
    ranks: Ranks,
) -> GrownState | None:
    """Write this process's part of all tensors; what a certificate says of the optimizer's state."""
    if ranks.count == 1:
        _write_tensors(plan, checkpoint, writer, options)
    else:
        _write_tensors(plan, checkpoint, writer, replace(options, threads=1), lambda step: writer.rows(step.name))
    if run is not None:
        return run.write_state(checkpoint, writer, carried=ranks.first)
    if not options.with_optimizer:
        return None
    from lemonx.optimizer_state.on_disk import grow_folder

    return grow_folder(plan, checkpoint.path, writer.folder, max_shard_size=parse_shards(options.shards)[0])


def _checked(plan: Plan, checkpoint: Checkpoint, writing: Writing) -> dict[str, Carried]:
    """Say what is planned, once everything is checked that would otherwise fail later; the files beside the weights."""
    beside = companions(checkpoint, plan)
    check_builds(plan, checkpoint, verified=writing.verify)
    if writing.verify:
        require_fitting(checkpoint)
        require_sample(checkpoint, plan)
    if writing.planned:
        writing.planned(plan)
    return beside


def measured(plan: Plan, checkpoint: Checkpoint, target: Checkpoint, kept: GrowingAdapter | None = None) -> Verified:
    """What was measured of a target that nobody has yet; NotVerified if it is not the function that it must be."""
    # Hours of expansion must not be thrown away because the machine is small.
    verified = measure(plan, checkpoint, target, must=False)
    if kept and verified.passed:
        verified = replace(verified, adapter=kept.measured(target, outputs=verified.outputs is not None))
    if plan.policy.lossless and not verified.passed:
        raise NotVerified("nothing was written", verified.reason())
    return verified


def _run_output(plan: Plan, checkpoint: Checkpoint, writing: Writing, ranks: Ranks) -> RunOutput | None:
    """What a run's checkpoint is written back as; None for a folder of safetensors.

    DeepSpeed has no checkpoint without an optimizer: the weights of one alone are a folder of safetensors.
    """
    processes = parse_shards(writing.shards)[1]
    if checkpoint.run is not None and (writing.with_optimizer or not isinstance(checkpoint.run, UniversalFolder)):
        processes = processes or (ranks.count if ranks.count > 1 else None)
        return RunOutput(plan, checkpoint, processes=processes, with_state=writing.with_optimizer)
    if processes is not None:
        raise BadTarget(
            f"--shards {processes} is for a distributed checkpoint, and the source is a folder of safetensors",
            "give the size of the largest file, such as --shards 5GB",
        )
    return None


def _write_tensors(
    plan: Plan, checkpoint: Checkpoint, writer: Sink, options: Expansion, wanted: WantedRows = everything
) -> None:
    method, lessons = methods.chosen(options)
    if method.make:
        lessons = replace(lessons, tell=options.learned or lessons.tell)
        write_made(plan, method.make(plan, checkpoint, lessons), writer, options.progress)
    else:
        run_plan(plan, checkpoint, writer, wanted=wanted, threads=options.threads, progress=options.progress)


def _certify(
    plan: Plan,
    checkpoint: Checkpoint,
    writer: CheckpointWriter,
    writing: Writing,
    kept: GrowingAdapter | None,
    optimizer: GrownState | None,
) -> tuple[Verified, Certificate]:
    """Verify the folder while it is still hidden, and add the certificate with what was measured."""
    verified = Verified(None, skipped="--no-verify", adapter=kept.measured(None) if kept else None)
    if writing.verify:
        with open_source(writer.folder) as written:
            verified = measured(plan, checkpoint, written, kept)
    content = replace(
        certificate(plan, checkpoint, verified),
        optimizer=optimizer,
        files=tuple(sorted([*writer.files(), FILE, CARD])),
    )
    writer.add_text(FILE, json.dumps(content.as_dict(), indent=2) + "\n")
    writer.add_text(CARD, model_card(plan, content))
    return verified, content
