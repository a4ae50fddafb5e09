"""Which box of which parameter every tensor of a model's files is: transformers renames empty tensors, and shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from lemonx.checkpoints.chunks import Part, Views, contiguous, whole
from lemonx.errors import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Uncopied(TorchFunctionMode):
    """Leaves tensors where they are when they are made contiguous, so that a part is still seen as one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def traced(model: PreTrainedModel) -> Views:
    """Every tensor that `save_pretrained` would write; tied ones once. Refused where one is no box of a parameter.

    Empty stand-ins go through transformers' renaming. What it splits off shares their storage, and where it begins
    there, and its strides, say which box it is.
    """
    from transformers.core_model_loading import revert_weight_conversion

    seen, standing = set[int](), dict[str, torch.Tensor]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            standing[name] = torch.empty(tuple(tensor.shape), device="meta")
    kept = {tensor.untyped_storage()._cdata: name for name, tensor in standing.items()}
    with _Uncopied():
        reverted = revert_weight_conversion(model, dict(standing))
    views = {}
    for name, tensor in reverted.items():
        own = kept.get(tensor.untyped_storage()._cdata)
        part = None if own is None else _part(own, tuple(standing[own].shape), tensor)
        if part is None:
            raise Refused(
                f"{type(model).__name__} stores {name} in another form than its file does",
                "write the target with lemonx expand, and load that",
            )
        views[name] = (part,)
    return views


def _part(key: str, shape: tuple[int, ...], view: torch.Tensor) -> Part | None:
    """The box of a tensor that a view of it is; None if it is none, or turned."""
    if tuple(view.shape) == shape and view.is_contiguous() and not view.storage_offset():
        return whole(key, shape)[0]
    strides, axes = contiguous(shape), []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        after = range(axes[-1] + 1 if axes else 0, len(shape))
        axis = next((a for a in after if size == 1 or (strides[a] == stride and shape[a] >= size)), None)
        if axis is None:
            return None
        axes.append(axis)
    begin = tuple(int(place) for place in np.unravel_index(int(view.storage_offset()), shape)) if shape else ()
    sizes = [1] * len(shape)
    for axis, size in zip(axes, view.shape, strict=True):
        sizes[axis] = size
    if any(b + n > whole_size for b, n, whole_size in zip(begin, sizes, shape, strict=True)):
        return None
    return Part(key, begin, tuple(sizes), (1,) * len(shape), (0,) * len(axes), tuple(axes))
