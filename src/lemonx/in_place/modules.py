"""Makes a model in memory the larger one: its modules and its config stay the same objects, with other sizes.

What growth changes is found by building both sizes without weights and comparing them, module by module. Only that is
changed, so what a user has set on a module, or keeps a reference to, stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from lemonx.models.building import skeleton
from lemonx.planning.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What every module has: tensors and submodules, which are taken over as such, hooks and the mode.
_COMMON = frozenset(vars(nn.Module()))
# A config says in which dtype its model is; the parameters have theirs already.
_DTYPES = ("dtype", "torch_dtype")


def take_over(model: PreTrainedModel, large: PreTrainedModel, plan: Plan) -> None:
    """Give a model the parameters, buffers, added blocks, sizes and config of a larger one of its class."""
    before, after = skeleton(plan.source_config), skeleton(plan.target_config)
    configs = _take_config(model.config, large.config, before.config, after.config)
    _take_module(model, large, before, after, {}, configs)
    for module in model.modules():
        for key, value in vars(module).items():
            if id(value) in configs:
                vars(module)[key] = configs[id(value)]
    if model.can_generate():
        for field in plan.source_spec.pointers:
            if hasattr(large.generation_config, field):
                setattr(model.generation_config, field, getattr(large.generation_config, field))


def _take_config(config: Any, large: Any, before: Any, after: Any) -> dict[int, Any]:
    """Change a config, and those inside it, as growth does; which object of the larger model each one stands for."""
    found = {id(large): config}
    for key in config.sub_configs:
        parts = [getattr(one, key, None) for one in (config, large, before, after)]
        if all(part is not None for part in parts):
            found |= _take_config(*parts)
    _take_attributes(config, before, after, leave={*config.sub_configs, *_DTYPES})
    return found


def _take_attributes(thing: Any, before: Any, after: Any, leave: set[str] | frozenset[str]) -> None:
    old, new = vars(before), vars(after)
    for key in new.keys() - leave:
        if _is_plain(new[key]) and not (key in old and old[key] == new[key]):
            vars(thing)[key] = new[key]
    for key in old.keys() - new.keys() - leave:
        vars(thing).pop(key, None)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(v) for v in (*value.keys(), *value.values()))
    if isinstance(value, tuple | list | set | frozenset):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _take_module(
    module: nn.Module,
    large: nn.Module,
    before: nn.Module,
    after: nn.Module,
    taken: dict[int, nn.Module],
    configs: dict[int, Any],
) -> None:
    """`taken`: what stands for each of the larger model's modules, of which some are in two places; and `configs`."""
    taken[id(large)] = module
    _take_attributes(module, before, after, leave=_COMMON)
    for key, value in vars(large).items():
        if isinstance(value, torch.Tensor):
            vars(module)[key] = value
        elif isinstance(value, PreTrainedConfig) and id(value) not in configs:
            # A part may have a config of its own, as the halves of T5 have.
            configs |= _take_config(*(vars(one)[key] for one in (module, large, before, after)))
    module._parameters.clear()
    module._parameters.update(large._parameters)
    module._buffers.clear()
    module._buffers.update(large._buffers)
    children = dict[str, nn.Module | None]()
    for name, child in large._modules.items():
        parts = [one._modules.get(name) for one in (module, before, after)]
        if child is None or id(child) in taken:
            children[name] = None if child is None else taken[id(child)]
        elif None in parts or type(parts[0]) is not type(child):
            children[name] = child  # an added block, or one that is of another kind at this place
        else:
            _take_module(parts[0], child, parts[1], parts[2], taken, configs)  # pyright: ignore[reportArgumentType]
            children[name] = parts[0]
    module._modules.clear()
    module._modules.update(children)
