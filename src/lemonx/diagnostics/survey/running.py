"""Runs a tiny model of any kind: which inputs it takes, what it computes from them, and which parameters that reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from lemonx.diagnostics.survey.inputs import KINDS, ROWS, Batch, Media
from lemonx.verification.float64 import Float64

_FEATURES = re.compile(r"features:\D{0,12}(\d+)")


def outputs(model: Any, batch: Batch, *, grad: bool = False) -> list[torch.Tensor]:
    """Every floating-point output in order; what the model draws at random is drawn from one seed."""
    taken = inspect.signature(model.forward).parameters
    asked = {"return_dict": True, "use_cache": False}
    asked = {name: value for name, value in asked.items() if name in taken}
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad), Float64():
        torch.manual_seed(0)
        return [x for x in _tensors(model(**batch, **asked)) if x.is_floating_point()]


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _tensors(value)


def find_inputs(model: Any, seed: int = 0) -> tuple[Batch, dict[str, Exception]]:
    """Inputs that the model runs on, of every kind that it takes; and why it does not run on a kind that it names."""
    media = Media(model, seed)
    works: dict[str, Batch] = {}
    failed: dict[str, Exception] = {}
    kinds = {"image": media.pictures(), "video": media.videos(), "audio": media.sounds(), "series": media.series()}
    if "input_ids" in media.taken:
        kinds["text"] = [{}]
    elif not any(kinds.values()):
        kinds["text"] = media.anything()
    for kind, ways in kinds.items():
        for way in ways:
            try:
                works[kind] = _completed(model, media, {kind: way})
                failed.pop(kind, None)
                break
            except Exception as error:
                failed.setdefault(kind, error)
    if not works:
        raise next(iter(failed.values()), ValueError("no input is known that it takes"))
    if len(works.keys() - {"text"}) > 1:
        try:
            ways = {kind: {n: v for n, v in batch.items() if n not in _TEXT} for kind, batch in works.items()}
            return _completed(model, media, ways), failed
        except Exception as error:
            failed["all at once"] = error
    return next(iter(works.values())), failed


_TEXT = ("input_ids", "attention_mask", "decoder_input_ids", "token_type_ids", "mm_token_type_ids", "bbox")


def _completed(model: Any, media: Media, ways: dict[str, Batch]) -> Batch:
    """Inputs with the text that goes with them, tried: an exception if the model does not run on them."""
    given = {name: value for way in ways.values() for name, value in way.items()}
    media_ways = {kind: way for kind, way in ways.items() if kind in KINDS and media.placeholder(kind) is not None}
    places = {kind: _features(model, kind, way) // ROWS for kind, way in media_ways.items()}
    begun = media.decoded()
    try:
        batch = {**media.texts({kind: n for kind, n in places.items() if n}), **begun, **given}
        _check(model, batch)
    except Exception as error:
        needed = _FEATURES.search(str(error))
        if len(places) != 1 or needed is None:
            raise
        batch = {**media.texts({kind: int(needed[1]) // ROWS for kind in places}), **begun, **given}
        _check(model, batch)
    return batch


def _check(model: Any, batch: Batch) -> None:
    found = outputs(model, batch)
    if not found:
        raise ValueError("no output is a tensor of numbers")
    if not all(bool(torch.isfinite(x[~torch.isinf(x)]).all()) for x in found):
        raise ValueError("an output is not a number")


def _features(model: Any, kind: str, way: Batch) -> int:
    """How many vectors the model makes of a picture or sound; 0 if it does not say."""
    get = getattr(model, f"get_{kind}_features", None) or getattr(
        getattr(model, "model", None), f"get_{kind}_features", None
    )
    if get is None:
        return 0
    taken = inspect.signature(get).parameters
    given = {name: value for name, value in way.items() if name in taken}
    try:
        with torch.no_grad(), Float64():
            found = get(**given)
    except Exception:
        return 0
    found = getattr(found, "pooler_output", found)
    return sum(x.numel() // x.shape[-1] for x in _tensors(found))


def unread(model: Any, batch: Batch) -> tuple[float, list[str]]:
    """The share of all numbers in parameters that the outputs depend on, and the names of those that are never read.

    Told from the gradient of a random sum of all outputs; in a stack of matrices, of which some may be experts that no
    token is sent to, matrix by matrix.
    """
    generator = torch.Generator().manual_seed(1)
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.grad = None
        parameter.requires_grad_(parameter.is_floating_point())
    with Float64():
        found = [x for x in outputs(model, batch, grad=True) if x.requires_grad]
        sums = [(torch.randn(x.shape, generator=generator) * x.nan_to_num(0, 0, 0)).sum() for x in found]
        torch.stack(sums).sum().backward()
    read, silent = 0, []
    for name, parameter in named.items():
        grad, parameter.grad = parameter.grad, None
        stack = grad if grad is not None and grad.ndim == 3 else None
        if stack is not None:
            read += int((stack.flatten(1) != 0).any(1).sum()) * stack[0].numel()
        elif grad is not None and bool(grad.any()):
            read += parameter.numel()
        if grad is None or not bool(grad.any()):
            silent.append(name)
    return read / max(1, sum(p.numel() for p in named.values())), silent
