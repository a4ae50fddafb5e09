"""A run in many processes under torchrun: they share the model, and the first process writes common files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from lemonx.checkpoints.creating import new_folder
from lemonx.errors import BadRecipe, LemonxError
from lemonx.fsdp import fill
from lemonx.options.declared import Planning
from lemonx.planning.plan import Plan
from lemonx.training import sharded
from lemonx.training.curve import CurveRow
from lemonx.workflows.planning import plan_source
from lemonx_lab.training import model, run_folder
from lemonx_lab.training.run import FinishedRun, TrainingJob
from lemonx_lab.training.run_folder import Saved
from lemonx_lab.training.stages import Leg, grow
from lemonx_lab.training.trainer import LemonTrainer, forward_flops

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedTrainer(LemonTrainer):
    """A Trainer for a sharded model; no process ever holds a whole checkpoint."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # Were it otherwise, every process would train on the same examples, without a word.
        assert self.args.world_size == self.accelerator.num_processes == dist.get_world_size()
        assert all(isinstance(parameter, DTensor) for parameter in self._shared.parameters())

    @property
    def _shared(self) -> PreTrainedModel:
        model: Any = self.model
        return model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        sharded.save(self._shared, output_dir or str(self.args.output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharded.save_moments(self._shared, sharded.plain(self.optimizer), output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(None)
        if checkpoint is not None:
            sharded.load_moments(self._shared, sharded.plain(self.optimizer), checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The job has loaded the weights already."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        dist.barrier()

    def _forward_flops(self, model: Any, inputs: Mapping[str, Any]) -> int:
        """FLOPs of one forward pass, counted on a model without values, so that the processes need not meet.

        The meta device would count attention differently. Masks and labels are left out: they cost no product, and a
        mask without values cannot be read.
        """
        kind: Any = next(base for base in type(model).__mro__ if not base.__name__.startswith("FSDP"))
        with torch.random.fork_rng(devices=[]), FakeTensorMode():
            example = torch.empty(inputs[model.main_input_name].shape, dtype=inputs[model.main_input_name].dtype)
            return forward_flops(kind(model.config), {model.main_input_name: example})


class SharedJob(TrainingJob):
    """A run that several processes share; this is one of them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if any(leg.ramp is not None for leg in self.legs):
            raise BadRecipe("a ramp needs the whole model in one process", "train in one process, or leave it out")
        self.mesh = sharded.start()
        self.first = dist.get_rank() == 0
        batch = self.recipe.batch_size // self.recipe.gradient_accumulation
        if batch % self.mesh.size():
            raise BadRecipe(
                f"a batch of {batch} cannot be divided evenly among {self.mesh.size()} processes",
                "change batch_size, gradient_accumulation or --nproc-per-node",
            )

    @contextmanager
    def claimed(self, *, resume: bool, force: bool) -> Iterator[None]:
        """The first process claims the folder; if it refuses, all processes refuse."""
        if not self.first:
            _agree(None)
            yield
            return
        claim = super().claimed(resume=resume, force=force)
        try:
            claim.__enter__()
        except LemonxError as error:
            _agree(error)
        _agree(None)
        try:
            yield
        except BaseException as error:
            if not claim.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            claim.__exit__(None, None, None)

    def _start(self) -> PreTrainedModel:
        found = super()._start()
        # Fresh parameters are drawn whole, as one process draws them; a model that was read is sharded already.
        return sharded.shard(found, self.mesh) if self.recipe.config is not None else found

    def _bring_along(self, source: Path, expansion: Plan | None = None) -> None:
        if self.first:
            super()._bring_along(source, expansion)
        dist.barrier()

    def _loaded(self, source: Path, decided: Mapping[str, Any]) -> PreTrainedModel:
        """Each process reads its slices; if a new head is needed, every process first reads the whole model."""
        empty = model.empty(self.recipe.task, source, decided)
        found = sharded.allocate(empty, self.mesh)
        if not sharded.load(found, source):
            found = sharded.shard(super()._loaded(source, decided), self.mesh)
        return found

    def _expanded(self, source: Path, leg: Leg) -> PreTrainedModel:
        """Each process computes the slices that it holds; nothing is written and nothing verified."""
        assert leg.expand is not None
        options = Planning.of(leg.expand.growth, solve=True)
        plan = plan_source(source, options)
        self._bring_along(source, plan)
        empty = model.empty(self.recipe.task, plan.target_config, self.data.model)
        return fill(sharded.allocate(empty, self.mesh), source, options)

    def _grown(self, saved: Saved, leg: Leg) -> Saved:
        if self.first:
            grow(saved, leg, self.output)
        dist.barrier()
        found = run_folder.last_saved(self.output, {leg.stage: leg.end for leg in self.legs})
        assert found is not None
        return found

    def _trainer(self) -> type[LemonTrainer]:
        return ShardedTrainer

    def _tell(self, step: int, history: list[CurveRow], figures: Mapping[str, float]) -> None:
        if self.first:
            super()._tell(step, history, figures)

    def _save(self, trained: PreTrainedModel, partial: Path) -> None:
        if self.first:
            new_folder(partial)
        dist.barrier()
        sharded.save(trained, partial)

    def _publish(self, trained: PreTrainedModel, partial: Path, done: FinishedRun) -> None:
        if self.first:
            super()._publish(trained, partial, done)
        dist.barrier()


def _agree(error: LemonxError | None) -> None:
    """Raise in every process what the first process raises."""
    told: list[Any] = [error]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise told[0]
