"""Which inputs a model of any kind takes, found by running it, and what it computes from them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from lemonx.verification.float64 import Float64
from lemonx.verification.media import KINDS, ROWS, Batch, Media

_FEATURES = re.compile(r"features:\D{0,12}(\d+)")
# An output by its name, or by its place: "logits", "1", "past.0".
Outputs = dict[str, torch.Tensor]


def outputs(model: Any, batch: Batch, *, grad: bool = False) -> Outputs:
    """Every floating-point output; what the model draws at random is drawn from one seed."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad), Float64():
        torch.manual_seed(0)
        found = model(**batch, **asked(model))
        return {name: x for name, x in tensors(found) if x.is_floating_point()}


def asked(model: Any) -> dict[str, bool]:
    """Outputs by their names, and no cache, from a model that can be asked for that."""
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in (("return_dict", True), ("use_cache", False)) if name in taken}


def tensors(found: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a model gives out, each with its name."""
    if isinstance(found, torch.Tensor):
        yield name, found
    elif isinstance(found, dict | list | tuple):
        pairs = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in pairs:
            yield from tensors(value, f"{name}.{key}".lstrip("."))


def find_inputs(model: Any, seed: int = 0) -> tuple[Batch, dict[str, Exception]]:
    """Inputs that the model runs on, of every kind that it takes; and why it does not run on a kind that it names."""
    if type(model).forward is torch.nn.Module.forward:
        raise ValueError("its class has no forward of its own")
    media = Media(model, seed)
    works: dict[str, Batch] = {}
    failed: dict[str, Exception] = {}
    kinds = {"image": media.pictures(), "video": media.videos(), "audio": media.sounds(), "series": media.series()}
    if "input_ids" in media.taken:
        kinds["text"] = media.streams()
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
    found = outputs(model, batch).values()
    if not found:
        raise ValueError("no output is a tensor of numbers")
    if not all(bool(torch.isfinite(x[~torch.isinf(x)]).all()) for x in found if not x.is_meta):
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
    return sum(x.numel() // x.shape[-1] for _, x in tensors(found))
