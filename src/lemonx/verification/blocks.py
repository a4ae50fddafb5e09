"""The blocks of a model: which tensors of the file belong to each, and which module in transformers it is.

A deeper Post-LN target equals its source only up to eps, because its added blocks norm the stream again. But it equals
exactly the source with these norms repeated (algebra/norm_chains.py). So the source is run with repeated norms, and
compared to the same tolerance as any other: no allowance is left in which a wrong weight could hide. The change that
repeated norms make, in the stream and in the outputs, is measured separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from lemonx import architectures
from lemonx.algebra.norm_chains import Chain
from lemonx.checkpoints import Checkpoint
from lemonx.errors import CannotVerify, LemonxError
from lemonx.planning.depth import stream_norms
from lemonx.planning.plan import Plan
from lemonx.specs.coverage import matched
from lemonx.specs.norms import Norm
from lemonx.specs.spec import Spec
from lemonx.verification.check_result import larger

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# A stack and the index of a block in it.
BlockName = tuple[str, int]


def tensors_by_block(spec: Spec, names: Iterable[str]) -> dict[BlockName, list[str]]:
    """The tensors of every block."""
    found: dict[BlockName, list[str]] = {}
    for hit in matched(spec, names)[0]:
        if hit.stack is not None:
            found.setdefault((hit.stack, hit.index), []).append(hit.name)
    return found


def blocks_of(checkpoint: Checkpoint) -> dict[BlockName, list[str]]:
    """The tensors of every block of a checkpoint; empty if no spec covers it."""
    try:
        spec = architectures.find(checkpoint.config).spec(checkpoint.config)
    except LemonxError:
        return {}
    return tensors_by_block(spec, checkpoint.tensors)


def names_in_model(model: Any) -> Callable[[str], str]:
    """The name that transformers gives a tensor of the file when it loads it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    known = model.state_dict()
    return lambda name: rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0]


def modules_of(model: Any, blocks: Mapping[BlockName, list[str]]) -> dict[BlockName, Any]:
    """The module of every block. Files may use other names; transformers' own renaming maps them."""
    known, renamed = model.state_dict(), names_in_model(model)
    found = {}
    for (stack, index), names in blocks.items():
        inside = [name.split(".") for name in map(renamed, names) if name in known]
        if not inside:
            continue
        shared = [parts[0] for parts in zip(*inside, strict=False) if len(set(parts)) == 1]
        # The name of the stack may hold numbers too (stages), and so may what follows (a group's only layer).
        numbers = [i for i, part in enumerate(shared) if part.isdigit()]
        place = next(iter(numbers[sum(part.isdigit() for part in stack.split(".")) :]), None)
        if place is not None and shared[place] == str(index):
            found[stack, index] = model.get_submodule(".".join(shared[: place + 1]))
    return found


# ----------------------------------------------------------------- norms that are repeated


class Moved:
    """The distance by which each repeated norm moved the stream, by place, relative to the stream."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, int, int], float] = {}

    def see(self, place: tuple[str, int, int], ratio: torch.Tensor) -> None:
        """Note the factor by which a repeated norm multiplies the stream."""
        self.places[place] = larger(self.places.get(place, 0.0), float((ratio - 1).abs().max()))

    def ratio(self, place: tuple[str, int, int], chain: Chain, read: torch.Tensor, axis: int, *, centres: bool) -> Any:
        """The factor by which the norms of a chain multiply the output of the first norm, noted for its place."""
        centred = read - read.mean(axis, keepdim=True) if centres else read
        ratio = chain.ratio((centred * centred).mean(axis, keepdim=True))
        self.see(place, ratio)
        return ratio

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
        ratio = moved.ratio((*at, run), chain, read, -1, centres=row.centres)
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
