"""transformers' Trainer with our schedule, our order of the data, inheritance, counted FLOPs and atomic checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import is_torch_bf16_gpu_available

from lemonx.checkpoints.creating import new_folder, remove
from lemonx.errors import BadRecipe
from lemonx.optimizer_state.by_name import has_named_state
from lemonx.training.curve import CurveRow
from lemonx.training.schedule import Schedule
from lemonx_lab.data import Prepared
from lemonx_lab.training.inheritance import Teaching
from lemonx_lab.training.muon import MuonWithAdamW, hidden_matrices
from lemonx_lab.training.recipe import Optimizer, Recipe
from lemonx_lab.training.run_folder import saved_folders
from lemonx_lab.training.stream import training_examples

# Told the step, what was logged so far, and figures after an evaluation.
TellStep = Callable[[int, list[CurveRow], Mapping[str, float]], None]
# A backward pass costs twice the forward pass: one product for the input's gradient, one for the weight's.
FORWARDS = 3


def arguments(recipe: Recipe, folder: Path, *, end: int, fresh: bool) -> TrainingArguments:
    """The arguments for Trainer; `Rhythm` decides when to log, evaluate and save."""
    world, short = int(os.environ.get("WORLD_SIZE", "1")), recipe.precision == "bfloat16"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=end,
        per_device_train_batch_size=recipe.batch_size // recipe.gradient_accumulation // world,
        per_device_eval_batch_size=(recipe.eval_batch_size or recipe.batch_size) // world or 1,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        learning_rate=recipe.learning_rate,
        adam_beta1=recipe.optimizer.betas[0],
        adam_beta2=recipe.optimizer.betas[1],
        adam_epsilon=recipe.optimizer.eps,
        weight_decay=recipe.optimizer.weight_decay,
        max_grad_norm=recipe.clip,
        bf16=short,
        seed=recipe.seed,
        data_seed=recipe.seed,
        eval_on_start=fresh,
        eval_strategy="no",
        logging_strategy="no",
        save_strategy="no",
        train_sampling_strategy="sequential",  # the order is that of training_examples
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        label_names=["labels"],
        logging_nan_inf_filter=False,  # a curve shows what happened
        disable_tqdm=True,
        report_to=list(recipe.report_to) or "none",
        # Unless told, Trainer sees one process on CPUs, and refuses bfloat16 there.
        use_cpu=not torch.cuda.is_available() and (world > 1 or (short and not is_torch_bf16_gpu_available())),
    )


class Rhythm(TrainerCallback):
    """Evaluates and saves at fixed intervals and at the end; a checkpoint contains the log up to its step."""

    def __init__(self, evaluate: int, save: int, end: int, total: int, tell: TellStep) -> None:
        self.evaluate, self.save, self.end, self.total, self.tell = evaluate, save, end, total, tell

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step = state.global_step
        control.should_evaluate = step % self.evaluate == 0 or step == self.end
        # The end of a stage is always saved: the next one grows from there.
        control.should_save = step == self.end if self.save == 0 else step % self.save == 0 or step == self.end
        control.should_save &= self.save > 0 or self.end < self.total
        control.should_log = control.should_evaluate or control.should_save
        self.tell(step, state.log_history, {})

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self.tell(state.global_step, state.log_history, more["metrics"])


class LemonTrainer(Trainer):
    """One stage of a run: from the step of the checkpoint it resumes to `args.max_steps`."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        recipe: Recipe,
        data: Prepared,
        schedule: Schedule,
        *,
        teacher: PreTrainedModel | None = None,
        beside: Mapping[str, Prepared] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.beside = beside or {}
        self.schedule, self.recipe = schedule, recipe
        self.teaching = None if teacher is None else Teaching(recipe, teacher, schedule.total, args.device)
        self._before, self._started = seconds, time.monotonic()
        self._counted: dict[tuple[Any, ...], int] = {}
        self._partial: Path | None = None
        super().__init__(
            model,
            args,
            data_collator=data.collate,
            train_dataset=training_examples(recipe, data, self.beside, schedule.total),
            eval_dataset=data.validation,
            compute_metrics=_metrics(data),
            optimizer_cls_and_kwargs=_muon(model, args, recipe.optimizer),
        )
        self.remove_callback(PrinterCallback)

    # The schedule and the optimizer.

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        rate, maximum = self.schedule.learning_rate, self.schedule.maximum
        used: Any = optimizer or self.optimizer
        self.lr_scheduler = LambdaLR(used, lambda step: rate(step) / maximum)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        # A grown model may come without the state of an optimizer; the schedule goes on all the same.
        step, scheduler, optimizer = self.state.global_step, self.lr_scheduler, self.optimizer
        scheduler: Any
        optimizer: Any
        scheduler.last_epoch = step
        scheduler._last_lr = [self.schedule.learning_rate(step)] * len(optimizer.param_groups)
        for group in optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate(step)
        if checkpoint is not None and has_named_state(Path(checkpoint)):
            # Several processes saved it, and one goes on.
            from lemonx.training import sharded

            whole: Any = self.model
            sharded.load_moments(whole, sharded.plain(optimizer), checkpoint)

    # The loss.

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        teaching = self.teaching if model.training else None
        asked = inputs if teaching is None else {**inputs, **teaching.more}
        loss, outputs = super().compute_loss(model, asked, True, num_items_in_batch)
        if teaching is not None:
            share = self._share(teaching, inputs, num_items_in_batch)
            loss = teaching.loss(loss, outputs, inputs, self.state.global_step, share)
        return (loss, outputs) if return_outputs else loss

    def _share(self, teaching: Teaching, inputs: Any, items: Any) -> Any:
        """The part that these inputs have of all positions over which the task's loss is averaged."""
        if items is None or not self.model_accepts_loss_kwargs:
            return None
        processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return teaching.positions(inputs) / items * processes

    def evaluate(self, *given: Any, **more: Any) -> dict[str, float]:
        """The loss on the task's own examples, and on those of the sections `beside` it."""
        trainer: Any = super()
        found = trainer.evaluate(*given, **more)
        for name, prepared in self.beside.items():
            found |= trainer.evaluate(prepared.validation, metric_key_prefix=f"eval_{name}")
        return found

    # FLOPs and the curve.

    def floating_point_ops(self, inputs: dict[str, Tensor | Any]) -> int:
        """FLOPs of an update with this batch, counted once for every shape of an example."""
        inputs = self._prepare_inputs(inputs)
        shapes = tuple((key, tuple(value.shape[1:])) for key, value in inputs.items() if isinstance(value, Tensor))
        teacher = None if self.teaching is None else self.teaching.active(self.state.global_step)
        known = (shapes, teacher is not None)
        if known not in self._counted:
            one = {name: value[:1] for name, value in inputs.items()}
            taught = 0 if teacher is None else self._forward_flops(teacher, one)
            self._counted[known] = FORWARDS * self._forward_flops(self.model, one) + taught
        return self._counted[known] * len(next(iter(inputs.values())))

    def _forward_flops(self, model: Any, inputs: Mapping[str, Any]) -> int:
        """FLOPs of one forward pass."""
        return forward_flops(self.accelerator.unwrap_model(model), inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.store_flos()
        logs["flops"] = self.state.total_flos
        logs["seconds"] = round(self.seconds, 3)
        require_finite(logs, self.state.global_step)
        super().log(logs, start_time)

    @property
    def seconds(self) -> float:
        """Since the run began, without the time between a kill and the resumption."""
        return self._before + time.monotonic() - self._started

    # Checkpoints appear whole or not at all, and only the last is kept.

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._partial or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(str(self.args.output_dir))
        name = f"checkpoint-{self.state.global_step}"
        self._partial = folder / ".partial"
        if self.args.should_save:
            new_folder(self._partial)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        finished, self._partial = self._partial, None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            remove(folder / name)
            os.rename(finished / name, folder / name)
            remove(finished)
            for other in saved_folders(folder):
                if other.name != name:
                    remove(other)


def _muon(model: PreTrainedModel, args: TrainingArguments, asked: Optimizer) -> tuple[Any, Any] | None:
    """The class and the keywords of an optimizer with Muon; AdamW is Trainer's own choice and needs no answer."""
    if asked.kind != "muon" or not (hidden := hidden_matrices(model)):
        return None
    muon = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "momentum": asked.momentum}
    return MuonWithAdamW, dict(hidden=hidden, muon=muon, adamw=Trainer.get_optimizer_cls_and_kwargs(args, model))


def require_finite(figures: Mapping[str, float], step: int) -> None:
    """BadRecipe if a loss is not a number."""
    if not all(math.isfinite(figures.get(name, 0.0)) for name in ("loss", "eval_loss")):
        raise BadRecipe(
            f"the loss is not finite at step {step}", "lower learning_rate, lengthen the warm-up, or set clip"
        )


def forward_flops(model: torch.nn.Module, inputs: Mapping[str, Any]) -> int:
    """FLOPs of one forward pass, counted by torch; the random state stays as it was."""
    was_training = model.training
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops})
    # torch does not count the fused attention of a CPU; the plain one does the same products.
    with torch.no_grad(), torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH), counter:
        model.eval()(**inputs)
    model.train(was_training)
    return counter.get_total_flops()


def _grouped_flops(rows: Any, matrices: Any, *_: Any, **more: Any) -> int:
    """The product of every row with the matrix of its expert, (rows, in) by (experts, in, out): torch counts none."""
    return 2 * rows[0] * rows[1] * matrices[-1]


def _metrics(data: Prepared) -> Callable[[Any], dict[str, float]] | None:
    measure = data.metrics
    if measure is None:
        return None
    return lambda evaluated: measure(evaluated.predictions, evaluated.label_ids)
