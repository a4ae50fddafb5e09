"""The reference for a deeper Post-LN module: the smaller one, with the norms repeated that added blocks apply again.

What reference.py does to models of transformers, for any module: its norms need not be modules, so they are found in a
traced run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lemonx.algebra.norm_chains import Chain
from lemonx.planning.depth import stream_norms
from lemonx.planning.plan import Plan
from lemonx.tracing.blocks import SMALL, to_list
from lemonx.tracing.running import watching
from lemonx.tracing.table import Table
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Norm
from lemonx.verification.modules import Example, Run, outputs
from lemonx.verification.reference import Moved

# A norm of a block: the module that runs it, and its number among those that this module runs in one call of the block.
Place = tuple[str, int]


def repeated(plan: Plan, table: Table, moved: Moved) -> Run:
    """A way to run the smaller module in which norms are applied as often as in the target of a plan."""
    chains: dict[Place, tuple[Chain, ...]] = {}
    blocks: set[str] = set()
    for (stack, index), uses in plan.types.chains.items():
        general, number = table.norms[stream_norms(plan.source_spec, stack)[-1]]
        path = to_list(general.replace("*", str(index), 1), table.stacks, SMALL)
        chains[path, number] = uses
        blocks.add(to_list(f"{stack}.{index}", table.stacks, SMALL))

    def run(module: torch.nn.Module, inputs: Sequence[Example]) -> list[Any]:
        if not chains:
            return outputs(module, inputs)
        tracer = _Repeating(module, chains, blocks, moved)
        with watching(tracer, module), tracer:
            return outputs(module, inputs)

    return run


class _Repeating(Tracer):
    """A run in which some norms are applied again; blocks that share a norm take turns."""

    def __init__(
        self, module: torch.nn.Module, chains: Mapping[Place, tuple[Chain, ...]], blocks: set[str], moved: Moved
    ) -> None:
        super().__init__(module)
        self.inside = blocks
        self.turns: dict[Place, Iterator[tuple[int, Chain]]] = {
            place: cycle(enumerate(uses)) for place, uses in chains.items()
        }
        self.moved = moved
        self.ran: Counter[str] = Counter()

    def entered(self, module: torch.nn.Module, given: Any) -> None:
        super().entered(module, given)
        if self.path in self.inside:
            for path in self.ran:
                if f"{path}.".startswith(f"{self.path}."):
                    self.ran[path] = 0

    def normed(self, norm: Norm, read: torch.Tensor, made: torch.Tensor, place: int, bias: Any = None) -> None:
        at = self.path, self.ran[self.path]
        self.ran[self.path] += 1
        if at not in self.turns:
            return
        turn, chain = next(self.turns[at])
        if not chain.norms:
            return
        with _disable_current_modes():
            centred = read - read.mean(place, keepdim=True) if norm.kind == "layer" else read
            ratio = chain.ratio((centred * centred).mean(place, keepdim=True))
            self.moved.see((*at, turn), ratio)
            shift = 0.0 if bias is None else bias
            made.copy_(shift + (made - shift) * ratio)
