"""The growth of a model in a running loop: check, expand, prepare the optimizer, and only then change anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lemonx.errors import Refused
from lemonx.guards.results import Result
from lemonx.in_place import modules, refusals, wrappers
from lemonx.in_place.optimizers import Repointer
from lemonx.models import in_memory
from lemonx.options.declared import Expansion, InPlace
from lemonx.planning.plan import Plan
from lemonx.workflows.expanding import expand_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class GrownInPlace(Result, printer="expansion:print_grown_in_place"):
    """A model that has grown in place.

    `model` is the one that was given, but for one under FSDP2. `tensors`: whether the optimizer's state of each
    parameter is exact, expected or fresh, by name; `reasons` counts why it is not exact.
    """

    model: PreTrainedModel
    plan: Plan
    tensors: Mapping[str, str]
    reasons: Mapping[str, int]

    @property
    def state(self) -> dict[str, int]:
        """The number of parameters by how well the optimizer's state is known."""
        return dict(Counter(self.tensors.values()))


# Loops validate in inference mode and in lower precision, in which nothing that is trained can be made.
@torch.inference_mode(False)
@torch.autocast("cpu", enabled=False)
def grow(
    model: Any,
    optimizers: Sequence[Any],
    options: InPlace,
) -> GrownInPlace:
    """Grow a model and its optimizers; whatever is refused or fails leaves them as they are."""
    held: list[Optimizer] = [refusals.unwrapped(optimizer) for optimizer in optimizers]
    given, model = model, wrappers.inside(model)
    if isinstance(model, torch.nn.Module):
        wrappers.free_gathered(model)
        refusals.check(model, held)
    if _is_sharded(model):
        from lemonx.in_place.shared import grow_shared

        return grow_shared(model, held, options)
    if options.shard is not None or options.folder is not None:
        raise TypeError("shard and folder are for a model under FSDP2")
    model = in_memory.unwrapped(model)
    parallel = wrappers.around(model)
    with torch.random.fork_rng(devices=[]):
        large, plan = expand_model(model, Expansion.of(options))
        require_same_family(plan)
        repointer = Repointer(plan, model, fresh_state=options.fresh_state) if held else None
        parameters = dict(large.named_parameters())
        prepared = [repointer.prepare(optimizer, parameters) for optimizer in held] if repointer else []
    modules.take_over(model, large, plan)
    for one in prepared:
        one.apply()
    for wrapper in parallel:
        wrappers.start_again(wrapper)
    return report(given, plan, repointer)


def _is_sharded(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and any(hasattr(p, "to_local") for p in model.parameters())


def require_same_family(plan: Plan) -> None:
    """Refused if the target is a model of another class, which an object cannot become."""
    old, new = (config.get("model_type") for config in (plan.source_config, plan.target_config))
    if old != new:
        raise Refused(f"a {new} is another class than a {old}", "expand a folder, and load the result")


def report(model: PreTrainedModel, plan: Plan, repointer: Repointer | None) -> GrownInPlace:
    """What is said of a growth."""
    status = repointer.status if repointer else {}
    return GrownInPlace(
        model,
        plan,
        tensors={name: word for name, (word, _) in status.items()},
        reasons=dict(Counter(reason for _, why in status.values() for reason in sorted(why))),
    )
