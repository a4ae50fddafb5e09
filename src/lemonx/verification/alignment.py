"""Maps an output of the wider model back to the source's: its first entries, or a left inverse of a frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np

# How the names begin of what a model without a head gives out.
GIVEN_OUT = ("last_hidden_state", "pooler_output", "text_embeds", "image_embeds", "feature_maps")
# All ways from hidden states of a width to the source's, as matrices with a row for every entry of the source's.
Back = Callable[[int], Sequence["np.ndarray"]]


def aligned(name: str, reference: torch.Tensor, wide: torch.Tensor, back: Back | None) -> torch.Tensor:
    """An output of the target in the form of the source's; it keeps another shape if there is no such map."""
    # A base model's output is wider: the inverse of an expansion that copies reads the first entries.
    first = _first_entries(reference, wide)
    if back is None or not name.startswith(GIVEN_OUT) or first.shape != reference.shape:
        return first
    return _nearest(reference, [first, *_through(back, reference, wide)])


def _first_entries(reference: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The first entries, as many as the source has; for vectors of length one, the direction of these entries."""
    # Features of images have their channels on another axis than the last.
    first = wide[tuple(slice(size) for size in reference.shape)] if wide.ndim == reference.ndim else wide
    if wide.shape[-1] == reference.shape[-1] or first.shape != reference.shape:
        return first
    return _of_length_one(first) if _are_of_length_one(reference, wide) else first


def _are_of_length_one(reference: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether they have length one in the source; then they have it in the target too, up to rounding."""
    return all(bool(((x.norm(dim=-1) - 1).abs() < near).all()) for x, near in ((reference, 1e-9), (wide, 1e-4)))


def _of_length_one(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _nearest(reference: torch.Tensor, ways: list[torch.Tensor]) -> torch.Tensor:
    """The best of these left inverses: a spec does not say which expansion the output has."""
    return min(ways, key=lambda other: float((reference - other).detach().abs().max()))


def _through(back: Back, reference: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """The states as the source would have them; vectors of length one keep that length."""
    # The maps of a backbone have their channels in front of height and width.
    sizes = zip(reference.shape, states.shape, strict=True)
    axis = next((i for i, (narrow, wide) in enumerate(sizes) if narrow != wide), -1)
    moved = states.movedim(axis, -1)
    ways = [(moved @ torch.from_numpy(way).T).movedim(-1, axis) for way in back(moved.shape[-1])]
    fitting = [way for way in ways if way.shape == reference.shape]
    return [_of_length_one(way) if _are_of_length_one(reference, states) else way for way in fitting]
