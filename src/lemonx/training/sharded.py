"""Training in many processes that share one model: FSDP2, and checkpoints that no process ever holds as a whole.

When accelerate and Trainer are asked for FSDP on a CPU, they silently train copies (DDP). So the model is sharded here,
before Trainer sees it, and marked as what transformers calls sharded at load time; Trainer then neither moves nor wraps
it. The same code runs on GPUs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.creating import remove
from lemonx.checkpoints.store import PIECE, row_pieces
from lemonx.errors import BadCheckpoint, Refused
from lemonx.execution.held import HeldSink
from lemonx.fsdp import held_tensors, tensors_on_disk
from lemonx.models.building import compute_buffers
from lemonx.models.in_memory import known_class
from lemonx.optimizer_state.by_name import FOLDER, STATE, has_named_state
from lemonx.optimizer_state.trainer import OPTIMIZER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Bytes per file of weights.
FILE = 5 * 10**9


def processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start() -> DeviceMesh:
    """Join the other processes, if that was not done yet, in a mesh with one axis; on GPUs if there are any."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """The same model, of which each process now holds a slice of every parameter; Trainer takes it unchanged.

    Blocks are gathered one at a time. A model on the meta device stays there: `to_empty`, then load it.
    """
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model._is_distributed_loading_by_transformers = True
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated modules: the entries of every ModuleList that is not inside another one."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [block for name in outermost for block in model.get_submodule(name).children()]


def allocate(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Shard a model on the meta device, and allocate memory for the slices of this process, without values yet."""
    shard(model, mesh).to_empty(device=mesh.device_type)
    model.tie_weights()
    return model


def load(model: PreTrainedModel, folder: str | Path) -> bool:
    """Fill a sharded model from a checkpoint; each process reads its own slices. False if the names do not match."""
    try:
        held = held_tensors(model)
    except Refused:
        return False
    sink = HeldSink(held)
    with Checkpoint.open(folder) as checkpoint:
        if {name: info.shape for name, info in checkpoint.tensors.items()} != {n: one.shape for n, one in held.items()}:
            return False
        for name, one in held.items():
            row_bytes = checkpoint.tensors[name].nbytes // max(1, one.shape[0] if one.shape else 1)
            for start, stop in row_pieces(len(one.rows), len(one.rows) * row_bytes, PIECE):
                first = one.rows.start + start
                sink.write(name, first, checkpoint.read(name, first, first + stop - start))
    compute_buffers(model)
    return True


def save(model: PreTrainedModel, folder: str | Path) -> None:
    """Write a Hugging Face folder: every process writes its slices, and the first merges them file by file."""
    folder = Path(folder)
    tensors = {name: tensor.detach() for name, tensor in tensors_on_disk(model).items()}
    _write(tensors, folder, files=_files(tensors))
    if dist.get_rank() == 0:
        remove(folder / "sharded")
        config = copy.deepcopy(model.config)
        config.architectures = [known_class(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    dist.barrier()


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which file each tensor goes to, counted from 1."""
    result, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.dtype.itemsize
        if size and size + bytes_ > FILE:
            number, size = number + 1, 0
        result[name], size = number, size + bytes_
    return result


def _write(tensors: Mapping[str, Tensor], folder: Path, files: dict[str, int] | None) -> None:
    """Write slices as safetensors, one file per process; with `files`, then merge them."""
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True, enable_consolidation=files is not None)
    state_dict_saver.save(dict(tensors), storage_writer=writer)


def save_moments(model: nn.Module, optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Write Adam's moments by parameter name, the form that `lemonx expand --with-optimizer` grows.

    Each process writes its slices, and nothing is pickled. Trainer's own file has positions instead of names.
    """
    _write(_flat(_state(model, optimizer)), Path(checkpoint) / FOLDER, files=None)


def load_moments(model: nn.Module, optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Load what `save_moments` wrote, with any number of processes; does nothing if there is no state."""
    if not has_named_state(Path(checkpoint)):
        if (Path(checkpoint) / OPTIMIZER).exists():
            raise BadCheckpoint(
                "was saved by one process, which several cannot continue", "continue with one process", file=checkpoint
            )
        return
    state = _state(model, optimizer)
    reader = HuggingFaceStorageReader(str(Path(checkpoint) / FOLDER))
    state_dict_loader.load(_flat(state), storage_reader=reader, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state)


def _state(model: nn.Module, optimizer: Optimizer) -> Any:
    """The state by name; if there is none yet, it is created with zeros."""
    return get_optimizer_state_dict(model, optimizer)


def _flat(state: Any) -> dict[str, Tensor]:
    """The tensors themselves, not copies: what is loaded into them is loaded into the state."""
    return {
        f"{STATE}{name}.{field}": value for name, values in state["state"].items() for field, value in values.items()
    }


def plain(optimizer: Any) -> Optimizer:
    """The optimizer inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
