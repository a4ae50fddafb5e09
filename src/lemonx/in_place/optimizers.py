"""Points optimizers to the parameters of a grown model, in their groups and with their grown state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lemonx.errors import LemonxError
from lemonx.optimizer_state.forms import State
from lemonx.optimizer_state.grow import StateGrowth
from lemonx.optimizer_state.layouts import adds_decay, flattened, layout_of
from lemonx.optimizer_state.moments import FRESH
from lemonx.planning.plan import Plan

Named = Mapping[str, Tensor]
# What a group calls its parameters, if the optimizer was given names.
_NAMES = "param_names"


@dataclass(frozen=True)
class Repointing:
    """What an optimizer will hold: its parameters group by group, and their state. Nothing is changed until `apply`."""

    optimizer: Optimizer
    groups: list[list[Any]]
    names: list[list[str] | None]
    state: dict[Any, State]
    replaced: list[Any]

    def apply(self) -> None:
        """Change groups and state in place: schedulers and wrappers hold the same lists."""
        for group, parameters, names in zip(self.optimizer.param_groups, self.groups, self.names, strict=True):
            group["params"][:] = parameters
            if names is not None:
                group[_NAMES][:] = names
        for old in self.replaced:
            self.optimizer.state.pop(old, None)
        self.optimizer.state.update(self.state)
        if "_numel_cache" in vars(self.optimizer):  # LBFGS counts its parameters once
            vars(self.optimizer)["_numel_cache"] = None


class Repointer:
    """Prepares optimizers for the target of a plan; `status`: how well each parameter's state is known, and why.

    `fresh_state`: leave out state that cannot grow, as before the first step. Optimizers then start from zero.
    """

    def __init__(self, plan: Plan, small: nn.Module, *, fresh_state: bool) -> None:
        self.growth, self._fresh_state = StateGrowth(plan), fresh_state
        self._names = {id(p): name for name, p in small.named_parameters()}
        self.status: dict[str, tuple[str, frozenset[str]]] = {}

    def prepare(self, optimizer: Optimizer, large: Named) -> Repointing:
        """The target's parameters that come from those of an optimizer, in the groups of their origins."""
        groups = [self._listed(group["params"], large) for group in optimizer.param_groups]
        held = {
            self._names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names
        }
        state = {name: optimizer.state[p] for name, p in held.items() if p in optimizer.state}
        decaying = [group["params"] for group in optimizer.param_groups if adds_decay(group)]
        decayed = {self._names.get(id(p)) for parameters in decaying for p in parameters}
        grown = dict[Any, State]()
        for name, parameter in large.items():
            origin = self.growth.origin(name)
            needed = {own: self.gathered(state[own]) for own in self.growth.needed(name) if own in state}
            try:
                entry = self.growth.grow(name, needed) if origin in held else None
            except LemonxError as error:
                if not self._fresh_state:
                    raise type(error)(error.found, "give fresh_state=True, and this state starts from zero") from None
                self.status[name] = FRESH, frozenset({f"{type(optimizer).__name__} keeps what lemonx cannot grow"})
                continue
            if origin is not None and entry:
                grown[parameter] = self.placed(entry, state[origin])
                keys = flattened(state[origin]).keys()
                forms = layout_of(keys, name).forms(keys)
                self.status[name] = self.growth.status(name, forms, decayed=origin in decayed)
        names = [self._called(*pair, large) for pair in zip(optimizer.param_groups, groups, strict=True)]
        return Repointing(optimizer, groups, names, grown, replaced=list(held.values()))

    def _called(self, group: Mapping[str, Any], parameters: Sequence[Any], large: Named) -> list[str] | None:
        """The names of a group's new parameters; what a wrapper puts in front of the model's names stays."""
        if _NAMES not in group:
            return None
        called = {id(p): name for p, name in zip(group["params"], group[_NAMES], strict=True)}
        in_front = {called[at].removesuffix(name) for at, name in self._names.items() if at in called}
        prefix = in_front.pop() if len(in_front) == 1 else ""
        called |= {id(p): prefix + name for name, p in large.items()}
        return [called[id(p)] for p in parameters]

    def gathered(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of a parameter as whole tensors."""
        return entry

    def placed(self, entry: State, like: State) -> State:
        """Whole tensors where those of another state are."""
        return entry

    def _listed(self, parameters: Sequence[Any], large: Named) -> list[Any]:
        """A group of the target's.

        Optimizers are saved by position, so a group that is in the model's order stays in it. Parameters that are not
        the model's stay where they are.
        """
        order = {name: at for at, name in enumerate(self._names.values())}
        places = [order[self._names[id(p)]] for p in parameters if id(p) in self._names]
        targets: dict[str, list[Any]] = {}
        for name, parameter in large.items():
            targets.setdefault(self.growth.origin(name) or "", []).append(parameter)
        if places != sorted(places):
            lists = [targets.get(self._names[id(p)], []) if id(p) in self._names else [p] for p in parameters]
            return [p for many in lists for p in many]
        mine = {id(p) for place in places for p in targets.get(list(order)[place], [])}
        result, inserted = list[Any](), False
        for p in parameters:
            if id(p) not in self._names:
                result.append(p)
            elif not inserted:
                result += [p for p in large.values() if id(p) in mine]
                inserted = True
        return result
