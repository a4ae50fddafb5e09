"""Makes a model in memory the larger one: its modules and its config stay the same objects, with other sizes.

What growth changes is found by building both sizes without weights and comparing them, module by module. Only that is
changed, so what a user has set on a module, or keeps a reference to, stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from lemonx.models.attributes import is_rate, plain_attributes
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
    before, after = (skeleton(config, type(model)) for config in (plan.source_config, plan.target_config))
    # A derived class may have modules and buffers of its own, which no checkpoint holds: they stay as they are.
    plain = (skeleton(config) for config in (plan.source_config, plan.target_config))
    known = {name for one in plain for name, _ in one.named_buffers(remove_duplicate=False)}
    configs = _take_config(model.config, large.config, before.config, after.config)
    _Taking(known, configs).take("", model, large, before, after)
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


@dataclass
class _Taking:
    """Takes over modules one by one.

    `known`: the buffers that the model has as transformers builds it. `configs`: what stands for each config of the
    larger model; `taken`: for each of its modules, of which some are in two places.
    """

    known: set[str]
    configs: dict[int, Any]
    taken: dict[int, nn.Module] = field(default_factory=dict[int, nn.Module])

    def take(self, path: str, module: nn.Module, large: nn.Module, before: nn.Module, after: nn.Module) -> None:
        """Make a module the larger one; what a user has added to it stays."""
        self.taken[id(large)] = module
        self._take_settings(module, large, before, after)
        module._parameters.clear()
        module._parameters.update(large._parameters)
        own = {key: value for key, value in module._buffers.items() if path + key not in self.known}
        module._buffers.clear()
        module._buffers.update({**large._buffers, **own})
        children = {name: self._child(path, name, module, large, before, after) for name in large._modules}
        added = {name: child for name, child in module._modules.items() if name not in before._modules}
        module._modules.clear()
        module._modules.update({**children, **added})

    def _take_settings(self, module: nn.Module, large: nn.Module, before: nn.Module, after: nn.Module) -> None:
        _take_attributes(module, before, after, leave=_COMMON)
        # The block at this place may be another one than before, with the mode and the dropout of its origin.
        module.training = large.training
        vars(module).update({key: value for key, value in plain_attributes(large).items() if is_rate(large, key)})
        for key, value in vars(large).items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                vars(module)[key] = value
            elif isinstance(value, PreTrainedConfig) and id(value) not in self.configs:
                # A part may have a config of its own, as the halves of T5 have.
                parts = [vars(one).get(key) for one in (module, large, before, after)]
                if None not in parts:
                    self.configs |= _take_config(*parts)

    def _child(
        self, path: str, name: str, module: nn.Module, large: nn.Module, before: nn.Module, after: nn.Module
    ) -> nn.Module | None:
        child = large._modules[name]
        if child is None or id(child) in self.taken:
            return None if child is None else self.taken[id(child)]
        own, old, new = (one._modules.get(name) for one in (module, before, after))
        if own is None or old is None or new is None or type(own) is not type(child):
            return child  # an added block, or one that is of another kind at this place
        self.take(f"{path}{name}.", own, child, old, new)
        return own
