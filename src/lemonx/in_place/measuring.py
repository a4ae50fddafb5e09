"""Is a model under FSDP2 still the same function once it has grown? Found out before anything is changed.

What the processes hold is written, and the first of them looks at it as at any expansion: every entry, every block, and
the outputs in float64. That shows the weights. Then all processes run both models as they are, with the slices, buffers
and precision that training will go on with, on the same inputs. They decide together: all go on, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from lemonx.errors import LemonxError, NotVerified
from lemonx.in_place.wrappers import free_gathered
from lemonx.models.building import skeleton
from lemonx.models.sources import open_source
from lemonx.planning.plan import Plan
from lemonx.training import sharded
from lemonx.verification.blocks import deepened
from lemonx.verification.comparison import compared, largest_difference
from lemonx.verification.inputs import View, views
from lemonx.verification.rounding import EXACT_TOLERANCE, MULTIPLE, WIRING
from lemonx.verification.running import Loaded, Name, Outputs, observe, with_plain_outputs
from lemonx.workflows.expanding import measured

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How long the others wait for the first process, which reads all weights of both models.
_PATIENCE = timedelta(days=1)


def require_same_function(model: Any, large: Any, plan: Plan, place: Path) -> None:
    """NotVerified, in every process, unless `large` computes what `model` does; `place` has the source's folder."""
    sharded.save(large, place / "target")
    with _deciding() as together:
        together(lambda: _by_the_files(plan, place) if dist.get_rank() == 0 else None)
        if plan.policy.lossless:
            together(lambda: _as_they_are(model, large, plan, place))


@contextmanager
def _deciding() -> Iterator[Callable[[Callable[[], None]], None]]:
    """A function that does its work in every process, and raises in all of them if it failed in one."""
    # A group of its own: GPUs give up waiting after minutes, and have nothing to say here.
    group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def together(work: Callable[[], None]) -> None:
        own: Exception | None = None
        try:
            work()
        except Exception as error:  # whatever it is, the others must not wait for an answer that never comes
            own = error
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, own and (str(own) or type(own).__name__), group=group)
        if own is not None:
            raise own
        if (others := next((words for words in said if words), None)) is not None:
            raise NotVerified("another process stopped", others)

    try:
        yield together
    finally:
        dist.destroy_process_group(group)


def _by_the_files(plan: Plan, place: Path) -> None:
    """The weights that were written: all that an expansion is verified by."""
    with open_source(place / "source") as source, open_source(place / "target") as target:
        measured(plan, source, target)


def _as_they_are(model: Any, large: Any, plan: Plan, place: Path) -> None:
    """Both models as they are in memory, run by all processes on the same inputs."""
    if not (given := _sample(model, plan)):
        return
    with ExitStack() as stack:
        stack.enter_context(_precisely())
        for one in (model, large):
            stack.enter_context(_still(one))
        with deepened(model, plan) as moved:
            small, before = _observed(model, given, place / "source")
            with _rounded(model) as coarsest:
                noise = largest_difference(before, _observed(model, given, place / "source")[1])
        # A few outputs may all be rounded back to what they were, which does not make them exact.
        noise = max(noise, *coarsest)
        loaded, after = _observed(large, given, place / "target")
        back = plan.frames.ways_back if plan.frames else None
        with open_source(place / "source") as source, open_source(place / "target") as target:
            found = compared(
                source,
                target,
                Outputs.of(small, before, given, noise=noise, moved=moved.most),
                Outputs.of(loaded, after, given),
                tolerance=_tolerance(noise),
                back=back,
            )
    if not found.passed:
        raise NotVerified(
            f"nothing was changed: run by all processes, the larger model is not the same function ({found.reason()})",
            "check what `shard` does to it, or grow with verify=False",
        )


def _sample(model: PreTrainedModel, plan: Plan) -> list[View]:
    """The first inputs that the files were compared on; none if they are found by running a model, which costs more."""
    bodiless = skeleton(plan.source_config)
    with_plain_outputs(bodiless.config)
    try:
        view = views(bodiless)[0]
    except LemonxError:
        return []
    # The model is run as it is: without a padding token on one text, which has none.
    rows = slice(1 if getattr(model.config, "pad_token_id", 0) is None else None)
    return [View(view.name, {name: value[rows] for name, value in view.inputs.items()})]


def _observed(model: PreTrainedModel, given: list[View], origin: Path) -> tuple[Loaded, dict[Name, torch.Tensor]]:
    loaded = Loaded(model, frozenset(), frozenset(), (), origin)
    return loaded, observe(loaded, given, seed=0)[1]


def _tolerance(noise: float) -> tuple[float, str]:
    """By how much the outputs of two models may differ that compute the same, each with roundings of its own."""
    found = min(WIRING, max(EXACT_TOLERANCE, MULTIPLE * noise))
    return found, f"{MULTIPLE:g} times {noise:.1e}, by which rounding what every module gives out moves the outputs"


@contextmanager
def _rounded(model: torch.nn.Module) -> Iterator[set[float]]:
    """A context in which all that a module with weights gives out is moved at random, by as much as it may be rounded.

    That is once in its dtype; and a sum of n products that are rounded one by one is off by about the root of n
    roundings of its usual size. Yields the sizes of single ones.
    """
    generators: dict[torch.device, torch.Generator] = {}
    roundings = {0.0}

    def moved(tensor: Any, terms: int) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return tensor
        rng = generators.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(1))
        # Sums are kept in float32 at least, whatever is given out in the end.
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        once, summed = (torch.finfo(kind).eps / 2 for kind in (tensor.dtype, wide.dtype))
        roundings.add(once)
        noise = torch.rand(wide.shape, generator=rng, dtype=wide.dtype, device=wide.device).mul_(2).sub_(1)
        usual = wide.pow(2).mean().sqrt()
        return (wide + noise * (once * (wide.abs() + usual) + summed * terms**0.5 * usual)).to(tensor.dtype)

    def hook(module: Any, _: Any, written: Any) -> Any:
        terms = max(
            weight.numel() // max(1, len(weight)) for weight in module._parameters.values() if weight is not None
        )
        if isinstance(written, tuple):
            return tuple(moved(part, terms) for part in written)
        return moved(written, terms)

    with_weights = (module for module in model.modules() if any(p is not None for p in module._parameters.values()))
    handles = [module.register_forward_hook(hook) for module in with_weights]
    try:
        yield roundings
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _still(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model does not train; then its modules have their modes, and the processes their slices."""
    modes: Mapping[torch.nn.Module, bool] = {module: module.training for module in model.modules()}
    model.eval()
    # Outputs are compared by name.
    named, model.config.return_dict = model.config.return_dict, True
    try:
        yield
    finally:
        model.config.return_dict = named
        for module, training in modes.items():
            module.training = training
        free_gathered(model)


@contextmanager
def _precisely() -> Iterator[None]:
    """A context in which products of float32 are those of float32: in fewer bits they would hide what is compared."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions
