"""Where the parameters of a model stand in its file: each in a tensor of its own, or fused ones in several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lemonx.errors import Refused
from lemonx.models.building import disk_names, held_in, stored_as, stored_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Held:
    """The parameters of a model, by module name, and the tensors on disk that hold them.

    Where transformers only renames tensors, each is held in one, as it is. Where it fuses them (the experts of a
    layer), the numbers of a parameter are followed into its file one by one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        try:
            self.names = {name: [disk] for name, disk in disk_names(model).items()}
            self._fused = False
        except Refused:
            self.names = held_in(model)
            self._fused = True

    @cached_property
    def _stored(self) -> dict[str, tuple[int, ...]]:
        return stored_shapes(self._model)

    @cached_property
    def holders(self) -> dict[str, str]:
        """The parameter that each tensor on disk belongs to; one that is held in no single parameter is left out."""
        found: dict[str, list[str]] = {}
        for name, disks in self.names.items():
            for disk in disks:
                found.setdefault(disk, []).append(name)
        return {disk: names[0] for disk, names in found.items() if len(names) == 1}

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor of a parameter's shape as the tensors on disk that would hold it."""
        return stored_as(self._model, name, tensor) if self._fused else {self.names[name][0]: tensor}

    def holder(self, disk: str, shape: torch.Size) -> str | None:
        """The parameter that a tensor on disk of this shape belongs to; None if the model has no such tensor."""
        if self._stored.get(disk) != tuple(shape):
            return None
        if disk not in self.holders:
            raise _not_followed(f"{disk} holds several parameters of the model")
        return self.holders[disk]

    def laid_out(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors, by their names on disk, in the shapes of the parameters that hold them; 0 where there is none."""
        for name, disks in self.names.items():
            if given := [tensors[disk] for disk in disks if disk in tensors]:
                none = given[0].new_zeros(())
                yield name, self.joined(name, {d: tensors.get(d, none.expand(self._stored[d])) for d in disks})

    def joined(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """What `split` makes these parts of."""
        if not self._fused:
            return parts[self.names[name][0]]
        shape = self.shapes[name]
        places = self.split(name, torch.arange(torch.Size(shape).numel()).view(shape))
        whole = torch.empty(torch.Size(shape).numel(), dtype=next(iter(parts.values())).dtype)
        filled = torch.zeros(len(whole), dtype=torch.bool)
        for disk, place in places.items():
            whole[place.flatten()] = parts[disk].flatten()
            filled[place.flatten()] = True
        if not bool(filled.all()):
            raise _not_followed(f"{name} is not stored as it is computed with")
        return whole.view(shape)


def _not_followed(why: str) -> Refused:
    return Refused(
        f"{why}, so it is not followed from its file into training",
        "expand without --with-optimizer and without a ramp, and train all of it",
    )
