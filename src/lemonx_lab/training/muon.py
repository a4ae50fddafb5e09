"""Muon for the matrices between embedding and head, and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers with one list of groups and one state, so that a schedule and a checkpoint see one optimizer.

    `groups` are Trainer's own. Their matrices that are in `hidden` go to Muon, the other parameters to `adamw`.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        hidden: set[Tensor],
        muon: Mapping[str, Any],
        adamw: tuple[type[torch.optim.Optimizer], Mapping[str, Any]],
    ) -> None:
        kind, options = adamw
        others = [{**group, "params": [p for p in group["params"] if p not in hidden]} for group in groups]
        matrices = [p for group in groups for p in group["params"] if p in hidden]
        # Muon's updates are scaled to the size of AdamW's: one learning rate serves both.
        self._parts = [kind(others, **options), torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **muon)]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: Any) -> None:
        """Take over the state of a checkpoint."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let both optimizers work on the groups and the state of this one."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state, part.param_groups = self.state, [next(groups) for _ in part.param_groups]

    def step(self, closure: Any = None) -> Any:
        """Update every parameter."""
        for part in self._parts:
            part.step(closure)


def hidden_matrices(model: PreTrainedModel) -> set[Tensor]:
    """The trained weights of linear maps between hidden states: no look-up table, and not the head."""
    head = model.get_output_embeddings()
    linear = (module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head)
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return {module.weight for module in linear if module.weight.requires_grad} - tables
