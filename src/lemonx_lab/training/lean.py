"""The updates of LemonTrainer without Trainer, whose own work is an eighth of a step of the comparisons' tiny Llama.

The examples and their order, the loss, the clipping, the groups and settings of AdamW, the schedule and the rows of the
log are the same. What a comparison does not need is not here: checkpoints, several processes, stages, mixed precision
and trackers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from lemonx.training.curve import CurveRow
from lemonx.training.schedule import Schedule
from lemonx_lab.data import Prepared
from lemonx_lab.training.inheritance import Teaching
from lemonx_lab.training.recipe import Optimizer, Recipe
from lemonx_lab.training.stream import training_examples
from lemonx_lab.training.trainer import TellStep, batch_flops, require_finite

if TYPE_CHECKING:
    from lemonx.training.kept import KeepSource
    from lemonx.training.ramp import RampCallback
    from lemonx_lab.data.examples import Examples

Batch = Mapping[str, Tensor]


class LeanLoop:
    """One run: a model, its examples and its optimizer, step by step."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        recipe: Recipe,
        data: Prepared,
        schedule: Schedule,
        *,
        keep: KeepSource | None = None,
        teacher: PreTrainedModel | None = None,
        beside: Mapping[str, Prepared] | None = None,
    ) -> None:
        self.keep, self.beside = keep, beside or {}
        self.model, self.recipe, self.data, self.schedule = model, recipe, data, schedule
        self.device = args.device
        self.model.to(self.device)  # type: ignore[arg-type]
        self.teaching = None if teacher is None else Teaching(recipe, teacher, schedule.total, self.device)
        self.optimizers = _optimizers(model, args, recipe.optimizer)
        self.examples = training_examples(recipe, data, self.beside, schedule.total)
        self.history: list[CurveRow] = []
        self._flops, self._counted, self._started = 0, dict[tuple[Any, ...], int](), time.monotonic()

    def train(self, every: int, tell: TellStep, ramp: RampCallback | None = None) -> list[CurveRow]:
        """Train to the end of the schedule, and evaluate before it, at intervals and at its end; returns the log."""
        torch.manual_seed(self.recipe.seed)  # for dropout
        if ramp is not None:
            ramp.begin(self.model)
        self._evaluate(0, tell)
        total, logged = torch.zeros((), device=self.device), 0
        for step in range(self.schedule.total):
            if ramp is not None:
                ramp.before(step)
            total += self._update(step)
            if (step + 1) % every == 0 or step + 1 == self.schedule.total:
                mean, logged = float(total) / (step + 1 - logged), step + 1
                rate = self.schedule.learning_rate(step)
                self._log(step + 1, {"loss": mean, "learning_rate": rate})
                total.zero_()
                tell(step + 1, self.history, {})
                self._evaluate(step + 1, tell)
            else:
                tell(step + 1, self.history, {})
        return self.history

    def _update(self, step: int) -> Tensor:
        """One update; the loss before it."""
        size = self.recipe.batch_size
        batch = self._batch(self.examples.__getitems__(range(step * size, (step + 1) * size)))
        teaching = self.teaching
        teacher = None if teaching is None else teaching.active(step)
        self._flops += batch_flops(self.model, batch, self._counted, teacher)
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = self.schedule.learning_rate(step)
        self.model.train()
        outputs = self.model(**batch, **({} if teaching is None else teaching.more))
        loss = outputs.loss if teaching is None else teaching.loss(outputs.loss, outputs, batch, step)
        loss.backward()
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for each in self.optimizers:
            each.step()
        if self.keep is not None:
            self.keep.put_back()
        self.model.zero_grad()
        return loss.detach()

    def _evaluate(self, step: int, tell: TellStep) -> None:
        """The mean loss over all validation examples, the task's metrics, and the same of the sections beside it."""
        self.model.eval()
        figures = self._measured(self.data.validation, "eval")
        for name, prepared in self.beside.items():
            figures |= self._measured(prepared.validation, f"eval_{name}")
        self._log(step, figures)
        tell(step, self.history, figures)

    def _measured(self, examples: Examples, prefix: str) -> CurveRow:
        size = self.recipe.eval_batch_size or self.recipe.batch_size
        losses, outputs, labels, measure = [], [], [], self.data.metrics
        for start in range(0, len(examples), size):
            batch = self._batch([examples[i] for i in range(start, min(start + size, len(examples)))])
            with torch.no_grad():
                found = self.model(**batch)
            losses.append(found.loss.repeat(len(batch["labels"])))
            if measure is not None:
                outputs.append(found.logits.cpu())
                labels.append(batch["labels"].cpu())
        figures = {f"{prefix}_loss": float(torch.cat(losses).mean())}
        if measure is not None:
            told = measure(torch.cat(outputs).numpy(), torch.cat(labels).numpy())
            figures |= {f"{prefix}_{name}": value for name, value in told.items()}
        return figures

    def _log(self, step: int, figures: CurveRow) -> None:
        require_finite(figures, step)
        spent = {"flops": float(self._flops), "seconds": round(time.monotonic() - self._started, 3)}
        self.history.append({**figures, "step": step, **spent})

    def _batch(self, examples: list[Any]) -> Batch:
        return {name: value.to(self.device) for name, value in self.data.collate(examples).items()}


def _optimizers(model: PreTrainedModel, args: TrainingArguments, asked: Optimizer) -> list[torch.optim.Optimizer]:
    """Trainer's own choice of AdamW and of what is not decayed; with Muon, that for all but hidden matrices."""
    decayed: Callable[..., list[str]] = Trainer.get_decay_parameter_names
    names = set(decayed(None, model))
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = _hidden_matrices(model) if asked.kind == "muon" else set()
    plain = [(name, p) for name, p in parameters if p not in hidden]
    groups = [
        {"params": [p for name, p in plain if name in names], "weight_decay": args.weight_decay},
        {"params": [p for name, p in plain if name not in names], "weight_decay": 0.0},
    ]
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    found: list[torch.optim.Optimizer] = [kind(groups, **options)]
    if matrices := [p for _, p in parameters if p in hidden]:
        found.append(
            torch.optim.Muon(
                matrices,
                lr=args.learning_rate,
                weight_decay=args.weight_decay,
                momentum=asked.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return found


def _hidden_matrices(model: PreTrainedModel) -> set[Tensor]:
    """The weights of linear maps, without the head's: a look-up and a head are no maps between hidden states."""
    head = model.get_output_embeddings()
    linear = (module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head)
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return {module.weight for module in linear} - tables
