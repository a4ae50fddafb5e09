"""The weights in what a training script saved: beside its counts, under the names that wrappers give, perhaps twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lemonx.errors import BadCheckpoint

# Where training scripts keep the weights, and what torch's wrappers put into their names: torch.compile anywhere, as it
# may wrap single blocks, DistributedDataParallel and AveragedModel at the beginning.
_INSIDE = ("state_dict", "model_state_dict", "model")
_COMPILED, _PARALLEL = "_orig_mod.", "module."
# What AveragedModel counts beside its weights.
_COUNTED = "n_averaged"
# What a checkpoint of Lightning holds beside its weights, which are those of a module with the model as an attribute.
_LIGHTNING = "pytorch-lightning_version"
# Averages that are kept as a list, without names, as torch_ema and diffusers do.
_AVERAGE = re.compile("ema|shadow|averag|swa", re.IGNORECASE)
# Scripts keep their sets in the first levels (`callbacks.EMA.weights`); below these are the states of parameters.
_DEPTH = 4


def weights_in(content: Any, named: str | None, path: Path) -> Any:
    """The weights under this name; without one, all there are: BadCheckpoint if they are there more than once."""
    if not isinstance(content, dict):
        return content
    lightning = _LIGHTNING in content
    if named is not None:
        found = next((inner for under, inner in _containers(content) if under == named), None)
        if not isinstance(found, dict):
            there = [under for under, inner in _containers(content) if isinstance(inner, dict) and _tensors(inner)]
            raise BadCheckpoint(
                f"holds no weights by name under {named[:80]!r}",
                f"name others with --weights: {_listed(there)}" if there else "leave --weights out",
                file=path,
            )
        return _plain(found, lightning)
    key = next((key for key in _INSIDE if isinstance(content.get(key), dict)), None)
    weights = _plain(content if key is None else content[key], lightning)
    if key is None or not isinstance(weights, dict):
        return weights
    others = [
        under for under, inner in _containers(content) if under != key and _is_again(weights, under, inner, lightning)
    ]
    if others:
        raise BadCheckpoint(
            f"holds the model's weights once more (an average?): under {_listed([key, *others])}",
            f"say which to read, and the others are left out: --weights {key}",
            file=path,
        )
    return weights


def _listed(names: list[str]) -> str:
    shown = " and ".join(repr(name[:80]) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _plain(content: Any, lightning: bool) -> Any:
    """Weights without what wrappers put in front of their names."""
    if not isinstance(content, dict) or not content:
        return content
    if _COUNTED in content and all(str(name).startswith(_PARALLEL) for name in content.keys() - {_COUNTED}):
        content = {name: tensor for name, tensor in content.items() if name != _COUNTED}
    plain = {str(name).replace(_COMPILED, ""): tensor for name, tensor in content.items()}
    content = plain if len(plain) == len(content) and all(isinstance(name, str) for name in content) else content
    while content and all(str(name).startswith(_PARALLEL) for name in content):
        content = {name.removeprefix(_PARALLEL): tensor for name, tensor in content.items()}
    if lightning and len({str(name).partition(".")[0] for name in content}) == 1:
        content = {str(name).partition(".")[2]: tensor for name, tensor in content.items()}
    return content


def _containers(content: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Every dict and every list inside, once, with the keys that lead to it."""
    seen, level = {id(content)}, [("", content)]
    for _ in range(_DEPTH):
        inner = list[tuple[str, Any]]()
        for above, container in level:
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, value in items:
                if isinstance(value, dict | list) and id(value) not in seen:
                    seen.add(id(value))
                    inner.append((f"{above}.{key}" if above else str(key), value))
        yield from inner
        level = inner


def _tensors(found: Any) -> list[Any]:
    import torch

    values = found.values() if isinstance(found, dict) else found
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_again(weights: dict[Any, Any], under: str, found: Any, lightning: bool) -> bool:
    """Whether these are tensors of the same names and shapes for most of the weights; or of the same shapes, listed."""
    if not (tensors := _tensors(found)):
        return False
    if isinstance(found, list):
        shapes, own = (Counter(tuple(tensor.shape) for tensor in _tensors(one)) for one in (found, weights))
        return bool(_AVERAGE.search(under)) and 2 * len(tensors) >= len(weights) and shapes <= own
    plain = _plain(found, lightning)
    shapes, own = (
        {name: tuple(value.shape) for name, value in one.items() if hasattr(value, "shape")} for one in (plain, weights)
    )
    return 2 * len(shapes.items() & own.items()) >= len(weights)
