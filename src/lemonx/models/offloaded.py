"""Models whose weights stay in a checkpoint until a module runs, whatever store holds them.

transformers and accelerate leave weights on the disk only in safetensors. For any other store they get files of the
right headers whose numbers are a hole, which takes no room. What they would read there is read from the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lemonx.checkpoints import Checkpoint


@dataclass(frozen=True)
class InStore(Mapping[str, torch.Tensor]):
    """The weights of a model by parameter: the name of each in the checkpoint, and the dtype that is wanted."""

    checkpoint: Checkpoint
    index: Mapping[str, Mapping[str, str]]

    def name(self, parameter: str) -> str:
        """Return what the checkpoint calls a parameter."""
        return self.index[parameter].get("weight_name", parameter)

    def __getitem__(self, parameter: str) -> torch.Tensor:
        found = self.checkpoint.read(self.name(parameter))
        dtype = self.index[parameter].get("dtype")
        return found if dtype is None else found.to(getattr(torch, dtype))

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)


def read_from_store(model: Any, checkpoint: Checkpoint) -> None:
    """Have all hooks of a model read from the checkpoint what they would read from hollow files."""
    loaders = {id(loader): loader for module in model.modules() for loader in loaders_of(module)}
    for loader in loaders.values():
        loader.state_dict = InStore(checkpoint, {k: v for k, v in loader.index.items() if "safetensors_file" in v})


def loaders_of(module: Any) -> list[Any]:
    """Return what accelerate's hooks of a module read its weights from."""
    hook = getattr(module, "_hf_hook", None)
    maps = (getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook]))
    loaders = (getattr(weights, "dataset", None) for weights in maps)
    return [loader for loader in loaders if hasattr(loader, "index")]
