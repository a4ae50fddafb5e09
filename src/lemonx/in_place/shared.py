"""Growth of a model that several processes share under FSDP2, in a running loop.

Each process writes its slices of the weights, and then makes those of the larger model from what it needs of them. The
optimizer's state is gathered one parameter at a time. The model is built again, since what FSDP2 registers on modules
belongs to their old parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import Refused
from lemonx.fsdp import fill
from lemonx.in_place.growing import GrownInPlace, report, require_same_family
from lemonx.in_place.measuring import require_same_function
from lemonx.in_place.optimizers import Repointer
from lemonx.models import door
from lemonx.models.attributes import bare_class
from lemonx.models.in_memory import require_known_forward, restore
from lemonx.optimizer_state.forms import State
from lemonx.options.declared import InPlace, PathLike, Planning
from lemonx.planning.plan import Plan
from lemonx.training import sharded
from lemonx.verification.fitting import require_as_built
from lemonx.workflows.planning import plan_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def grow_shared(
    model: Any,
    optimizers: Sequence[Optimizer],
    options: InPlace,
) -> GrownInPlace:
    """Grow a model under FSDP2; every process calls this."""
    shard, verify = options.shard, options.verify
    if not issubclass(type(model), FSDPModule):
        raise Refused("the model is sharded, but not as a whole", "call fully_shard on the whole model too")
    if shard is None:
        raise Refused("the model is sharded over processes", "give the function that sharded it: shard=...")
    if verify:
        require_known_forward(model)
    with torch.random.fork_rng(devices=[]), _common_folder(options.folder) as place:
        sharded.save(model, place / "source")
        planning = Planning.of(options, solve=True)
        plan = plan_source(place / "source", planning)
        require_same_family(plan)
        if verify:
            require_as_built(model, plan.source_config)
        repointer = _SharedRepointer(plan, model, fresh_state=options.fresh_state)
        large = _built(model, plan)
        shard(large)
        large.to_empty(device=_device(model))
        large.tie_weights()
        fill(large, place / "source", planning, threads=options.threads)
        if verify:
            require_same_function(model, large, plan, place)
        prepared = [repointer.prepare(optimizer, dict(large.named_parameters())) for optimizer in optimizers]
    for one in prepared:
        one.apply()
    return report(large, plan, repointer)


@contextmanager
def _common_folder(parent: PathLike | None) -> Iterator[Path]:
    """A new folder that all processes use, and that is removed in the end."""
    own = Temporary(parent) if dist.get_rank() == 0 else None
    made: list[Any] = [own and own.path]
    dist.broadcast_object_list(made, src=0)
    try:
        yield Path(made[0])
        dist.barrier()
    finally:
        if own is not None:
            own.close()


def _built(model: Any, plan: Plan) -> PreTrainedModel:
    """The larger model of the same class on the meta device, with all that no checkpoint holds as in the given one."""
    config = door.config_object(plan.target_config)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        large = bare_class(model)(config)
    restore(model, large, plan)
    return large


def _device(model: torch.nn.Module) -> torch.device:
    return next(p.to_local().device for p in model.parameters() if isinstance(p, DTensor))


class _SharedRepointer(Repointer):
    """Gathers the state of one parameter at a time, and gives each process its slices of what was grown."""

    def gathered(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in entry.items()}

    def placed(self, entry: State, like: State) -> State:
        return {key: _placed(value, like[key]) for key, value in entry.items()}


def _placed(value: Any, like: Any) -> Any:
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)
