"""The reference for a deeper Post-LN target: the source, with those norms repeated that the added blocks apply again.

Such a target equals the source only up to eps. But it equals exactly the source with some of its norms applied several
times (algebra/norm_chains.py). So it is compared with that, to the same tolerance as any other target, and there is no
allowance in which a wrong weight could hide. What the repeated norms change, in the stream and in the outputs, is
measured separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from lemonx.algebra.norm_chains import Chain
from lemonx.errors import CannotVerify
from lemonx.planning.depth import stream_norms
from lemonx.planning.plan import Plan
from lemonx.specs.norms import Norm
from lemonx.specs.spec import Spec
from lemonx.verification.blocks import names_in_model
from lemonx.verification.finite import larger

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Moved:
    """How far each repeated norm moved the stream, by its place, relative to the stream."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, int, int], float] = {}

    def see(self, place: tuple[str, int, int], ratio: torch.Tensor) -> None:
        self.places[place] = larger(self.places.get(place, 0.0), float((ratio - 1).abs().max()))

    @property
    def most(self) -> float:
        """All of them together, each where it is largest."""
        return sum(self.places.values())


@contextmanager
def deepened(model: PreTrainedModel, plan: Plan | None) -> Iterator[Moved]:
    """A context in which the source's model applies its norms as often as the target of a plan does."""
    moved, handles = Moved(), []
    try:
        if plan is not None:
            for at, chains in plan.types.chains.items():
                module, row = _norm(model, plan.source_spec, *at)
                handles.append(module.register_forward_hook(_again(row, chains, at, moved)))
        yield moved
    finally:
        for handle in handles:
            handle.remove()


def _again(row: Norm, chains: tuple[Chain, ...], at: tuple[str, int], moved: Moved) -> Callable[[Any, Any, Any], Any]:
    """A hook that turns the norm's output mu n + b into mu r n + b; blocks that share the norm take turns."""
    turns = cycle(enumerate(chains))

    def hook(module: Any, args: tuple[torch.Tensor, ...], written: torch.Tensor) -> torch.Tensor:
        run, chain = next(turns)
        if not chain.norms:
            return written
        read = args[0]
        centred = read - read.mean(-1, keepdim=True) if row.centres else read
        ratio = chain.ratio((centred * centred).mean(-1, keepdim=True))
        moved.see((*at, run), ratio)
        shift = module.forward(read.new_zeros(read.shape[-1]))  # what it makes of nothing is its bias
        return shift + (written - shift) * ratio

    return hook


def _norm(model: PreTrainedModel, spec: Spec, stack: str, index: int) -> tuple[Any, Norm]:
    """The last norm in the stream of a block, as a module and as a row."""
    general = stream_norms(spec, stack)[-1]
    name, row = general.replace("*", str(index)), spec.rows[general]
    assert isinstance(row, Norm)
    known: Mapping[str, Any] = dict(model.named_modules())
    renamed = names_in_model(model)(f"{name}.weight").removesuffix(".weight")
    found = known.get(renamed, known.get(renamed.removeprefix(spec.prefix)))  # a base model's lacks the prefix
    if found is None:
        raise CannotVerify(
            f"{type(model).__name__} has no module {name}, so it cannot be compared with a deeper one",
            "verify with the release of transformers that lemonx was tested with",
        )
    return found, row
