"""Training data: examples for a task, split into training and validation, in the form that a model's forward takes.

A data section names its `kind`; the other keys are the options of that kind (kinds.py lists the kinds):

    data: {kind: stdlib, length: 64}
    data: {kind: text, path: corpus/, length: 128}
    data: {kind: glue, name: mrpc, path: glue/MRPC}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx_lab.data.kinds import TASKS, describe, options

if TYPE_CHECKING:
    import torch

    from lemonx_lab.data.examples import Examples

__all__ = ["TASKS", "Prepared", "describe", "options", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """Examples for a Trainer: dicts of tensors that the model's forward takes, labels included.

    `collate` makes a batch of examples. `digest` is a sha256 of the data as read. `model` holds the config fields that
    the data decides (vocab_size, num_labels, image_size ...). `metrics` maps (predictions, labels) to figures. `length`
    is the largest number of tokens in an example. The randomness of an example is a function of (seed, epoch, index):
    `train.set_epoch(epoch)` at the start of each epoch gives fresh draws.
    """

    train: Examples
    validation: Examples
    collate: Callable[[list[Mapping[str, torch.Tensor]]], dict[str, torch.Tensor]]
    digest: str
    model: Mapping[str, Any]
    metrics: Callable[[Any, Any], dict[str, float]] | None = None
    length: int | None = None


def prepare(
    task: str,
    data: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None,
    seed: int,
    folder: Path | str | None = None,
) -> Prepared:
    """The examples of a data section for a task, in the form that the model of `config` reads.

    `folder` is the source checkpoint's, for its tokenizer. The validation set does not depend on `seed`.
    """
    from lemonx_lab.data.model import Model, require_fit

    chosen = options(task, data)
    prepared = chosen.prepare(task, Model(config or {}, None if folder is None else Path(folder)), seed)
    if config is not None:
        require_fit(prepared, config)
    return prepared
