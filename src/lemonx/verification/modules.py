"""Any two modules compared by their outputs: on the inputs that were given, in float64.

A deeper Post-LN module is compared with the smaller one, run with its norms repeated, as a model of transformers is
(blocks.py). Norms of any module need not be modules themselves, so they are found in a traced run.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lemonx.algebra.norm_chains import Chain
from lemonx.errors import BadTarget, NotVerified, Refused
from lemonx.planning.depth import stream_norms
from lemonx.planning.plan import Plan
from lemonx.tracing.blocks import SMALL, to_list
from lemonx.tracing.operations import outputs_of
from lemonx.tracing.running import watching
from lemonx.tracing.storing import floating
from lemonx.tracing.table import Table
from lemonx.tracing.tracer import Tracer
from lemonx.tracing.values import Norm
from lemonx.verification.blocks import Moved
from lemonx.verification.float64 import Float64
from lemonx.verification.stability import Figures, Stability, distance

_UNCHANGED = "nothing was changed"


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def sizes(self) -> str:
        """The sizes of its tensors, as they are told."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return ", ".join(" x ".join(map(str, leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor))


def check_modules(small: torch.nn.Module, large: torch.nn.Module) -> None:
    """Two instances of one class, with plain tensors that hold numbers."""
    if type(small) is not type(large):
        raise BadTarget(
            f"the smaller module is a {type(small).__name__}, the larger a {type(large).__name__}",
            "give two instances of one class",
        )
    for module in (small, large):
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and (tensor.is_meta or type(tensor.data) is not torch.Tensor):
                raise Refused(f"{name} is not a plain tensor with numbers", "load the weights, and dequantise them")


def examples(given: Any) -> list[Example]:
    """Each example as arguments: a tensor, a tuple, a dict, or a list of these."""
    several = given if isinstance(given, list) else [given]
    if not several:
        raise BadTarget("there are no example inputs", "give a tensor, a tuple, a dict, or a list of these")
    return [_example(one) for one in several]


def _example(given: Any) -> Example:
    if isinstance(given, Mapping):
        return Example((), given)
    return Example(given if isinstance(given, tuple) else (given,), {})


def outputs(module: torch.nn.Module, inputs: Sequence[Example]) -> list[Any]:
    """Run a module on every example, with the same random numbers each time."""
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))

    def placed(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    made = []
    for example in inputs:
        args, kwargs = tree_map(placed, (example.args, dict(example.kwargs)))
        _seed()
        made.append(module(*args, **kwargs))
    return made


def _seed() -> None:
    """Seed the devices in use. torch.manual_seed would record the whole stack for all other devices, each time."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


# Calls a module with every example, and gives what it gives for each.
ModuleRun = Callable[[torch.nn.Module, Sequence[Example]], list[Any]]


@contextlib.contextmanager
def still(*modules: torch.nn.Module) -> Generator[None]:
    """Without dropout; all modes, and the random state, are put back."""
    modes = [(child, child.training) for module in modules for child in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for child, training in modes:
            child.training = training


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """A copy in float64 with all parameters random, so that nothing is right by accident: no gain is one, no bias zero.

    Numbers keep their size and sign roughly, so that logarithms and variances stay what they are.
    """
    result = widened(module)
    rng = torch.Generator().manual_seed(0)
    for name, tensor in floating(result).items():
        size = float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
        first, second = (torch.randn(tensor.shape, generator=rng, dtype=torch.float64).clamp(-3, 3) for _ in range(2))
        tensor.mul_(1 + 0.1 * first.to(tensor.device))
        if not name.endswith("running_var"):
            tensor.add_(0.05 * (size or 1.0) * second.to(tensor.device))
    return result


def widened(module: torch.nn.Module) -> torch.nn.Module:
    """A copy in float64."""
    return copy.deepcopy(module).double()


def wide_outputs(module: torch.nn.Module, inputs: Sequence[Example], run: ModuleRun = outputs) -> list[Any]:
    """The outputs of a module in float64, one after the other."""
    with Float64(), torch.no_grad():
        return outputs_of(run(module, cast(inputs, torch.float64)))


def difference(small: torch.nn.Module, large: torch.nn.Module, inputs: Sequence[Example]) -> float:
    """The largest difference of any output in float64, relative to the largest number of that output."""
    return apart(wide_outputs(widened(small), inputs), wide_outputs(widened(large), inputs))


def apart(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest difference of outputs, each relative to the largest number of the first."""
    if len(ours) != len(theirs):
        raise Refused(
            f"the smaller module gives {len(ours)} outputs and the larger {len(theirs)}",
            "let them give as many: those of every block are more in a deeper module",
        )
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, torch.Tensor)]
    if not pairs:
        raise Refused(
            "the module gives no tensor that could be compared",
            "let it give tensors, by themselves or in tuples, lists, dicts and dataclasses",
        )
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, bool | int | float | str) and a != b:
            raise Refused(f"an output is {a} in the smaller module and {b} in the larger", "leave it out")
    return max(relative_difference(a, b) for a, b in pairs)


