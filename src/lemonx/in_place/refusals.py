"""What cannot grow in place, found before anything is changed: wrappers, hooks, gradients, who else holds it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lemonx.errors import Refused
from lemonx.models.attributes import OWN_HOOKS


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside those of accelerate and Lightning, which keep nothing themselves."""
    while hasattr(optimizer, "optimizer"):
        inner = optimizer.optimizer
        kept = vars(optimizer).get("state")
        if isinstance(kept, Mapping) and kept and kept is not getattr(inner, "state", None):
            raise Refused(
                f"{type(optimizer).__name__} keeps a state of its own around {type(inner).__name__}",
                "give the inner optimizer, and make the outer one again after the growth",
            )
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"grow_in_place takes an optimizer of torch, not a {type(optimizer).__name__}")
    return optimizer


def check(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refused if the model is wrapped, hooked or in the middle of a step, or if someone else holds its parameters."""
    _check_compiled(model)
    _check_hooks(model)
    _check_gradients(model)
    _check_optimizers(model, optimizers)
    if next(_holders(model, optimizers), None):
        gc.collect()  # what is no longer used may not have been freed yet
        for found in _holders(model, optimizers):
            raise found


def _check_compiled(model: nn.Module) -> None:
    compiled = type(model).__name__ == "OptimizedModule"
    if compiled or any(module._compiled_call_impl is not None for module in model.modules()):
        raise Refused("the model is compiled for its present sizes", "grow it before torch.compile, or load it again")


def _check_hooks(model: nn.Module) -> None:
    """Hooks stay with their modules and parameters; added blocks and new parameters would have none."""
    for path, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        for hook in (hook for many in hooks for hook in many.values()):
            origin = getattr(hook, "__module__", None) or ""
            if not origin.startswith(OWN_HOOKS):
                name = getattr(hook, "__name__", type(hook).__name__)
                raise Refused(
                    f"{path or type(model).__name__} has the hook {name}, which added blocks would not have",
                    "remove it, and register it again after the growth",
                )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Refused(f"{name} has a hook, which its successor would not have", "remove it first")


def _check_gradients(model: nn.Module) -> None:
    found = [name for name, p in model.named_parameters() if p.grad is not None and bool(_local(p.grad).any())]
    if _anywhere(bool(found), model):
        what = f"{found[0]} has a gradient" if found else "another process has a gradient"
        raise Refused(
            f"{what}, and it is not known whether the optimizer has used it",
            "grow after optimizer.step() and optimizer.zero_grad(), between two accumulations",
        )


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _anywhere(here: bool, model: nn.Module) -> bool:
    """Whether something holds in any process that shares the model: all must refuse, or none."""
    if not any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return here
    flag = torch.tensor(int(here), device=_local(next(model.parameters())).device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    seen = set[int]()
    mine = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        held = {id(p) for p in _parameters(optimizer)}
        if not held & mine:
            raise Refused("the optimizer holds no parameter of this model", "give the optimizer that trains it")
        if held & mine & seen:
            raise Refused("two optimizers hold the same parameter", "give each parameter to one of them")
        seen |= held & mine


def _parameters(optimizer: Any) -> Iterable[Any]:
    groups = getattr(optimizer, "param_groups", None)
    return [p for group in groups for p in group["params"]] if isinstance(groups, list) else []


def _holders(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Refused]:
    """Who else in this process holds the model's parameters, and would go on with the old ones."""
    mine, own = {id(p) for p in model.parameters()}, {id(module) for module in model.modules()}
    groups = {id(optimizer.param_groups) for optimizer in optimizers}
    averages = list[nn.Module]()
    for other in gc.get_objects():
        kind = type(other)  # isinstance would ask objects that pretend to be others
        if issubclass(kind, Optimizer):
            if id(getattr(other, "param_groups", None)) not in groups and mine & {id(p) for p in _parameters(other)}:
                yield Refused(
                    f"another optimizer ({kind.__name__}) holds parameters of the model",
                    "give grow_in_place all of them",
                )
        elif issubclass(kind, nn.Module) and id(other) not in own:
            inside = vars(other)
            if kind.__name__ == "OptimizedModule" and (inside.get("_modules") or {}).get("_orig_mod") is model:
                yield Refused(
                    "the model is compiled for its present sizes", "drop the compiled model, and compile it again"
                )
            elif mine & {id(p) for p in (inside.get("_parameters") or {}).values()}:
                yield Refused(
                    f"a {kind.__name__} outside of the model shares a parameter with it",
                    "share it again after the growth",
                )
            elif issubclass(kind, AveragedModel) and "_modules" in inside:
                averages.append(other)
    # An average grows as a model of its own, before the model that it follows.
    if not any(module is model for average in averages for module in average.modules()):
        shapes = _shapes(model)
        for average in averages:
            if any(type(part) is type(model) and _shapes(part) == shapes for part in average.modules()):
                yield Refused(
                    f"an {type(average).__name__} holds an average of the model, which would stay small",
                    "grow that first, with the same sizes: lemonx.grow_in_place(average.module, ...)",
                )


def _shapes(model: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in model.parameters()]
