"""A model whose modules get their weights when they are entered and lose them when they are left.

It is built without weights; accelerate's hooks read each module's weights from the files just before it runs and drop
them right after, so a model larger than memory can run.

Linear layers and embeddings hold even less: they read a strip of their rows at a time. An embedding of 100,000 tokens
takes gigabytes in float64, and a sample looks up a few of its rows. A linear layer is a product, whose outputs are made
strip by strip, several at once.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, CannotVerify
from lemonx.guards.workers import cores
from lemonx.models.offloaded import InStore, loaders_of
from lemonx.verification.float64 import in_parts
from lemonx.verification.rounding import Rounding, chosen_parameters, round_once
from lemonx.verification.running import Loaded, load, running

# Bytes of a strip in float64: as many as stay in the cache between being read and being used.
STRIP = 1 << 22

Change = Callable[[torch.Tensor], None]


@contextmanager
def opened_by_module(checkpoint: Checkpoint) -> Iterator[tuple[Loaded, Visits]]:
    """The model of a checkpoint with its weights on the disk, and the record of the weights that its modules read."""
    with Temporary() as offloaded, _weights_in_files(checkpoint), running(checkpoint.origin):
        # accelerate would warn that parameters are on the disk, which is the point.
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        with _AsStored():
            loaded = load(checkpoint, torch.float64, device_map={"": "disk"}, offload_folder=str(offloaded))
        for buffer in loaded.model.buffers():  # buffers are in memory
            if buffer.is_floating_point():
                buffer.data = buffer.data.double()
        visits = Visits(loaded.model)
        _read_in_strips(loaded.model, visits)
        yield loaded, visits


class Visits:
    """Counts the bytes of weights that are in memory while modules run, and rounds weights when they are read.

    `peak`: the most bytes of parameters that were in memory at once.
    """

    def __init__(self, model: Any) -> None:
        from accelerate.hooks import ModelHook, add_hook_to_module

        visits = self
        self.peak = self._held = 0
        self._model, self._rounds = model, None

        class Visit(ModelHook):
            """Runs behind accelerate's own hook: the weights of the module are there when it is entered."""

            def __init__(self, path: str, parts: list[Any]) -> None:
                self.path, self.parts, self.seen = path, parts, 0

            def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
                for part in self.parts:
                    part._hf_hook.pre_forward(part)
                for name, weight in module.named_parameters(recurse=False):
                    if change := visits.change(f"{self.path}.{name}".lstrip(".")):
                        change(weight)
                self.count(module)
                return args, kwargs

            def post_forward(self, module: Any, output: Any) -> Any:
                for part in self.parts:
                    part._hf_hook.post_forward(part, None)
                self.count(module)
                return output

            def count(self, module: Any) -> None:
                live = (weight for weight in module.parameters(recurse=False) if not weight.is_meta)
                before, self.seen = self.seen, sum(weight.nbytes for weight in live)
                visits._held += self.seen - before
                visits.saw(0)

        for path, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                # torch's own attention takes the weights of its parts without calling the parts.
                whole = isinstance(module, torch.nn.MultiheadAttention)
                add_hook_to_module(module, Visit(path, list(module.children()) if whole else []), append=True)

    def saw(self, count: int) -> None:
        """Note that a module has `count` bytes of weights beside those that modules hold."""
        self.peak = max(self.peak, self._held + count)

    def round(self, rounding: Rounding, seed: int) -> None:
        """Round weights once at random from now on whenever they are read, and alike each time."""
        self._rounds = chosen_parameters(self._model, rounding), rounding.dtype, seed

    def change(self, name: str, row: int = 0) -> Change | None:
        """The rounding of a weight's rows from `row` on; None if the weight is not rounded."""
        if self._rounds is None:
            return None
        chosen, dtype, seed = self._rounds
        if chosen is not None and name not in chosen:
            return None
        generator = torch.Generator().manual_seed(seed + zlib.crc32(f"{name}.{row}".encode()))
        return partial(round_once, dtype=dtype, generator=generator)


