"""Weights of linear layers and embeddings, read a strip of rows at a time while their module runs.

A model that is run module by module (by_module.py) holds the weights of one module, in float64. Those of an embedding
of 100,000 tokens take gigabytes, and a sample looks up a few of its rows. A linear layer is a product, whose outputs
are made strip by strip, several at once (products.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lemonx.checkpoints import Checkpoint
from lemonx.guards.workers import cores
from lemonx.models.offloaded import InStore, loaders_of
from lemonx.verification import products

# Bytes of a strip in float64: as many as stay in the cache between being read and being used.
STRIP = 1 << 22

Change = Callable[[torch.Tensor], None]
# The change of some rows of a weight: asked with the weight's name and its first row, whenever these rows are read.
Changing = Callable[[str, int], Change | None]


@dataclass(frozen=True)
class Stored:
    """A weight in a safetensors file, or in a checkpoint."""

    file: str | Checkpoint
    name: str

    @contextmanager
    def rows(self) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Reads rows from start to stop, in float64."""
        from safetensors import safe_open

        if isinstance(held := self.file, Checkpoint):
            yield lambda start, stop: held.read(self.name, start, stop).double()
            return
        with safe_open(held, framework="pt") as file:
            opened = file.get_slice(self.name)
            yield lambda start, stop: opened[start:stop].double()


def in_strips(model: Any, changing: Changing, used: Callable[[int], None]) -> None:
    """Have linear layers and embeddings of a model whose weights are on disk read them in strips.

    `used` gets the bytes that are read at once. All other hooks are there by then.
    """
    for path, module in model.named_modules():
        # Others, and classes made from these, may use a weight as they like.
        make = {torch.nn.Linear: _product, torch.nn.Embedding: _lookup}.get(type(module))
        if make is None or getattr(module, "max_norm", None) is not None:
            continue
        weight, bias = (_stored(module, path, name) for name in ("weight", "bias"))
        if weight is None or (getattr(module, "bias", None) is not None and bias is None):
            continue
        # In place of accelerate's, whose hook stays for models that ask it for the weight and use that themselves.
        module.forward = make(module, weight, bias, partial(changing, f"{path}.weight"), used)


def _stored(module: Any, path: str, name: str) -> Stored | None:
    """Where accelerate would read a weight from; None where it would not."""
    parameter = f"{path}.{name}"
    loader = next((loader for loader in loaders_of(module) if parameter in loader.index), None)
    if loader is None:
        return None
    if isinstance(loader.state_dict, InStore):
        return Stored(loader.state_dict.checkpoint, loader.state_dict.name(parameter))
    found = loader.index[parameter]
    return Stored(found["safetensors_file"], found.get("weight_name", parameter))


def _product(
    module: Any,
    weight: Stored,
    bias: Stored | None,
    changing: Callable[[int], Change | None],
    used: Callable[[int], None],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear layer, some of its outputs at a time."""
    count, parts = module.out_features, -(-8 * module.in_features * module.out_features // STRIP)
    # A multiple of four parts of equal size keeps two and four threads busy.
    step = -(-count // (parts if parts == 1 else -(-parts // 4) * 4))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        result = inputs.new_empty(*inputs.shape[:-1], count)
        used(8 * module.in_features * min(count, step * cores()))
        with weight.rows() as read:

            def strip(start: int, stop: int) -> None:
                rows = read(start, stop)
                if change := changing(start):
                    change(rows)
                result[..., start:stop] = inputs @ rows.T

            products.in_parts(count, step, strip)
        if bias is not None:
            with bias.rows() as read:
                result += read(0, count)
        return result

    return forward


def _lookup(
    module: Any, weight: Stored, _: Stored | None, changing: Callable[[int], Change | None], used: Callable[[int], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding, of which the rows that are asked for are read."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        tokens, places = ids.unique(return_inverse=True)
        with weight.rows() as read:
            table = torch.cat([read(token, token + 1) for token in tokens.tolist()])
        used(table.nbytes)
        if change := changing(0):
            change(table)
        return table[places]

    return forward


class AsStored(TorchFunctionMode):
    """A context in which transformers does not cast the weights that it reads, only to leave them on the disk."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Leave the dtype of a weight as it is."""
        given = kwargs or {}
        if func is torch.Tensor.to and given.get("dtype") is torch.float64 and given.keys() == {"device", "dtype"}:
            weight = args[0]
            if weight.is_floating_point():
                return weight
        return func(*args, **given)