def longer_axes(ours: Sequence[Any], theirs: Sequence[Any]) -> set[tuple[int, int, int]]:
    """Axes of outputs that are longer in the larger module: their number, and both sizes."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if isinstance(a, torch.Tensor)]
    sizes = [(axis, *both) for a, b in pairs for axis, both in enumerate(zip(a.shape, b.shape, strict=False))]
    return {(axis, one, other) for axis, one, other in sizes if one != other}


def cast(inputs: Sequence[Example], dtype: torch.dtype) -> list[Example]:
    """Return the inputs with their numbers in another dtype."""

    def placed(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return [Example(*tree_map(placed, (one.args, dict(one.kwargs)))) for one in inputs]


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two outputs, relative to the largest number of the first; `theirs` may be larger."""
    if ours.dim() != theirs.dim() or any(a > b for a, b in zip(ours.shape, theirs.shape, strict=True)):
        raise NotVerified(f"an output is {list(ours.shape)} and {list(theirs.shape)}", _UNCHANGED)
    theirs = theirs[tuple(slice(size) for size in ours.shape)]  # a wider one begins with what there was
    if not ours.is_floating_point():
        return 0.0 if bool((ours == theirs).all()) else float("inf")
    if not ours.numel():
        return 0.0
    # Where both are infinite in the same way (a mask), they agree; NaN agrees with nothing.
    off = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).max()
    size = ours.abs()[ours.isfinite()]
    largest = float(size.max()) if size.numel() else 1.0
    return float(off) / (largest or 1.0) if bool(off.isfinite()) else float("inf")


def module_stability(small: torch.nn.Module, large: torch.nn.Module, inputs: Sequence[Example]) -> Stability:
    """Run both modules in float32, forward and backward, and compare with their outputs in float64."""
    shapes = [tuple(output.shape) for output in _computed(small, inputs, torch.float64)]
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=rng) for shape in shapes]

    def figures(module: torch.nn.Module) -> Figures:
        with torch.no_grad():
            exact = _computed(module, inputs, torch.float64)
        single = copy.deepcopy(module).float().requires_grad_(True)
        with torch.enable_grad():
            found = _computed(single, inputs, torch.float32)
            begins = [output[tuple(slice(size) for size in shape)] for output, shape in zip(found, shapes, strict=True)]
            sums = [(output * weight.to(output.device)).sum() for output, weight in zip(begins, weights, strict=True)]
            torch.stack(sums).sum().backward()
        squares = [p.grad.double().square().sum() for p in single.parameters() if p.grad is not None]
        noise = max(map(distance, exact, found), default=0.0)
        return Figures(noise, float(sum(squares)) ** 0.5)

    try:
        return Stability(figures(small), figures(large))
    except RuntimeError as error:  # torch's, where code cannot be differentiated
        raise Refused(
            f"its gradient cannot be computed ({' '.join(str(error).split())[:120]}), so whether a change of basis "
            "keeps it small cannot be told",
            "grow the width by a whole factor",
        ) from error


def _computed(module: torch.nn.Module, inputs: Sequence[Example], dtype: torch.dtype) -> list[torch.Tensor]:
    """The outputs that hold numbers, of a copy of the module in this dtype if it has another."""
    with Float64() if dtype == torch.float64 else contextlib.nullcontext():
        module = widened(module) if dtype == torch.float64 else module
        leaves = outputs_of(outputs(module, cast(inputs, dtype)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def rounding(small: torch.nn.Module, inputs: Sequence[Example]) -> float:
    """Measure the change of the outputs when every parameter is rounded once in its stored dtype."""
    other = widened(small)
    rng = torch.Generator().manual_seed(1)
    stored = floating(small)
    for name, tensor in floating(other).items():
        noise = torch.rand(tensor.shape, generator=rng, dtype=torch.float64) - 0.5
        tensor.mul_(1 + torch.finfo(stored[name].dtype).eps * noise.to(tensor.device))
    return difference(small, other, inputs)


# ----------------------------------------------------------------- norms that are repeated

# A norm of a block: the module that runs it, and its number among those that this module runs in one call of the block.
Place = tuple[str, int]


def repeated(plan: Plan, table: Table, moved: Moved) -> ModuleRun:
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
            ratio = self.moved.ratio((*at, turn), chain, read, place, centres=norm.kind == "layer")
            shift = 0.0 if bias is None else bias
            made.copy_(shift + (made - shift) * ratio)
