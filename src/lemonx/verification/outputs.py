"""What a model gives out on a sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadCheckpoint, NotVerified
from lemonx.verification.generation_settings import generation_settings
from lemonx.verification.loading import Loaded, Name, all_outputs, new_cache, running
from lemonx.verification.sample import View, taken

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHED = "with a cache"


@dataclass(frozen=True)
class Outputs:
    """What one run gave; `weights`: the most bytes of parameters in memory at once, where that was measured.

    A source may be run as its deeper target must compute it. `plain`: its outputs when it is not; `moved`: how far that
    moves its stream.
    """

    found: dict[Name, torch.Tensor]
    views: list[View]
    odd: frozenset[str]
    missing: frozenset[str]
    shortened: tuple[str, ...]
    tokens: Any = None
    noise: float | None = None
    weights: int = 0
    plain: dict[Name, torch.Tensor] | None = None
    moved: float = 0.0

    @property
    def writes(self) -> bool:
        """Whether it generated text."""
        return self.tokens is not None

    @property
    def as_it_is(self) -> dict[Name, torch.Tensor]:
        return self.found if self.plain is None else self.plain

    @classmethod
    def of(cls, loaded: Loaded, found: dict[Name, torch.Tensor], used: list[View], **more: Any) -> Outputs:
        return cls(found, used, loaded.odd, loaded.missing, loaded.shortened, **more)

    @property
    def inputs(self) -> str:
        """The sample in words."""
        return "; ".join(str(view) for view in self.views)


def given_the_same(
    source: Checkpoint, target: Checkpoint, run: Callable[[list[View] | None], Outputs], used: list[View]
) -> Outputs:
    """What a target makes of the source's inputs; where it runs, but not on these, the two are different models."""
    try:
        return run(used)
    except BadCheckpoint as error:
        run(None)  # if it runs on nothing at all, then that is what is wrong
        raise NotVerified(
            f"does not take the inputs of {str(source.origin)!r}, so they are different models ({error.found})",
            "compare a model with its own expansion",
            file=target.origin,
        ) from error


def observe(loaded: Loaded, given: list[View] | None, seed: int) -> tuple[list[View], dict[Name, torch.Tensor]]:
    """What a model gives out for these views, or for its own; of the latter those that it takes."""

    def run(view: View) -> dict[Name, torch.Tensor]:
        with running(loaded.origin, view):
            return all_outputs(loaded, view)

    if given is not None:
        return given, {name: value for view in given for name, value in run(view).items()}
    (first, *others), found = taken(loaded.model, run, seed)
    used = [first]
    for view in others:
        with suppress(BadCheckpoint):  # pictures of another size, say: not every model takes them
            found |= run(view)
            used.append(view)
    return used, found


def check_inputs(loaded: Loaded, given: list[View] | None) -> None:
    """NotVerified if a model does not read what the other was given: texts are not images."""
    reads = loaded.model.main_input_name
    if given and reads not in given[0].inputs and reads in inspect.signature(loaded.model.forward).parameters:
        other = next(iter(given[0].inputs))
        raise NotVerified(f"reads {reads}, the source {other}", "they are different models", file=loaded.origin)


def generated(model: PreTrainedModel, view: View) -> tuple[torch.Tensor, dict[Name, torch.Tensor]]:
    """Tokens of greedy generation with a cache, and the logits that they were chosen by."""
    mask = view.inputs.get("attention_mask")
    # A text that a decoder continues has no padding behind it.
    rows = slice(None) if mask is None or model.config.is_encoder_decoder else mask[:, -1].bool()
    result: Any = model.generate(  # pyright: ignore[reportCallIssue]
        **{name: value[rows] for name, value in view.inputs.items()},
        **new_cache(model),
        generation_config=generation_settings(model),
    )
    return result.sequences, {("logits", CACHED): torch.stack(result.logits, 1).double()}
