"""A model run module by module, with the weights of one in memory at a time.

It is built without weights; accelerate's hooks read each module's weights from the files just before it runs and drop
them right after, so a model larger than memory can run. Large weights are read in strips instead (strips.py).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadCheckpoint, CannotVerify
from lemonx.planning.plan import Plan
from lemonx.verification.blocks import blocks_of, modules_of
from lemonx.verification.loading import load, running
from lemonx.verification.outputs import Outputs, check_inputs, observe
from lemonx.verification.reference import deepened
from lemonx.verification.rounding import Rounding, chosen_parameters, round_once
from lemonx.verification.sample import View, views
from lemonx.verification.strips import AsStored, Change, in_strips

Seen = Callable[[str, int, np.ndarray], None]
"""Called with a stack, a block's index and the stream behind that block, without padding."""


def run_by_module(
    checkpoint: Checkpoint,
    seed: int,
    seen: Seen,
    given: list[View] | None = None,
    rounded: tuple[Rounding, str] | None = None,
    plan: Plan | None = None,
) -> Outputs:
    """Run a checkpoint's model with one module's weights in memory; `seen` gets the stream behind every block.

    `rounded`: with these weights rounded once to that dtype.
    """
    from lemonx.verification.float64 import Float64

    with Float64(), Temporary() as offloaded, _weights_in_files(checkpoint), running(checkpoint.origin):
        options = {"device_map": {"": "disk"}, "offload_folder": str(offloaded)}
        # It would warn that parameters are on the disk, which is the point.
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        with AsStored():
            loaded = load(checkpoint, torch.float64, **options)
        for buffer in loaded.model.buffers():  # these are in memory
            if buffer.is_floating_point():
                buffer.data = buffer.data.double()
        model, meter = loaded.model, _Meter()
        _give_parts(model)
        rounds = _Rounds(model, *rounded, seed) if rounded else None
        if rounds:
            rounds.watch(model)
        check_inputs(loaded, given)
        used = given or views(model, seed)[:1]  # every one more is another reading of all weights
        with (
            _watched(model, blocks_of(checkpoint), used[0].inputs.get("attention_mask"), seen),
            _metered(model, meter),
            deepened(model, plan) as moved,
        ):
            in_strips(model, rounds.of if rounds else (lambda *_: None), meter.saw)
            used, found = observe(loaded, used, seed)
    return Outputs.of(loaded, found, used, weights=meter.peak, moved=moved.most)


class _Rounds:
    """Rounds weights once, at random, whenever they are read, and alike each time."""

    def __init__(self, model: Any, rounding: Rounding, dtype: str, seed: int) -> None:
        self.dtype, self.seed, self.chosen = dtype, seed, chosen_parameters(model, rounding)

    def of(self, name: str, row: int = 0) -> Change | None:
        """The change of a weight's rows from `row` on; None if the weight is not chosen."""
        if self.chosen is not None and name not in self.chosen:
            return None
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(f"{name}.{row}".encode()))
        return partial(round_once, dtype=self.dtype, generator=generator)

    def watch(self, model: Any) -> None:
        """Round the weights of every module that is given them whole."""
        from accelerate.hooks import ModelHook, add_hook_to_module

        rounds = self

        class Round(ModelHook):
            def __init__(self, path: str) -> None:
                self.path = path

            def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
                for name, weight in module.named_parameters(recurse=False):
                    if change := rounds.of(f"{self.path}.{name}".lstrip(".")):
                        change(weight)
                return args, kwargs

        for path, module in model.named_modules():
            if hasattr(module, "_hf_hook") and any(True for _ in module.parameters(recurse=False)):
                add_hook_to_module(module, Round(path), append=True)


def _give_parts(model: Any) -> None:
    """torch's own attention takes the weights of its parts without calling these: they get them when it is called."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Parts(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            for part in module.children():
                part._hf_hook.pre_forward(part)
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            for part in module.children():
                part._hf_hook.post_forward(part, None)
            return output

    for module in model.modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            add_hook_to_module(module, Parts(), append=True)


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


@contextmanager
def _watched(
    model: Any, blocks: Mapping[tuple[str, int], list[str]], mask: torch.Tensor | None, seen: Seen
) -> Iterator[None]:
    handles = []
    if mask is not None:
        mask = mask.flatten(0, -2)  # blocks see texts, also where a model chooses among several of them
    try:
        for (stack, index), module in modules_of(model, blocks).items():

            def hook(_: Any, __: Any, result: Any, stack: str = stack, index: int = index) -> None:
                value = result[0] if isinstance(result, tuple) else result
                if mask is not None and value.shape[:2] == mask.shape:
                    value = value[mask.bool()]  # what is computed at padding is nobody's business
                seen(stack, index, value.double().numpy())

            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Meter:
    """The most bytes of a model's parameters that were in memory at once."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def saw(self, count: int) -> None:
        """Note that a module has `count` bytes beside those that are held."""
        self.peak = max(self.peak, self.held + count)

    def holds(self, more: int) -> None:
        """Note that a module holds so many bytes more than when it was last looked at."""
        self.held += more
        self.saw(0)


@contextmanager
def _metered(model: Any, meter: _Meter) -> Iterator[None]:
    """Look at the weights of every module when it has been given them, and again when it has run."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Look(ModelHook):
        def __init__(self) -> None:
            self.seen = 0

        def look(self, module: Any) -> None:
            live = (weight for weight in module.parameters(recurse=False) if not weight.is_meta)
            before, self.seen = self.seen, sum(weight.nbytes for weight in live)
            meter.holds(self.seen - before)

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            self.look(module)
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            self.look(module)
            return output

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            add_hook_to_module(module, Look(), append=True)
    yield
