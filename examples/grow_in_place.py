"""Grow a model while it trains: in a bare loop, in Trainer, with Accelerate, with Lightning, and under FSDP2.

    python examples/grow_in_place.py loop            # or trainer, accelerate, lightning
    torchrun --nproc-per-node 2 examples/grow_in_place.py fsdp            # or any of these

Each trains a small Llama for a few steps, makes it twice as wide and deeper between two steps, and goes on. Each prints
the loss on the same texts right before and right after the growth, and at the end, and saves an ordinary checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import lemonx

STEPS, AT, BATCH = 12, 6, 8
GROWTH: dict[str, Any] = {"width": "2x", "depth": "+1"}


@dataclass(frozen=True)
class Losses:
    """On the same texts: before the growth, after it, and in the end."""

    before: float
    after: float
    last: float


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Texts that count in steps of their own: the next number follows from the last two."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, step = index * 7 % 61, 1 + index * 5 % 13
        ids = (start + step * torch.arange(16)) % 61
        return {"input_ids": ids, "labels": ids}


def small() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=2, **sizes))


@torch.no_grad()
def measured(model: Any) -> float:
    """The loss on the first texts; the mode of the model stays as it is."""
    training = model.training
    batch = next(iter(DataLoader(Counting(), batch_size=BATCH)))
    loss = float(model.eval()(**batch).loss)
    model.train(training)
    return loss


def part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This process's part of a batch."""
    if not dist.is_initialized():
        return batch
    return {name: texts.chunk(dist.get_world_size())[dist.get_rank()] for name, texts in batch.items()}


# ----------------------------------------------------------------- a bare loop


def loop(folder: Path) -> Losses:
    model = small().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    # Under torchrun each process trains a copy, and the wrapper grows with it.
    trained = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    before = after = 0.0
    for at, batch in enumerate(DataLoader(Counting(), batch_size=BATCH), start=1):
        trained(**part(batch)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if at == AT:
            before = measured(model)
            lemonx.grow_in_place(model, optimizer, **GROWTH)
            after = measured(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
    return Losses(before, after, measured(model))


# ----------------------------------------------------------------- transformers' Trainer


class Growing(TrainerCallback):
    """Grows the model after a step; Trainer has set the gradients to zero by then."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **what: Any) -> None:
        if state.global_step == AT:
            self.seen.append(measured(what["model"]))
            lemonx.grow_in_place(what["model"], what["optimizer"], **GROWTH)
            self.seen.append(measured(what["model"]))


def trainer(folder: Path) -> Losses:
    growing, arguments = Growing(), settings(folder)
    running = Trainer(small(), arguments, train_dataset=Counting(), callbacks=[growing])
    running.train()
    return Losses(*growing.seen, last=measured(running.model))


def settings(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=AT + 2,
        learning_rate=1e-2,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )


# ----------------------------------------------------------------- Accelerate


def accelerate(folder: Path) -> Losses:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = small().train()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = DataLoader(Counting(), batch_size=BATCH)
    model, optimizer, schedule, data = accelerator.prepare(bare, optimizer, schedule, data)
    before = after = 0.0
    for at, batch in enumerate(data, start=1):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if at >= len(data) // 2 and accelerator.sync_gradients and not before:  # the end of an accumulation
            before = measured(model)
            lemonx.grow_in_place(accelerator.unwrap_model(model), optimizer, **GROWTH)
            after = measured(model)
    accelerator.unwrap_model(model).save_pretrained(folder, is_main_process=accelerator.is_main_process)
    accelerator.save_state(str(folder / "state"))
    return Losses(before, after, measured(model))


# ----------------------------------------------------------------- Lightning


def lightning(folder: Path) -> Losses:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = small(), list[float]()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**part(batch)).loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if self.global_step == AT:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()  # Lightning does so only before the next step
                self.seen.append(measured(self.model))
                lemonx.grow_in_place(self.model, optimizer, **GROWTH)
                self.seen.append(measured(self.model))

    module = Module()
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if dist.is_initialized():  # under torchrun each process trains a copy, on its part of each batch
        options |= {"strategy": "ddp", "devices": dist.get_world_size(), "use_distributed_sampler": False}
    run = pl.Trainer(max_steps=STEPS, accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **options)
    run.fit(module, DataLoader(Counting(), batch_size=BATCH))
    run.save_checkpoint(folder / "lightning.ckpt")  # every process calls it
    if run.is_global_zero:
        module.model.save_pretrained(folder)
    return Losses(*module.seen, last=measured(module.model))


# ----------------------------------------------------------------- FSDP2, on many processes


def fsdp(folder: Path) -> Losses:
    from torch.distributed.fsdp import fully_shard

    from lemonx.training import sharded

    mesh = sharded.start()

    def shard(model: LlamaForCausalLM) -> None:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    model: Any = small().train()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    before = after = 0.0
    for at, batch in enumerate(DataLoader(Counting(), batch_size=BATCH), start=1):
        model(**part(batch)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if at == AT:
            before = measured(model)
            model = lemonx.grow_in_place(model, optimizer, shard=shard, **GROWTH).model
            after = measured(model)
    sharded.save(model, folder)
    return Losses(before, after, measured(model))


EXAMPLES = {"loop": loop, "trainer": trainer, "accelerate": accelerate, "lightning": lightning, "fsdp": fsdp}

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as place:
        found = EXAMPLES[sys.argv[1]](Path(place))
    print(f"loss {found.before:.6f}, grown {found.after:.6f}, after more steps {found.last:.6f}")
