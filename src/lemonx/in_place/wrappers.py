"""Wrappers of data parallelism around a model that grows; only DistributedDataParallel must be made again.

DistributedDataParallel lists the parameters and registers on them when it is made. It is made again around the same
model, with its settings, and stays the same object: whoever holds it (Trainer, accelerate, Lightning) goes on with it.
"""

from __future__ import annotations

import gc
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lemonx.errors import Refused
from lemonx.models.attributes import bare_class

_SETTINGS = (
    "device_ids",
    "output_device",
    "dim",
    "process_group",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)


def inside(model: Any) -> Any:
    """The model inside wrappers of data parallelism."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel):
        model = model.module
    return model


def free_gathered(model: nn.Module) -> None:
    """Give a model under FSDP2 its slices back as parameters, which it may have gathered for its last forward pass."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)) and bare_class(module) is not type(module):
            reshard()


def around(model: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers in this process that have listed the model's parameters; Refused if one cannot be made again."""
    # It may be around a module of the user's that holds the model, as Lightning has it.
    found = [
        other
        for other in gc.get_objects()
        if issubclass(type(other), DistributedDataParallel)
        and "_modules" in vars(other)
        and any(module is model for module in other.modules())
    ]
    for wrapper in found:
        hooked = wrapper._forward_hooks or wrapper._forward_pre_hooks or wrapper._backward_hooks
        special = ("_comm_hooks", "mixed_precision", "_delay_all_reduce_params")
        if hooked or any(getattr(wrapper, name, None) for name in special):
            raise Refused(
                "the model is wrapped in a DistributedDataParallel with hooks or a precision of its own",
                "drop the wrapper before, and wrap the model again after the growth",
            )
    return found


def start_again(wrapper: DistributedDataParallel) -> None:
    """Make a wrapper again around its model, with the settings that it has."""
    settings: dict[str, Any] = {name: getattr(wrapper, name) for name in _SETTINGS if hasattr(wrapper, name)}
    if settings["broadcast_buffers"]:
        del settings["broadcast_buffers"]  # the default, which newer versions call by another name
    if not getattr(wrapper, "bucket_bytes_cap_default", True):
        settings["bucket_cap_mb"] = wrapper.bucket_bytes_cap / 2**20
    module, training = wrapper.module, wrapper.training
    DistributedDataParallel.__init__(wrapper, module, **settings)
    wrapper.training = training
