"""Large weights that are read a strip of rows at a time while their module runs: none is in memory whole.

A model that is run module by module (by_module.py) holds the weights of one module, in float64. That of an embedding of
100,000 tokens takes gigabytes, of which a sample looks up a few rows; a head of as many is a product whose outputs can
be made one strip after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Bytes in float64 of a weight that is read in strips, and of a strip.
LARGE, STRIP = 1 << 27, 1 << 25

Change = Callable[[torch.Tensor], None]
# Asked with the name of a weight whenever it is to be read: what is then done to its strips, one after the other.
Changing = Callable[[str], Change | None]


@dataclass(frozen=True)
class Stored:
    """A weight in a safetensors file."""

    file: str
    name: str

    @contextmanager
    def rows(self) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Reads rows from start to stop, in float64."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            opened = file.get_slice(self.name)
            yield lambda start, stop: opened[start:stop].double()


def in_strips(model: Any, changing: Changing, used: Callable[[int], None]) -> None:
    """Have the large weights of a model whose weights are on disk read in strips; `used` gets the bytes of each.

    All other hooks are there by then.
    """
    for path, module in model.named_modules():
        # Others, and classes made from these, may use a weight as they like.
        make = {torch.nn.Linear: _product, torch.nn.Embedding: _lookup}.get(type(module))
        if make is None or 8 * module.weight.numel() <= LARGE or getattr(module, "max_norm", None) is not None:
            continue
        weight, bias = (_stored(module, path, name) for name in ("weight", "bias"))
        if weight is None or (getattr(module, "bias", None) is not None and bias is None):
            continue
        # In place of accelerate's, whose hook stays for models that ask it for the weight and use that themselves.
        module.forward = make(module, weight, bias, partial(changing, f"{path}.weight"), used)


def _stored(module: Any, path: str, name: str) -> Stored | None:
    """Where accelerate would read a weight from; None where it is in no safetensors file."""
    hook = getattr(module, "_hf_hook", None)
    maps = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook])]
    indices = [getattr(getattr(weights, "dataset", None), "index", {}) for weights in maps]
    found: dict[str, str] = next((index[f"{path}.{name}"] for index in indices if f"{path}.{name}" in index), {})
    return Stored(found["safetensors_file"], found.get("weight_name", f"{path}.{name}")) if found else None


def _product(
    module: Any, weight: Stored, bias: Stored | None, changing: Callable[[], Change | None], used: Callable[[int], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear layer, some of its outputs at a time."""
    count, step = module.out_features, max(1, STRIP // (8 * module.in_features))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        result = inputs.new_empty(*inputs.shape[:-1], count)
        change = changing()
        with weight.rows() as read:
            for start in range(0, count, step):
                strip = read(start, min(start + step, count))
                used(strip.nbytes)
                if change:
                    change(strip)
                result[..., start : start + len(strip)] = inputs @ strip.T
        if bias is not None:
            with bias.rows() as read:
                result += read(0, count)
        return result

    return forward


def _lookup(
    module: Any, weight: Stored, _: Stored | None, changing: Callable[[], Change | None], used: Callable[[int], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding, of which the rows that are asked for are read."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        tokens, places = ids.unique(return_inverse=True)
        with weight.rows() as read:
            table = torch.cat([read(token, token + 1) for token in tokens.tolist()])
        used(table.nbytes)
        if change := changing():
            change(table)
        return table[places]

    return forward


class AsStored(TorchFunctionMode):
    """A context in which transformers does not cast the large weights that it reads, only to leave them on the disk."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Leaves the dtype of a large weight as it is."""
        given = kwargs or {}
        if func is torch.Tensor.to and given.get("dtype") is torch.float64 and given.keys() == {"device", "dtype"}:
            weight = args[0]
            if weight.is_floating_point() and 8 * weight.numel() > LARGE:
                return weight
        return func(*args, **given)