@contextmanager
def _weights_in_files(checkpoint: Checkpoint) -> Iterator[None]:
    """A context in which a weight that is in no file, because a model computes it, is an error in one line."""
    try:
        yield
    except BadCheckpoint as error:
        if "meta device" not in str(error.__cause__):
            raise
        raise CannotVerify(
            "has weights that its model computes (positions, say) and no file holds, so it cannot be run block "
            "by block",
            "verify without --layerwise",
            file=checkpoint.origin,
        ) from None


class _AsStored(TorchFunctionMode):
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


# ----------------------------------------------------------------- strips


@dataclass(frozen=True)
class _Weight:
    """A weight in a safetensors file, or in a checkpoint."""

    held: str | Checkpoint
    name: str

    @contextmanager
    def rows(self) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """Yield a function that reads rows from start to stop, in float64."""
        from safetensors import safe_open

        if isinstance(held := self.held, Checkpoint):
            yield lambda start, stop: held.read(self.name, start, stop).double()
            return
        with safe_open(held, framework="pt") as file:
            opened = file.get_slice(self.name)
            yield lambda start, stop: opened[start:stop].double()


def _read_in_strips(model: Any, visits: Visits) -> None:
    """Have the linear layers and embeddings of a model read their weights in strips. All other hooks are there."""
    for path, module in model.named_modules():
        # Other modules, and classes made from these two, may use a weight as they like.
        make = {torch.nn.Linear: _product, torch.nn.Embedding: _lookup}.get(type(module))
        if make is None or getattr(module, "max_norm", None) is not None:
            continue
        weight, bias = (_weight(module, path, name) for name in ("weight", "bias"))
        if weight is None or (getattr(module, "bias", None) is not None and bias is None):
            continue
        # accelerate's hook stays for models that ask a layer for its weight and use that themselves.
        module.forward = make(module, weight, bias, partial(visits.change, f"{path}.weight"), visits.saw)


def _weight(module: Any, path: str, name: str) -> _Weight | None:
    """The place that accelerate would read a weight from; None if it would read it from no file or checkpoint."""
    parameter = f"{path}.{name}"
    loader = next((loader for loader in loaders_of(module) if parameter in loader.index), None)
    if loader is None:
        return None
    if isinstance(loader.state_dict, InStore):
        return _Weight(loader.state_dict.checkpoint, loader.state_dict.name(parameter))
    found = loader.index[parameter]
    return _Weight(found["safetensors_file"], found.get("weight_name", parameter))


def _product(
    module: Any,
    weight: _Weight,
    bias: _Weight | None,
    change: Callable[[int], Change | None],
    used: Callable[[int], None],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a linear layer that makes some of its outputs at a time."""
    count, parts = module.out_features, -(-8 * module.in_features * module.out_features // STRIP)
    # A multiple of four parts of equal size keeps two and four threads busy.
    step = -(-count // (parts if parts == 1 else -(-parts // 4) * 4))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        result = inputs.new_empty(*inputs.shape[:-1], count)
        used(8 * module.in_features * min(count, step * cores()))
        with weight.rows() as read:

            def strip(start: int, stop: int) -> None:
                rows = read(start, stop)
                if rounded := change(start):
                    rounded(rows)
                result[..., start:stop] = inputs @ rows.T

            in_parts(count, step, strip)
        if bias is not None:
            with bias.rows() as read:
                result += read(0, count)
        return result

    return forward


def _lookup(
    module: Any, weight: _Weight, _: _Weight | None, change: Callable[[int], Change | None], used: Callable[[int], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of an embedding that reads the rows that are asked for."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        tokens, places = ids.unique(return_inverse=True)
        with weight.rows() as read:
            table = torch.cat([read(token, token + 1) for token in tokens.tolist()])
        used(table.nbytes)
        if rounded := change(0):
            rounded(table)
        return table[places]

    return forward
