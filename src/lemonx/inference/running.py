"""Any config of one class as a model that runs without weights, on inputs that are found once."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, CannotVerify, Refused
from lemonx.guards.limits import LARGEST, MOST_BLOCKS, MOST_BUFFERS
from lemonx.inference.bodiless import Mixed, bodiless
from lemonx.models import door
from lemonx.models.foreign import foreign
from lemonx.specs.config import flat_fields
from lemonx.tracing.blocks import as_lists
from lemonx.tracing.compare import Matched
from lemonx.tracing.infer import Calls, traced
from lemonx.tracing.running import run_traced
from lemonx.tracing.tracer import Tracer
from lemonx.verification.float64 import Float64
from lemonx.verification.inputs import shorten, taken
from lemonx.verification.media import PICTURES, Batch, find_inputs, outputs
from lemonx.verification.running import floating_outputs, with_plain_outputs

# Switches of a config that are turned off.
_OFF = ("use_cache", "use_kernels", "use_mamba_kernels", "use_timm_backbone", "use_pretrained_backbone")
Values = Mapping[str, JsonValue]
Shapes = Mapping[str, tuple[int, ...]]
# Fields that may be larger than any size: what a text may reach, and the numbers of special tokens.
_UNBOUNDED = ("position", "length", "token", "theta", "seed", "_id", "window", "max_", "base")


def as_read(values: Values) -> dict[str, JsonValue]:
    """config.json with every field that its class has, as transformers would write it."""
    with foreign("read config.json", "save the model again"):
        config = door.config_object(values)
        return json.loads(config.to_json_string(use_diff=False)) | {"architectures": values.get("architectures")}


@dataclass(frozen=True)
class Runner:
    """Builds and runs models of one class; `most`: how many parameters are too many."""

    most: int
    batch: Batch

    @staticmethod
    def of(values: Values, most: int) -> Runner:
        """A runner with inputs that the model of this config takes."""
        check_sizes(values)
        empty = Runner(most, {})
        empty.shapes(values)  # refuses what would fill the memory, before anything real is made
        model = empty.model(values)
        with foreign("run the model of config.json without its weights", _ELSE, Refused), Mixed():
            batch, _ = find_inputs(model)
        return Runner(most, batch)

    @property
    def kind(self) -> str:
        """What the model reads: texts (perhaps beside something else), pictures, or neither."""
        if "input_ids" in self.batch:
            return "language"
        return "vision" if any(name in self.batch for name in PICTURES) else "other"

    def shapes(self, values: Values) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters; nothing is run."""
        model = self._built(values, device="meta")
        if sum(buffer.numel() for buffer in model.buffers()) > MOST_BUFFERS:
            raise BadCheckpoint("asks for too many numbers beside the weights", "correct its sizes", file=CONFIG)
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def model(self, values: Values) -> Any:
        """The model of a config, without weights, in float64."""
        with Float64():
            return self._built(values).double().eval()

    def _built(self, values: Values, adapt: Callable[[Any], object] = lambda _: None, device: str = "cpu") -> Any:
        with foreign("build the model of config.json", "save it again"), bodiless(self.most):
            config = plain(door.config_object(values))
            adapt(config)
            return door.build(door.model_class(config), config, device)

    def check_sample(self, values: Values) -> None:
        """CannotVerify unless the model of a config runs on inputs by which its outputs can be compared."""
        with Float64():
            model = self._built(values, lambda config: shorten(with_plain_outputs(config))).double().eval()
        doing = f"run a {values['model_type']} on the inputs that outputs are compared on"
        with foreign(doing, "expand with --no-verify, and compare outputs yourself", CannotVerify), Mixed():
            taken(model, lambda view: floating_outputs(model, view))

    def trace(self, model: Any) -> Tracer:
        """The record of a run."""
        with self._running():
            return run_traced(Tracer(model), model, self._run)

    def both(
        self,
        small: Any,
        large: Any,
        scaled: tuple[Calls, Calls] = (frozenset(), frozenset()),
        stacks: Mapping[str, int] | None = None,
    ) -> Matched:
        """The runs of two models beside each other; `scaled`: in each, what sizes decide the number of."""
        with self._running():
            return traced(small, large, self._run, *scaled, stacks=lambda a, b: as_lists(a, b, stacks))

    @contextmanager
    def _running(self) -> Generator[None]:
        with foreign("run a model of these sizes without its weights", "choose other sizes", Refused), Mixed():
            yield

    @property
    def _run(self) -> Callable[[torch.nn.Module], list[torch.Tensor]]:
        return lambda module: list(outputs(module, self.batch).values())


_ELSE = "write a table for it (docs/add-an-architecture.md)"


def check_sizes(values: Values) -> None:
    """BadCheckpoint where a number is larger than that of any model, before anything is built by it."""
    for name, value in flat_fields(values).items():
        last = name.rpartition(".")[2]
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            most = MOST_BLOCKS if "layers" in last else LARGEST
            if number > most and not any(part in last for part in _UNBOUNDED):
                raise BadCheckpoint(f"has {name} = {number}", f"use a number up to {most}", file=CONFIG)


def plain(config: Any, *, cache: bool = False) -> Any:
    """The config with plain attention and experts in every part, and without caches unless they stay as they are."""
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            plain(inner, cache=cache)
    config._attn_implementation = "eager"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    for name in _OFF:
        if hasattr(config, name) and not (cache and name == "use_cache"):
            setattr(config, name, False)
    return config
