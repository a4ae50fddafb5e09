"""Trains a tiny Llama with DeepSpeed on two processes, and keeps its checkpoint as ds_to_universal converts it.

    pip install deepspeed, then
    torchrun --nproc-per-node 2 make.py STAGE OUTPUT          # the checkpoint
    torchrun --nproc-per-node N make.py STAGE GROWN --load    # load a grown one, and train on

With --tensor-parallel, both processes share every matrix.

The tests read what the first command wrote. The second is the check by DeepSpeed itself, which the tests cannot run
without it. Weights in matrices decay, those of norms do not. One matrix of stages 1 and 2 is frozen: of stage 3 the
converter leaves out what is. Sizes are odd, so that pieces are padded, and flat vectors short, so that there are
several.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 29, "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip
FROZEN = "model.layers.0.mlp.up_proj.weight"
CUT = "--tensor-parallel" in sys.argv
if CUT:
    SIZES |= {"intermediate_size": 24, "vocab_size": 30}


def is_trained(name: str, stage: int) -> bool:
    return name != FROZEN or stage == 3 or CUT


def engine_of(model: Any, stage: int) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "sub_group_size": 1000},
        "zero_allow_untested_optimizer": True,
        **({"tensor_parallel": {"autotp_size": 2}} if CUT else {}),
        "checkpoint": {"load_universal": "--load" in sys.argv},
    }
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for _, parameter in named if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for _, parameter in named if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    model = model.bfloat16() if CUT else model
    return deepspeed.initialize(model=model, config=settings, optimizer=optimizer, lr_scheduler=schedule)[0]


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        seed = 10 * step + (0 if CUT else dist.get_rank())
        inputs = torch.randint(0, 29, (2, 12), generator=torch.Generator().manual_seed(seed))
        loss = engine(input_ids=inputs, labels=inputs).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def convert(folder: Path, into: str) -> None:
    run = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    run += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    run += ["--input_folder", str(folder / "global_step3"), "--output_folder", into]
    subprocess.run(run, check=True)


def check_loaded(engine: Any, folder: Path) -> None:
    """What DeepSpeed now holds, weights and moments, is what the files of a universal checkpoint hold, bit for bit."""
    for name, parameter in engine.module.named_parameters():
        for field in ("fp32", "exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            saved = torch.load(folder / name / f"{field}.pt")
            saved = saved["param"] if isinstance(saved, dict) else saved
            held: Any = safe_get_full_fp32_param(parameter)
            if field != "fp32":
                held = safe_get_full_optimizer_state(parameter, field)
            assert held.flatten().equal(saved.flatten()), (name, field)
    print("as in the files")


def main() -> None:
    stage, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    if "--load" in sys.argv:
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name, stage))
        engine = engine_of(model, stage)
        engine.load_checkpoint(str(folder))
        if not CUT:
            check_loaded(engine, folder / "global_step3_universal" / "zero")
        print(
            dist.get_rank(),
            engine.global_steps,
            engine.lr_scheduler.state_dict()["last_epoch"],
            train(engine, range(3, 6)),
        )
        print([group["weight_decay"] for group in engine.optimizer.param_groups])
        return
    model = LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]))
    model.get_parameter(FROZEN).requires_grad_(is_trained(FROZEN, stage))
    engine = engine_of(model, stage)
    print(dist.get_rank(), train(engine, range(3)))
    engine.save_checkpoint(str(folder), tag="global_step3")
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)
        convert(folder, str(folder / "global_step3_universal"))
        shutil.rmtree(folder / "global_step3")
        (folder / "latest").unlink()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
