"""Training in many processes that share one model: FSDP2, and checkpoints that no process ever holds whole.

accelerate and Trainer, asked for FSDP on a CPU, train copies (DDP) without a word. So the model is sharded here, before
Trainer sees it, and handed over as what transformers calls sharded at load time: then Trainer neither moves nor wraps
it. The same code runs on GPUs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start() -> DeviceMesh:
    """Joins the other processes (again, if need be): one axis over all of them, GPUs if there are any."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """The same model, of which each process holds a slice of every parameter; Trainer takes it as it is.

    Blocks are gathered one at a time. A model on the meta device stays there: `to_empty`, then load it.
    """
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model._is_distributed_loading_by_transformers = True
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated modules: what stands in a ModuleList that is in no other one."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [block for name in outermost for block in model.get_submodule(name).children()]


def meta(config: Any, model_class: type[PreTrainedModel], mesh: DeviceMesh, dtype: torch.dtype) -> PreTrainedModel:
    """A sharded model whose parameters have memory and no values yet: each process allocates its slices only."""
    with torch.device("meta"):
        model = model_class(config).to(dtype)
    shard(model, mesh).to_empty(device=mesh.device_type)
    model.tie_weights()
    return model
